# SPDX-License-Identifier: Apache-2.0
"""Attention for JAX, by XLA's foreign function interface, on CPUs and GPUs: under jit, grad, vmap and shard_map, and of
sharded arrays.

    from fattn.jax import attention, dot_product_attention

dot_product_attention has the signature of jax.nn's.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import math
from typing import Any, Sequence

import jax
import jax.experimental.custom_partitioning
import jax.export
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fattn import _c
from fattn._arrays import View, contiguous_strides
from fattn._calls import integers, number, unhashable, window_of
from fattn._devices import handle
from fattn._errors import InvalidArgument, InvalidShape, NoDevice, Unsupported
from fattn._plans import PlanHandle
from fattn._problem import Description, Options

try:
    from jax._src.sharding_impls import parse_flatten_op_sharding as _parse
except ImportError:
    _parse = None

__all__ = ["attention", "disabled_checks", "dot_product_attention"]

Array = Any
Window = Sequence[int | None] | int | None

try:
    _lib = ctypes.CDLL(_c.find("libfattn_xla.so"))
except OSError as error:
    raise ImportError(f"fattn.jax: cannot load libfattn_xla.so ({error}). pip builds it. Without pip, Meson's option "
                      "-Dpython=enabled builds it in the build folder's python/, which LD_LIBRARY_PATH must name"
                      ) from error
for _platform, _handler in (("cpu", _lib.fattn_xla_host), ("CUDA", _lib.fattn_xla_gpu),
                            ("ROCM", _lib.fattn_xla_gpu)):
    jax.ffi.register_ffi_target("fattn_attention", jax.ffi.pycapsule(_handler), platform=_platform)

disabled_checks = (jax.export.DisabledSafetyCheck.custom_call("fattn_attention"),)
"""The value of jax.export's disabled_checks for programs that call fattn:

    exported = jax.export.export(jax.jit(f), disabled_checks=fattn.jax.disabled_checks)(q, k, v)

A process that runs such a program imports fattn.jax first.
"""

# None if this JAX takes no rules of Shardy, or cannot translate a sharding into axes of the mesh.
_custom_partitioning: Any = jax.experimental.custom_partitioning.custom_partitioning
if _parse is None or "sharding_rule" not in inspect.signature(_custom_partitioning.def_partition).parameters:
    _custom_partitioning = None

# Arrays of a call, in the order of _Arrays; the seed is one uint64, as two uint32.
_INPUTS = ("q", "k", "v", "bias", "mask", "alibi_slopes", "sink", "seqused_q", "seqused_k", "seqstart_k",
           "seed_ptr", "k_descale", "v_descale")


def _view(name: str, a: Any) -> View:
    shape = tuple(a.shape)
    if not all([isinstance(n, int) for n in shape]):
        raise Unsupported(f"{name} has shape {shape}: a program is made for one shape, and symbolic ones are not taken")
    if name == "seed_ptr":  # as the library reads it, but for the offset, which stays 0
        return View((2,), (1,), "uint64", "cpu")
    return View(shape, contiguous_strides(shape), a.dtype.name, "cpu")


def _call(options: Options, arrays: dict[str, Any]) -> dict[str, Any]:
    """One run. Results by their names."""
    arrays = dict(zip(arrays, _alike(*arrays.values())))
    made: dict[str, Any] = _runner(options, tuple(arrays))(*arrays.values())
    return made


@functools.lru_cache(maxsize=512)
def _runner(options: Options, names: tuple[str, ...]) -> Any:
    """A run as a function of the arrays with these names. It is not differentiable: _attention has the gradients, and
    differentiating this function would be a second derivative. It is made once, so that JAX finds the program that it
    has compiled for it."""
    @jax.custom_batching.custom_vmap  # type: ignore[untyped-decorator]
    def run(*arrays: Any) -> dict[str, Any]:
        return _run_parts(options, dict(zip(names, arrays)))

    @run.def_vmap  # type: ignore[untyped-decorator]
    def run_each(n: int, mapped: Sequence[bool], *arrays: Any) -> tuple[dict[str, Any], dict[str, bool]]:
        made = _run_each(options, n, dict(zip(names, arrays)), {a for a, is_mapped in zip(names, mapped) if is_mapped})
        return made, dict.fromkeys(made, True)

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def run_once(*arrays: Any) -> dict[str, Any]:
        made: dict[str, Any] = run(*arrays)
        return made

    @run_once.defjvp  # type: ignore[untyped-decorator]
    def refuse(primals: Any, tangents: Any) -> Any:
        raise Unsupported("attention has no second derivatives")

    return jax.jit(run_once)


def _run(options: Options, arrays: dict[str, Any]) -> dict[str, Any]:
    """A run without division: the problem is part of the program, the arrays are its arguments."""
    views = {name: _view(name, a) for name, a in arrays.items()}
    description = Description(options, views, False)
    made = description.backward() if options.op == _c.BACKWARD else description.forward()
    problem = np.frombuffer(description.memory, np.uint8)[:ctypes.sizeof(_c.Problem)].copy()
    _check(options, description)
    fields = [getattr(_c.Buffers, name).offset for name in (*arrays, *(m.name for m in made))]
    results = [jax.ShapeDtypeStruct(m.shape, jnp.dtype(m.dtype)) for m in made]

    def on(backend: str) -> Any:
        def run(*args: Any) -> Any:
            return jax.ffi.ffi_call("fattn_attention", results)(
                *args, problem=problem, fields=np.array(fields, np.int64), backend=backend)
        return run

    args = tuple(arrays.values())
    if options.device is not None:
        outputs = on(options.device)(*args)
    else:
        outputs = jax.lax.platform_dependent(
            *args, cpu=on("cpu"), cuda=on("cuda"), rocm=on("hip"),
            default=lambda q, *others: on("cpu")(_check_platforms.bind(q), *others))
    named = {m.name: _varying(a, _axes_of(arrays["q"])) for m, a in zip(made, outputs)}
    return _clear_rows(options, arrays, named) if "seqused_q" in arrays else named


# q; lowering it raises Unsupported if a program is for other platforms as well. (Older versions of JAX lower the default
# of platform_dependent for all platforms.)
_check_platforms = jax.extend.core.Primitive("fattn_check_platforms")
_check_platforms.def_abstract_eval(lambda q: q)


def _lower_check(context: Any, q: Any) -> list[Any]:
    others = sorted(set(context.module_context.platforms) - {"cpu", "cuda", "rocm"})
    if others:
        raise Unsupported(f"a program with fattn runs on CPUs and on GPUs of NVIDIA and AMD, not on {', '.join(others)}")
    return [q]


mlir.register_lowering(_check_platforms, _lower_check)


def _clear_rows(options: Options, arrays: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """The results of a run, which does not write rows past seqused_q. They become like rows without keys."""
    used, bshd = arrays["seqused_q"], options.layout == "bshd"
    exists = jnp.arange(arrays["q"].shape[1 if bshd else 2])[None, None] < used[:, None, None]  # (batch, 1, rows)
    with_channels = exists[:, 0, :, None, None] if bshd else exists[..., None]
    kept = {"o": (with_channels, 0), "dq": (with_channels, 0), "lse": (exists, -jnp.inf)}
    return {name: jnp.where(kept[name][0], a, kept[name][1]) if name in kept else a for name, a in made.items()}


def _check(options: Options, description: Description) -> None:
    """Raises the errors that a run of the problem would raise. Its device is not known yet, but a CPU supports
    everything that a GPU supports."""
    try:
        device = handle(options.device or "cpu")
    except NoDevice:  # the program may be for another machine
        return
    description.problem.pointer_alignment = 16
    PlanHandle(device, ctypes.addressof(description.problem))


# --- Arrays that are divided among devices --------------------------------------------------------


def _run_parts(options: Options, arrays: dict[str, Any]) -> dict[str, Any]:
    """A run in which each device computes its part of the batch and of the heads, if the partitioner of a program has
    divided q in this way. In a shard_map arrays are parts already."""
    if _custom_partitioning is None or _in_shard_map():
        return _run(options, arrays)
    made: dict[str, Any] = jax.eval_shape(functools.partial(_run, options), arrays)
    names, sizes = tuple(made), _sizes(options, arrays["q"].shape, arrays["k"].shape)
    inputs = {name: _axes_in(name, a.shape, options, sizes) for name, a in arrays.items()}
    outputs = {name: _axes_in(name, made[name].shape, options, sizes) for name in names}

    @_custom_partitioning  # type: ignore[untyped-decorator]
    def run(*args: Any) -> tuple[Any, ...]:
        results = _run(options, dict(zip(inputs, args)))
        return tuple([results[name] for name in names])

    def partition(mesh: Any, args: Any, _: Any) -> tuple[Any, ...]:
        q = args[0].sharding
        if mesh.empty:  # the mesh is unknown
            mesh = Mesh(np.array(sorted(q.device_set, key=lambda device: device.id)), ("all",))
        spec = _spec_of(q, mesh)
        divided: dict[str, Any] = {}  # the axes of the mesh
        for axis in ("batch", "heads"):
            over = spec[inputs["q"].index(axis)] if axis in inputs["q"] else None
            over = () if over is None else (over,) if isinstance(over, str) else tuple(over)
            divided[axis] = over if sizes[axis] % math.prod([mesh.shape[n] for n in over]) == 0 else ()
        counts = {axis: math.prod([mesh.shape[n] for n in over]) for axis, over in divided.items()}
        if "seed_ptr" in arrays and math.prod(counts.values()) > _PLACES:
            divided = dict.fromkeys(divided, ())

        def placed(arrays: dict[str, tuple[str, ...]]) -> tuple[Any, ...]:
            return tuple([NamedSharding(mesh, PartitionSpec(*[divided.get(axis) or None for axis in axes]))
                          for axes in arrays.values()])

        def part(*args: Any) -> tuple[Any, ...]:
            results = _run_at_place(options, dict(zip(inputs, args)), divided, counts)
            # Gradients are sums over the axes that an array does not have.
            over = {name: sum([divided[axis] for axis in divided if axis not in outputs[name]], ())
                    for name in names if options.op == _c.BACKWARD}
            return tuple([jax.lax.psum(results[name], over[name]) if over.get(name) else results[name]
                          for name in names])

        return mesh, part, placed(outputs), placed(inputs)

    run.def_partition(partition, decode_shardings=False, sharding_rule=_rule(inputs, outputs, arrays, made, sizes))
    return dict(zip(names, run(*arrays.values())))


# The largest number of parts with dropout.
_PLACES = 64


def _run_at_place(options: Options, arrays: dict[str, Any], divided: dict[str, Any],
                  counts: dict[str, int]) -> dict[str, Any]:
    """_run() of a part. divided, counts: the axes of the mesh that divide batch and heads, and into how many parts.

    The pattern of dropout depends on positions in the whole arrays, which are part of a problem. So the program has a
    problem for each place, and each device runs its own.
    """
    over = [axis for axis in divided if divided[axis]]
    if "seed_ptr" not in arrays or not over:
        return _run(options, arrays)
    q = arrays["q"].shape
    batch, heads = q[0], q[2 if options.layout == "bshd" else 1]
    places = [options._replace(batch_offset=b * batch, head_offset=h * heads)
              for b in range(counts["batch"]) for h in range(counts["heads"])]
    here = jax.lax.axis_index(sum([divided[axis] for axis in over], ()))  # the last axis of the mesh varies first
    made: dict[str, Any] = jax.lax.switch(here, [functools.partial(_run, place) for place in places], arrays)
    return made


def _spec_of(sharding: Any, mesh: Any) -> tuple[Any, ...]:
    """Which axes of the mesh divide each axis of an array of rank 4. None, if JAX cannot express the sharding, such as
    that of two heads over half of a mesh axis of four."""
    try:
        spec = _parse(sharding._to_xla_hlo_sharding(4), mesh)[0]
    except Exception:
        spec = ()
    return (*spec, None, None, None, None)


def _in_shard_map() -> bool:
    mesh: Any = jax.sharding.get_abstract_mesh() if hasattr(jax.sharding, "get_abstract_mesh") else None
    return mesh is not None and len(mesh.manual_axes) > 0


def _sizes(options: Options, q: tuple[int, ...], k: tuple[int, ...]) -> dict[str, int]:
    """heads: those of keys, and queries' are divided with them; of queries where there is one head of keys."""
    place = 2 if options.layout == "bshd" else 1
    heads = k[place] if k[place] > 1 else q[place]
    return {"batch": q[0], "heads": heads, "group": q[place] // max(heads, 1)}


def _axes_in(name: str, shape: tuple[int, ...], options: Options, sizes: dict[str, int]) -> tuple[str, ...]:
    """For each axis of an array "batch", "heads", or "" where it is not divided."""
    if name in ("bias", "dbias", "mask", "lse", "dlse"):
        full: tuple[str, ...] = ("batch", "heads", "", "")
        axes = full[:3] if name in ("lse", "dlse") else full[4 - len(shape):]
    elif name in ("alibi_slopes", "sink", "dsink", "k_descale", "v_descale"):
        axes = ("batch", "heads")[2 - len(shape):]
    elif name == "seed_ptr":
        axes = ("",)
    elif len(shape) == 1:
        axes = ("batch",)
    else:
        axes = ("batch", "", "heads", "") if options.layout == "bshd" else ("batch", "heads", "", "")
    whole = {"batch": (sizes["batch"],), "heads": (sizes["heads"], sizes["heads"] * sizes["group"])}
    return tuple([axis if n > 1 and n in whole.get(axis, ()) else "" for axis, n in zip(axes, shape)])


def _rule(inputs: dict[str, tuple[str, ...]], outputs: dict[str, tuple[str, ...]], arrays: dict[str, Any],
          made: dict[str, Any], sizes: dict[str, int]) -> Any:
    """Shardy's rule: axes that are divided together have the same name, and an axis that is not divided has a name of
    its own."""
    whole: list[str] = []  # in the order in which they appear

    def words(axes: tuple[str, ...], shape: tuple[int, ...]) -> str:
        found = []
        for axis, n in zip(axes, shape):
            if axis == "heads" and n != sizes["heads"]:
                found.append("(heads group)")
                if "group" not in whole:
                    whole.append("group")
            elif axis:
                found.append(axis)
            else:
                whole.append(f"a{len(whole)}")
                found.append(whole[-1])
        return " ".join(found)

    rule = " -> ".join([", ".join([words(axes, of[name].shape) for name, axes in side.items()])
                        for side, of in ((inputs, arrays), (outputs, made))])
    groups = {"group": sizes["group"]} if "group" in whole else {}
    return lambda *_: (rule, {"need_replication_factors": tuple(whole), **groups})


# --- Batching -------------------------------------------------------------------------------------


def _run_each(options: Options, n: int, arrays: dict[str, Any], mapped: set[str]) -> dict[str, Any]:
    """n runs; the arrays in `mapped` have a first axis of n values.

    That axis becomes part of the batch, unless this would change the meaning; then there is a run for each value. The
    pattern of dropout depends on the place in the batch, there is one sink for a batch, and gradients of sink and bias
    are sums over a batch.
    """
    run = _runner(options, tuple(arrays))
    q = arrays["q"]
    batch = q.shape[1 if "q" in mapped else 0]
    sums = {name for bit, name in ((_c.OUT_DBIAS, "bias"), (_c.OUT_DSINK, "sink")) if options.outputs & bit}
    bias = arrays.get("bias")
    if bias is not None:
        bias_shape = bias.shape[1 if "bias" in mapped else 0:]
        if len(bias_shape) == 4 and bias_shape[0] == batch or batch == 1:
            sums.discard("bias")
    if "seed_ptr" in arrays or "sink" in mapped or sums:
        made: dict[str, Any] = jax.lax.map(lambda each: run(*(arrays | each).values()),
                                           {name: arrays[name] for name in arrays if name in mapped})
        return made

    def folded(name: str, a: Any) -> Any:
        shape = a.shape[1:] if name in mapped else a.shape
        if name == "sink" or name == "alibi_slopes" and name not in mapped and len(shape) == 1:
            return a
        own = shape  # of one value, with its batch
        if name in ("bias", "mask"):
            own = (1,) * (4 - len(shape)) + shape
            if name not in mapped and own[0] == 1 and not (name == "bias" and options.outputs & _c.OUT_DBIAS):
                return a
            own = (batch, *own[1:])
        elif name == "alibi_slopes":
            own = (batch, shape[-1])
        lead = n if name in mapped else 1
        a = a.reshape(lead, *(1,) * (len(own) - len(shape)), *shape)
        return jnp.broadcast_to(a, (n, *own)).reshape(n * own[0], *own[1:])

    made = run(*[folded(name, a) for name, a in arrays.items()])
    return {name: a.reshape(n, *bias_shape) if name == "dbias" else a.reshape(n, batch, *a.shape[1:])
            for name, a in made.items()}


# --- The axes of a shard_map ----------------------------------------------------------------------


def _axes_of(a: Any) -> tuple[str, ...]:
    """The axes of a shard_map along which `a` differs. Versions of JAX name this differently, and older ones do not
    know it."""
    kind = jax.typeof(a) if hasattr(jax, "typeof") else None
    return tuple(getattr(getattr(kind, "manual_axis_type", None), "varying", None) or getattr(kind, "vma", None) or ())


def _varying(a: Any, axes: Sequence[str]) -> Any:
    """Marks `a` as different along these axes as well, which ffi_call cannot do for its results."""
    new = tuple(axis for axis in axes if axis not in _axes_of(a))
    if not new:
        return a
    return jax.lax.pcast(a, new, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(a, new)


def _alike(*arrays: Any) -> tuple[Any, ...]:
    """The arrays, all marked as different along the axes of any of them. JAX adds up the gradients of those that were
    not."""
    axes = sorted({axis for a in arrays if a is not None for axis in _axes_of(a)})
    return tuple([None if a is None else _varying(a, axes) for a in arrays]) if axes else arrays


# --- Gradients ------------------------------------------------------------------------------------


def _named(arrays: tuple[Any, ...]) -> dict[str, Any]:
    return {name: a for name, a in zip(_INPUTS, arrays) if a is not None}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: Options, *arrays: Any) -> Any:
    made = _call(options, _named(arrays))
    return (made["o"], made["lse"]) if options.return_lse else made["o"]


def _forward(options: Options, *arrays: Any) -> tuple[Any, Any]:
    made = _call(options._replace(return_lse=True), _named(arrays))
    o, lse = made["o"], made["lse"]
    return ((o, lse) if options.return_lse else o), (arrays, o, lse)


def _backward(options: Options, kept: Any, cotangents: Any) -> tuple[Any, ...]:
    arrays, o, lse = kept
    dout, dlse = cotangents if options.return_lse else (cotangents, None)
    named = _named(arrays)
    outputs = _c.OUT_DQ | _c.OUT_DK | _c.OUT_DV
    outputs |= _c.OUT_DBIAS if "bias" in named else 0
    outputs |= _c.OUT_DSINK if "sink" in named else 0
    given = named | {"o": o, "lse": lse, "dout": dout} | ({} if dlse is None else {"dlse": dlse})
    made = _call(options._replace(op=_c.BACKWARD, outputs=outputs, return_lse=False, out_dtype=None), given)
    gradients = {"q": made["dq"], "k": made["dk"], "v": made["dv"]}
    for name in ("bias", "sink"):
        if name in named:
            gradients[name] = made["d" + name].astype(named[name].dtype)
    return tuple(gradients.get(name) for name in _INPUTS)


_attention.defvjp(_forward, _backward)


@jax.custom_jvp  # type: ignore[untyped-decorator]
def _constant(slopes: Any) -> Any:
    return slopes


@_constant.defjvp  # type: ignore[untyped-decorator]
def _refuse(primals: Any, tangents: Any) -> Any:
    raise InvalidArgument("alibi_slopes have no gradient: use jax.lax.stop_gradient()")


def _refuse_traced(**options: Any) -> None:
    """Raises InvalidArgument if one of the options, which are constants of a compiled program, is traced."""
    for name, value in options.items():
        if any([isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)]):
            instead = ", or multiply q by it and let scale be 1.0" if name == "scale" else ""
            raise InvalidArgument(f"{name} is traced, but the program needs its value: name it in jit's "
                                  f"static_argnames{instead}")


def attention(q: Array, k: Array, v: Array, *, causal: bool = False, window: Window = None,
              scale: float | None = None, softcap: float | None = None, bias: Array | None = None,
              mask: Array | None = None, alibi_slopes: Array | None = None, sink: Array | None = None,
              dropout_p: float = 0.0, key: Array | None = None, seqused_q: Array | None = None,
              seqused_k: Array | None = None, seqstart_k: Array | None = None, chunk: int | None = None,
              k_descale: Array | float | None = None, v_descale: Array | float | None = None,
              anchor: str = "bottom_right", layout: str = "bshd",
              out_dtype: Any = None, return_lse: bool = False,
              device: str | None = None) -> Any:
    """fattn.attention() for JAX, differentiable in q, k, v, bias and sink.

    Args:
        q, k, v: (B, S, H, D), or (B, H, S, D) in layout "bhsd"; float32, float16 or bfloat16, and float64
            on device "reference". k and v may be float8_e4m3fn, without gradients.
        k_descale, v_descale: numbers or float32 arrays that broadcast to (B, Hk); without gradients.
        key: a key of jax.random, for dropout.
        device: "reference" for double precision; None: the device on which the program runs.

    Rows past seqused_q are 0 in the result and in gradients, and their lse is -inf; gradients of the result and of lse
    are not read there. Other arguments: fattn.attention(). Those that are not arrays are part of the program: under jit
    they are constants or among its static_argnames. Under vmap the mapped axis joins the batch, in one run; with
    dropout, with a mapped sink, and for gradients of sink or of a bias without a batch axis, there is a run for each
    value. There are no second derivatives, no forward mode and no gradients of alibi_slopes.

    Returns:
        (B, Sq, Hq, Dv), or (B, Hq, Sq, Dv) in layout "bhsd", of q's dtype unless out_dtype says otherwise; with
        return_lse also lse, float32 (B, Hq, Sq).

    Raises:
        fattn.Error: while a program is traced, for all errors that shapes, dtypes and options show.
        jax.errors.JaxRuntimeError or ValueError: for errors that only a run can see, such as wrong lengths, with the
            library's message. (JAX raises the latter where a repeated call fails at once.)
    """
    for name, a in (("q", q), ("k", k), ("v", v)):
        if a is None:
            raise TypeError(f"{name} is None, not an array")
    _refuse_traced(causal=causal, window=window, scale=scale, softcap=softcap, dropout_p=dropout_p, chunk=chunk,
                   return_lse=return_lse)
    options = Options(_c.FORWARD, number(causal), window_of(window), number(scale), number(softcap), number(dropout_p),
                      anchor, layout, out_dtype, bool(return_lse), device=device, chunk=integers(chunk=chunk)[0])
    try:
        hash(options)
    except TypeError:
        raise unhashable(Options._fields, options) from None
    seed = None
    if options.dropout_p != 0:
        if key is None or not hasattr(key, "dtype"):
            raise InvalidArgument(f"key is {key!r}: dropout needs a key of jax.random")
        words = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
        if words.dtype != jnp.uint32:
            raise InvalidArgument(f"key has dtype {key.dtype}: dropout needs a key of jax.random, or its uint32 words")
        if words.ndim != 1 or words.size < 2:
            raise InvalidArgument(f"key has shape {key.shape}, words of shape {words.shape}: one key is needed")
        seed = words[:2]
    if alibi_slopes is not None:
        alibi_slopes = _constant(alibi_slopes)
    seqused_q, seqused_k, seqstart_k = (_in_int32(a) if isinstance(a, np.ndarray) else a
                                        for a in (seqused_q, seqused_k, seqstart_k))
    return _attention(options, *_alike(q, k, v, bias, mask, alibi_slopes, sink, seqused_q, seqused_k, seqstart_k,
                                       seed, *_factors(k_descale, v_descale, q, k, layout)))


def _factors(k_descale: Any, v_descale: Any, q: Array, k: Array, layout: str) -> list[Array | None]:
    """Both as arrays (B, Hk), or neither."""
    if k_descale is None and v_descale is None or q.ndim != 4 or k.ndim != 4:  # the rank is an error later
        return [None, None]
    shape, found = (q.shape[0], k.shape[1 if layout == "bhsd" else 2]), []
    for a, name in ((k_descale, "k_descale"), (v_descale, "v_descale")):
        a = 1.0 if a is None else a
        a = a if hasattr(a, "shape") else jnp.asarray(a, jnp.float64 if q.dtype == jnp.float64 else jnp.float32)
        try:
            found.append(jnp.broadcast_to(a, shape))
        except ValueError:
            raise InvalidShape(f"{name} has shape {a.shape}, which does not broadcast to {shape}") from None
    return found


# --- The function of jax.nn -----------------------------------------------------------------------


def dot_product_attention(
        query: Array, key: Array, value: Array, bias: Array | None = None, mask: Array | None = None, *,
        scale: float | None = None, is_causal: bool = False, query_seq_lengths: Array | None = None,
        key_value_seq_lengths: Array | None = None,
        local_window_size: int | tuple[int, int] | None = None, implementation: str | None = None,
        return_residual: bool = False) -> Any:
    """jax.nn.dot_product_attention, with the same arguments; differentiable like attention(). docs/PYTHON.md lists
    where they differ.

    Args:
        query: (B, T, N, H), or (T, N, H) without a batch.
        key, value: (B, S, K, H) or (S, K, H); N is a multiple of K.
        bias: added to scores; broadcast to (B, N, T, S).
        mask: boolean or 8-bit integers, True or non-zero keeps a pair; broadcast to (B, N, T, S).
        scale: factor of the scores, a number; 1 / sqrt(H) if None.
        is_causal, local_window_size: anchored at the top left. The window is (left, right), in keys, or one number
            for both; -1: all.
        query_seq_lengths, key_value_seq_lengths: integers (B), how many rows and keys exist. Rows that do not exist
            are 0, and so are rows that attend to no key.
        implementation: only None.
        return_residual: return (result, lse), lse float32 (B, T, N), the natural logarithm of each row's sum of
            exponentials.

    Returns (B, T, N, channels of value), of query's dtype. Raises as attention() does.
    """
    _refuse_traced(is_causal=is_causal, local_window_size=local_window_size, return_residual=return_residual)
    if implementation is not None:
        raise Unsupported(f"implementation is {implementation!r}, but there is only fattn's own: None")
    query, key, value = (jnp.asarray(a) for a in (query, key, value))
    alone = query.ndim == 3
    if alone:
        query, key, value = query[None], key[None], value[None]
    if query.ndim != 4:
        raise InvalidShape(f"query has shape {query.shape}, rank {query.ndim}: rank 3 or 4 is needed")
    if bias is not None:
        bias = jnp.asarray(bias)
        bias = bias if bias.dtype in (query.dtype, jnp.float32) else bias.astype(query.dtype)
    rows, keys = (_lengths(a, name, query.shape[0]) for a, name in (
        (query_seq_lengths, "query_seq_lengths"), (key_value_seq_lengths, "key_value_seq_lengths")))
    o, lse = attention(query, key, value, causal=is_causal, window=local_window_size, scale=scale,
                       bias=bias, mask=None if mask is None else jnp.asarray(mask), seqused_k=keys,
                       anchor="top_left", return_lse=True)
    lse = lse.transpose(0, 2, 1)
    if rows is not None:
        exists = jnp.arange(query.shape[1])[None] < rows[:, None]
        o, lse = jnp.where(exists[..., None, None], o, 0), jnp.where(exists[..., None], lse, -jnp.inf)
    if alone:
        o, lse = o[0], lse[0]
    return (o, lse) if return_residual else o


def _lengths(a: Any, name: str, batch: int) -> Any:
    """a as int32 (batch), or None."""
    if a is None:
        return None
    a = a if isinstance(a, np.ndarray) else jnp.asarray(a)
    if not jnp.issubdtype(a.dtype, jnp.integer):
        raise InvalidArgument(f"{name} has dtype {a.dtype}, not one of integers")
    if a.shape != (batch,):
        raise InvalidShape(f"{name} has shape {a.shape}, not {(batch,)}")
    return jnp.asarray(_in_int32(a), jnp.int32)


def _in_int32(a: Any) -> Any:
    """a, with numbers that int32 does not have replaced by its least or greatest, and of the same dtype: JAX takes them
    modulo 2^32, as it does with NumPy's 64-bit integers wherever it has none of its own."""
    if not jnp.issubdtype(a.dtype, jnp.integer) or jnp.iinfo(a.dtype).max < 1 << 31:
        return a
    least = -1 << 31 if jnp.issubdtype(a.dtype, jnp.signedinteger) else 0
    return (np if isinstance(a, np.ndarray) else jnp).clip(a, least, (1 << 31) - 1)
