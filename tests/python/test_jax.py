# SPDX-License-Identifier: Apache-2.0
"""fattn.jax: values, gradients and transforms, against the formula and jax.nn's own function."""

import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys

import pytest

jax = pytest.importorskip("jax")
try:
    import fattn.jax as fj
except ImportError as error:  # built without the option python
    if "-Dpython=enabled" not in str(error):
        raise
    pytest.skip(str(error), allow_module_level=True)

import fattn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import oracle  # noqa: E402
from jax import export  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
RUN_ERRORS = (jax.errors.JaxRuntimeError, ValueError)  # JAX raises the latter where a repeated call fails at once


def arrays(seed=0, b=2, sq=7, sk=9, hq=4, hk=2, d=8, dv=6, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 3)
    return [jax.random.normal(key, shape, dtype) for key, shape in
            zip(keys, ((b, sq, hq, d), (b, sk, hk, d), (b, sk, hk, dv)))]


def close(a, b, tolerance=2e-5):
    np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance,
                               atol=tolerance)


OPTIONS = [{}, {"causal": True}, {"causal": True, "anchor": "top_left"}, {"window": (2, 3)},
           {"softcap": 2.0}, {"scale": 0.3}, {"bias": (4, 7, 9)}, {"bias": (1, 9)}, {"mask": (2, 1, 7, 9)},
           {"alibi_slopes": (4,)}, {"sink": (4,)}, {"seqused_k": [4, 9]}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_and_gradients(options):
    q, k, v = arrays()
    options = dict(options)
    for i, name in enumerate(("bias", "sink", "alibi_slopes")):
        if name in options:
            options[name] = jax.random.normal(jax.random.key(9 + i), options[name])
    if "mask" in options:
        options["mask"] = jax.random.uniform(jax.random.key(3), options["mask"]) < 0.7
    if "seqused_k" in options:
        options["seqused_k"] = jnp.array(options["seqused_k"], jnp.int32)
    plain = {"lengths_k" if n == "seqused_k" else n: np.asarray(a) if hasattr(a, "dtype") else a
             for n, a in options.items()}
    plain["top_left"] = plain.pop("anchor", "") == "top_left"
    o, lse = jax.jit(lambda q, k, v: fj.attention(q, k, v, return_lse=True, **options))(q, k, v)
    wanted, wanted_lse = oracle.attention(*(np.asarray(a) for a in (q, k, v)), **plain)
    close(o, wanted)
    close(lse, wanted_lse)
    learnt = {n: options.pop(n) for n in ("bias", "sink") if n in options}

    def loss(attend, q, k, v, learnt):
        o, lse = attend(q, k, v, **learnt)
        return (o * jnp.cos(jnp.arange(o.size).reshape(o.shape))).sum() + jnp.where(
            jnp.isfinite(lse), jnp.sin(lse), 0).sum()

    got = jax.jit(jax.grad(lambda *a: loss(
        lambda *x, **m: fj.attention(*x, **options, **m, return_lse=True), *a), argnums=(0, 1, 2, 3)))(
            q, k, v, learnt)
    names = ["dq", "dk", "dv"] + ["d" + n for n in learnt]
    wide = [np.asarray(a) for a in (q, k, v)]
    more = {n: np.asarray(a) for n, a in (options | learnt).items() if hasattr(a, "dtype")}
    more |= {n: a for n, a in options.items() if not hasattr(a, "dtype")}
    o, lse = fattn.attention(*wide, return_lse=True, **more)
    dout = np.cos(np.arange(o.size, dtype=np.float32)).reshape(o.shape)
    wanted = fattn.attention_backward(dout, *wide, o, lse, dlse=np.cos(lse), want=names, **more)
    for a, name in zip((*got[:3], *got[3].values()), names):
        close(a, getattr(wanted, name), 1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_short_types(dtype):
    q, k, v = arrays(dtype=dtype)
    o = fj.attention(q, k, v)
    assert o.dtype == dtype
    close(o, oracle.attention(*(np.asarray(a, np.float32) for a in (q, k, v)))[0], 2e-2)
    assert fj.attention(q, k, v, out_dtype="float32").dtype == jnp.float32


def cache():
    """q, and k and v in e4m3."""
    q, k, v = arrays()
    return q, k.astype(jnp.float8_e4m3fn), v.astype(jnp.float8_e4m3fn)


def wide(codes, factor):
    factor = np.broadcast_to(np.asarray(1 if factor is None else factor, np.float64), (2, 2))
    return np.asarray(codes).astype(np.float64) * factor[:, None, :, None]


FACTORS = {"(B, Hk)": ([[0.5, 2], [3, 0.75]], [[1, 2], [3, 4]]), "(Hk)": ([0.5, 2], [3, 0.75]),
           "(B, 1)": ([[0.5], [2]], [[3], [0.75]]), "of k": ([0.5, 2], None), "of v": (None, [[0.5], [2]]),
           "numbers": (0.5, 2), "number and array": (0.5, [3, 0.75]), "other shapes": ([0.5, 2], [[3], [0.75]])}


@pytest.mark.parametrize("name", FACTORS)
def test_cache_in_eight_bits(name):
    """In compiled programs, and by the functions that take any array."""
    q, k, v = cache()
    factors = [jnp.array(f, jnp.float32) if isinstance(f, list) else f for f in FACTORS[name]]
    wanted = oracle.attention(np.asarray(q), wide(k, factors[0]), wide(v, factors[1]), causal=True)
    for attend in (fj.attention, fattn.attention):
        o, lse = attend(q, k, v, causal=True, return_lse=True, k_descale=factors[0], v_descale=factors[1])
        close(o, wanted[0])
        close(lse, wanted[1])
    arrays = {n: f for n, f in zip(("k_descale", "v_descale"), factors) if hasattr(f, "shape")}
    numbers = {n: f for n, f in zip(("k_descale", "v_descale"), factors) if not hasattr(f, "shape")}
    turned = [a.transpose(0, 2, 1, 3) for a in (q, k, v)]
    o = jax.jit(lambda q, k, v, f: fj.attention(q, k, v, causal=True, layout="bhsd", **f, **numbers))(*turned, arrays)
    close(o.transpose(0, 2, 1, 3), wanted[0])


def test_vmap_in_eight_bits():
    q, k, v = (jnp.stack([a, a[::-1]]) for a in cache())
    of_k, of_v = jnp.array([[[0.5, 2], [3, 0.75]], [[1, 2], [3, 4]]]), jnp.array([[0.5, 2], [3, 0.75]])
    together = jax.vmap(lambda q, k, v, f: fj.attention(q, k, v, k_descale=f, v_descale=of_v))(q, k, v, of_k)
    for i in range(2):
        close(together[i], oracle.attention(np.asarray(q[i]), wide(k[i], of_k[i]), wide(v[i], of_v))[0])


def test_bad_eight_bits():
    q, k, v = cache()
    one = jnp.ones(2)
    for call, exception, words in (
            (lambda: fj.attention(k, k, v), fattn.InvalidArgument, "q has dtype float8_e4m3fn, not one of"),
            (lambda: fj.attention(q, q.astype(jnp.float8_e5m2), v), fattn.InvalidArgument, "k has dtype float8_e5m2"),
            (lambda: fattn.attention(q, q.astype(jnp.float8_e5m2), v), fattn.InvalidArgument, "k has dtype float8_e5m2"),
            (lambda: fattn.attention(q, k, v.astype(jnp.float8_e4m3fnuz)), fattn.InvalidArgument, "float8_e4m3fnuz"),
            (lambda: fj.attention(q, k, v, k_descale=jnp.ones(4)), fattn.InvalidShape,
             r"k_descale has shape \(4,\), which does not broadcast to \(2, 2\)"),
            (lambda: fj.attention(q, k, v, v_descale=one.astype(jnp.float16)), fattn.InvalidArgument,
             "v_descale has dtype float16, not float32"),
            (lambda: fj.attention(q, k[0, 0], v, v_descale=one), fattn.InvalidShape, "k has shape .* rank 2"),
            (lambda: jax.grad(lambda q: fj.attention(q, k, v).sum())(q), fattn.Unsupported, "e4m3 in a backward"),
            (lambda: jax.grad(lambda q: fj.attention(q, q[..., :2, :], q[..., :2, :], k_descale=one).sum())(q),
             fattn.Unsupported, "FATTN_DESCALE in a backward")):
        with pytest.raises(exception, match=words):
            call()


NN = [{}, {"is_causal": True}, {"local_window_size": 2}, {"local_window_size": (3, 1)}, {"scale": 0.4},
      {"bias": (2, 4, 7, 9)}, {"bias": (1, 1, 7, 9)}, {"mask": (2, 1, 7, 9)},
      {"key_value_seq_lengths": [4, 9], "query_seq_lengths": [7, 3]}, {"return_residual": True}]


@pytest.mark.parametrize("options", NN, ids=str)
def test_dot_product_attention(options):
    q, k, v = arrays(dv=8)
    options = dict(options)
    if "bias" in options:
        options["bias"] = jax.random.normal(jax.random.key(4), options["bias"])
    if "mask" in options:
        options["mask"] = jax.random.uniform(jax.random.key(4), options["mask"]) < 0.7
    for name in ("key_value_seq_lengths", "query_seq_lengths"):
        if name in options:
            options[name] = jnp.array(options[name], jnp.int32)
    got = fj.dot_product_attention(q, k, v, **options)
    wanted = jax.nn.dot_product_attention(q, k, v, **options)
    jax.tree.map(close, got, wanted)
    if "return_residual" not in options:
        def of(function):
            return jax.grad(lambda q, k, v: (function(q, k, v, **options) ** 2).sum(),
                            argnums=(0, 1, 2))(q, k, v)
        jax.tree.map(lambda a, b: close(a, b, 1e-4), of(fj.dot_product_attention),
                     of(jax.nn.dot_product_attention))
        close(fj.dot_product_attention(q[0], k[0], v[0]), jax.nn.dot_product_attention(q[0], k[0], v[0]))


def test_differences_from_jax_nn():
    """That docs/PYTHON.md has: what jax.nn refuses or reads in another way."""
    q, k, v = arrays(dv=8)
    all_keys = fj.attention(q, k, v)
    np.testing.assert_array_equal(fj.dot_product_attention(q, k, v, local_window_size=-1), all_keys)
    np.testing.assert_array_equal(fj.dot_product_attention(q, k, v, local_window_size=(-1, 2)),
                                  fj.attention(q, k, v, window=(None, 2), anchor="top_left"))
    with pytest.raises(fattn.InvalidArgument, match="window_left is -2"):
        fj.dot_product_attention(q, k, v, local_window_size=-2)
    mask = jax.random.uniform(jax.random.key(4), (2, 1, 7, 9)) < 0.7
    for dtype in (jnp.int8, jnp.uint8):
        np.testing.assert_array_equal(fj.dot_product_attention(q, k, v, mask=mask.astype(dtype)),
                                      fj.attention(q, k, v, mask=mask))
    for length in (-1, 10):
        with pytest.raises(RUN_ERRORS, match=rf"seqused_k\[0\] is {length}"):
            jax.block_until_ready(fj.dot_product_attention(q, k, v, key_value_seq_lengths=jnp.array([length, 9])))

    def lse(q):
        x = jnp.einsum("bihc,bjhc->bhij", q, jnp.repeat(k, 2, 2)) / 8 ** 0.5
        return jax.scipy.special.logsumexp(x, -1).sum()

    close(jax.grad(lambda q: fj.dot_product_attention(q, k, v, return_residual=True)[1].sum())(q), jax.grad(lse)(q), 1e-6)


def test_without_promotion_of_ranks():
    """Nothing in fattn relies on it, which a program may forbid."""
    q, k, v = arrays(dv=8)
    lengths, cache_k, factor = jnp.array([5, 2], jnp.int32), k.astype(jnp.float8_e4m3fn), jnp.ones(2)
    masks = jnp.ones((2, 1, 7, 9), bool), jnp.zeros((4, 7, 9)), jnp.zeros(4)
    with jax.numpy_rank_promotion("raise"):
        for attend in (lambda q, k, v: fj.dot_product_attention(q, k, v, query_seq_lengths=lengths, is_causal=True,
                                                                key_value_seq_lengths=lengths, return_residual=True)[0],
                       lambda q, k, v: fj.attention(q, k, v, seqused_q=lengths, seqused_k=lengths),
                       lambda q, k, v: fj.attention(q, k, v, mask=masks[0], bias=masks[1], sink=masks[2]),
                       lambda q, k, v: fj.attention(q, k, v, dropout_p=0.5, key=jax.random.key(0))):
            jax.grad(lambda *a: attend(*a).sum(), argnums=(0, 1, 2))(q, k, v)
            jax.vmap(attend)(q[None], k[None], v[None])
        fj.attention(q, cache_k, cache_k, k_descale=factor, v_descale=2.0)


@pytest.mark.parametrize("library, dtype, x64", [(jnp, "int64", True), (jnp, "uint64", True), (np, "int64", True),
                                                 (np, "int64", False), (jnp, "uint32", False)])
def test_lengths_past_int32(library, dtype, x64):
    """Are too great, as others are, and not taken modulo 2^32."""
    q, k, v = arrays(dv=8)
    with jax.enable_x64(x64):
        small, great = (library.array([n, 2], dtype) for n in (7, 2**32 - 1 if dtype == "uint32" else 2**32 + 3))
        np.testing.assert_array_equal(fj.dot_product_attention(q, k, v, query_seq_lengths=great),
                                      fj.dot_product_attention(q, k, v, query_seq_lengths=small))
        calls = [(lambda: fj.dot_product_attention(q, k, v, key_value_seq_lengths=great), 2**31 - 1)]
        if dtype == "int64":
            low = library.array([3 - 2**40, 2], dtype)
            calls += [(lambda: fj.dot_product_attention(q, k, v, key_value_seq_lengths=low), -2**31)]
        if library == np and not x64:  # where JAX takes 64-bit integers for 32-bit ones
            fj.attention(q, k, v, seqused_q=small, seqused_k=small)
            calls += [(lambda: fj.attention(q, k, v, seqused_k=great), 2**31 - 1),
                      (lambda: fj.attention(q, k, v, seqused_q=great), 2**31 - 1),
                      (lambda: fj.attention(q, k, v, seqstart_k=great), 2**31 - 1)]
        for call, number in calls:
            with pytest.raises(RUN_ERRORS, match=rf"seq.*\[0\] is {number}"):
                jax.block_until_ready(call())


def test_signature():
    ours, theirs = (inspect.signature(f).parameters for f in (fj.dot_product_attention,
                                                              jax.nn.dot_product_attention))
    # Older versions of JAX have no return_residual.
    assert [(p.name, p.kind, p.default) for p in theirs.values()] == [
        (p.name, p.kind, p.default) for p in ours.values() if p.name in theirs]
    assert set(ours) - set(theirs) <= {"return_residual"}


def test_vmap():
    q, k, v = (jnp.stack([a, 2 * a, -a]) for a in arrays())
    together = jax.vmap(lambda *a: fj.attention(*a, causal=True))(q, k, v)
    for i in range(3):
        close(together[i], fj.attention(q[i], k[i], v[i], causal=True), 1e-6)
    gradients = jax.vmap(jax.grad(lambda q, k, v: fj.attention(q, k, v).sum()))(q, k, v)
    close(gradients[1], jax.grad(lambda q: fj.attention(q, k[1], v[1]).sum())(q[1]), 1e-6)


# The axes that are mapped, and what has a run for each value.
NOTHING, SUMS_OVER_BATCHES, GRADIENTS, ALL = range(4)
MAPS = [({"q": 0}, NOTHING), ({"q": 1, "k": 2, "v": -1}, NOTHING), ({"k": 0, "bias": 0}, SUMS_OVER_BATCHES),
        ({"q": 0, "bias": None}, SUMS_OVER_BATCHES), ({"bias": 1}, SUMS_OVER_BATCHES),
        ({"q": 0, "batch_bias": None}, NOTHING), ({"batch_bias": 2}, NOTHING), ({"q": 0, "mask": None}, NOTHING),
        ({"mask": 0}, NOTHING), ({"q": 0, "alibi_slopes": None}, NOTHING), ({"alibi_slopes": 0}, NOTHING),
        ({"q": 0, "batch_slopes": None}, NOTHING), ({"q": 0, "sink": None}, GRADIENTS), ({"sink": 0}, ALL),
        ({"q": 0, "seqused_k": None}, NOTHING), ({"seqused_k": 0, "seqstart_k": None}, NOTHING),
        ({"q": 0, "key": None}, ALL), ({"key": 0}, ALL)]


@pytest.mark.parametrize("axes, loops, batch", [
    (*case, batch) for case in MAPS for batch in (1, 2) if batch == 2 or case[1] == SUMS_OVER_BATCHES], ids=str)
def test_vmap_is_one_run(axes, loops, batch):
    """Values and gradients are those of a loop, which is in the program only where it is needed."""
    q, k, v = arrays(b=batch)
    makers = {"bias": lambda key: jax.random.normal(key, (4, 7, 9)),
              "batch_bias": lambda key: jax.random.normal(key, (batch, 1, 7, 9)),
              "mask": lambda key: jax.random.uniform(key, (9,)) < 0.7,
              "alibi_slopes": lambda key: jax.random.normal(key, (4,)),
              "batch_slopes": lambda key: jax.random.normal(key, (batch, 4)),
              "sink": lambda key: jax.random.normal(key, (4,)),
              "seqused_k": lambda key: jax.random.randint(key, (batch,), 5, 9, jnp.int32),
              "seqstart_k": lambda key: jax.random.randint(key, (batch,), 0, 5, jnp.int32),
              "key": lambda key: key}
    given = {"q": q, "k": k, "v": v}
    for name, axis in axes.items():
        make = makers.get(name, lambda key, name=name: given[name] * jax.random.uniform(key))
        each = [make(key) for key in jax.random.split(jax.random.key(5), 3)]
        given[name] = each[0] if axis is None else jnp.stack(each, axis)
    mapped = {name: axes.get(name) for name in given}

    def attend(given):
        options = {{"batch_bias": "bias", "batch_slopes": "alibi_slopes"}.get(n, n): a for n, a in given.items()}
        return fj.attention(**options, causal=True, return_lse=True, dropout_p=0.3 if "key" in given else 0.0)

    def gradients(given):
        def loss(learnt):
            o, lse = attend(given | learnt)
            return (o * jnp.cos(jnp.arange(o.size).reshape(o.shape))).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()
        return jax.grad(loss)({n: a for n, a in given.items() if n in ("q", "k", "v", "sink", "bias", "batch_bias")})

    for function, has_loop in ((attend, loops == ALL), (gradients, loops > SUMS_OVER_BATCHES or loops and batch > 1)):
        together = jax.jit(jax.vmap(function, (mapped,)))
        assert ("while" in together.lower(given).as_text()) == has_loop, function
        got = together(given)
        for i in range(3):
            wanted = function({n: a if mapped[n] is None else jnp.moveaxis(a, mapped[n], 0)[i] if a.ndim > 1 else a[i]
                               for n, a in given.items()})
            jax.tree.map(lambda a, b: close(a[i], b), got, wanted)


def test_vmap_of_vmap():
    q, k, v = (jnp.stack([jnp.stack([a, -a]), jnp.stack([2 * a, 3 * a])]) for a in arrays())
    k = k[:, 1]
    got = jax.vmap(jax.vmap(fj.attention, (0, None, 0)), (0, 0, 0))(q, k, v)
    for i in range(2):
        for j in range(2):
            close(got[i, j], fj.attention(q[i, j], k[i], v[i, j]), 1e-6)


def test_vmap_compiles_once(caplog):
    """Without jit as well."""
    q, k, v = (jnp.stack([a, 2 * a]) for a in arrays(sq=5))

    def calls():
        jax.vmap(fj.attention)(q, k, v)
        jax.vmap(jax.grad(lambda q, k, v: fj.attention(q, k, v).sum()))(q, k, v)
        jax.vmap(lambda q, sink: fj.attention(q, k[0], v[0], sink=sink))(q, jnp.ones((2, 4)))

    calls()
    with jax.log_compiles(), caplog.at_level("DEBUG"):
        caplog.clear()
        calls()
    assert not [r for r in caplog.records if "ompiling" in r.getMessage() and "lambda" not in r.getMessage()]


def test_shard_map():
    """Heads on different devices, of which there are two in a process of its own."""
    code = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, fattn.jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
whole = [jax.random.normal(jax.random.key(i), (2, 7, 4, 8)) for i in range(3)]
mesh, split = jax.make_mesh((2,), ("h",)), P(None, None, "h", None)
parts = jax.device_put(whole, NamedSharding(mesh, split))
shard_map = getattr(jax, "shard_map", None) or jax.experimental.shard_map.shard_map
attend = lambda *a: fattn.jax.attention(*a, causal=True)
sharded = shard_map(attend, mesh=mesh, in_specs=(split,) * 3, out_specs=split)
o = jax.jit(sharded)(*parts)
assert len(o.sharding.device_set) == 2
np.testing.assert_array_equal(o, attend(*whole))
for a, b in zip(*(jax.jit(jax.grad(lambda *a: f(*a).sum(), argnums=(0, 1, 2)))(*x)
                  for f, x in ((sharded, parts), (attend, whole)))):
    np.testing.assert_array_equal(a, b)

# Gradients of what all devices have, in a map over batches.
more = {"bias": jax.random.normal(jax.random.key(4), (1, 4, 7, 7)), "sink": jax.numpy.arange(4.0)}
x, specs = (whole[0], whole[1][:1], whole[2], more), (P("h"), P(), P("h"), P())
mesh = jax.sharding.Mesh(jax.devices(), ("h",))
def local(q, k, v, more):
    return fattn.jax.attention(q, jax.numpy.broadcast_to(k, q.shape), v, **more)
sharded = shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0])
for f in (jax.jit, lambda f: f):
    got, wanted = (f(jax.grad(lambda *a: (g(*a) ** 2).sum(), argnums=(0, 1, 2, 3)))(*x) for g in (sharded, local))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, wanted)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_divided_by_the_partitioner():
    """Under jit alone each device computes its part of the batch and of the heads, forward and backward, and nothing
    is gathered; where a mesh does not divide them all is."""
    code = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, fattn.jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = np.array(jax.devices())
meshes = {"flat": Mesh(devices, ("x",)), "square": Mesh(devices.reshape(2, 2), ("b", "h")),
          "turned": Mesh(devices[[2, 0, 3, 1]].reshape(2, 2), ("h", "b"))}
draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
def attend(given, options):
    return fattn.jax.attention(**given, **options, return_lse=True)
def slope(given, options):
    learnt = {n: a for n, a in given.items() if n not in ("mask", "alibi_slopes", "key")}
    return jax.grad(lambda learnt: sum((a ** 2).sum() for a in attend(given | learnt, options)))(learnt)
def check(mesh, spec, heads, heads_k, gathers, options={}, **more):
    given = {"q": draw(0, 4, 5, heads, 8), "k": draw(1, 4, 6, heads_k, 8), "v": draw(2, 4, 6, heads_k, 8)} | more
    if options.get("layout") == "bhsd":
        given |= {n: given[n].transpose(0, 2, 1, 3) for n in "qkv"}
    parts = given | {"q": jax.device_put(given["q"], NamedSharding(meshes[mesh], spec))}
    for f in (attend, slope):
        f = jax.jit(lambda given, f=f: f(given, options))
        got = f(parts)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, f(given))
        assert ("all-gather" in f.lower(parts).compile().as_text()) == gathers, (mesh, spec, heads, heads_k)
        q_like = got[0] if isinstance(got, tuple) else got["q"]
        assert gathers or q_like.sharding.spec == spec, q_like.sharding
both = P("b", None, "h")
check("square", both, 8, 2, False, {"causal": True})
check("square", both, 4, 4, False, mask=draw(5, 4, 1, 1, 6) > -1, alibi_slopes=draw(6, 4, 4))
check("square", both, 4, 1, False)
check("square", both, 8, 2, False, sink=draw(3, 8), bias=draw(4, 8, 5, 6))
check("square", both, 8, 2, False, bias=draw(4, 4, 1, 5, 6))
check("square", P("b", "h"), 8, 2, False, {"layout": "bhsd"})
check("flat", P("x"), 3, 3, False)
random = {"dropout_p": 0.5}
check("square", both, 8, 2, False, random, key=jax.random.key(1))
check("square", both, 4, 1, False, random, key=jax.random.key(1), sink=draw(3, 4))
check("turned", both, 8, 2, False, random, key=jax.random.key(1))
check("flat", P("x"), 3, 3, False, random, key=jax.random.key(1))
check("flat", P(None, "x"), 4, 4, False, random | {"layout": "bhsd"}, key=jax.random.key(1))
fattn.jax._PLACES = 3
check("square", both, 8, 2, True, random, key=jax.random.key(1))
check("flat", P(None, None, "x"), 8, 2, True)

# A cache in 8 bits is divided with its factors.
given = {"q": draw(0, 4, 5, 8, 8), "k_descale": draw(3, 4, 2), "v_descale": draw(4, 4, 2)}
given |= {n: draw(i, 4, 6, 2, 8).astype("float8_e4m3fn") for i, n in enumerate("kv")}
parts = given | {"q": jax.device_put(given["q"], NamedSharding(meshes["square"], both))}
f = jax.jit(lambda given: fattn.jax.attention(**given))
np.testing.assert_allclose(f(parts), f(given), rtol=2e-5, atol=2e-5)
assert "all-gather" not in f.lower(parts).compile().as_text()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_dropout():
    q, k, v = arrays(sq=32, sk=64)
    o = fj.attention(q, k, v, dropout_p=0.5, key=jax.random.key(3))
    assert (o == fj.attention(q, k, v, dropout_p=0.5, key=jax.random.key(3))).all()
    assert (o != fj.attention(q, k, v, dropout_p=0.5, key=jax.random.key(4))).any()
    words = np.asarray(jax.random.key_data(jax.random.key(3)))
    seed = int(words[0]) | int(words[1]) << 32
    close(o, fattn.attention(*(np.asarray(a) for a in (q, k, v)), dropout_p=0.5, seed=seed), 1e-6)


def test_dropout_takes_one_key():
    """Of a batch of keys the others would have been ignored."""
    q, k, v = arrays()
    for keys in (jax.random.split(jax.random.key(0), 5), jax.random.split(jax.random.PRNGKey(0), 5)):
        with pytest.raises(fattn.InvalidArgument, match="one key is needed"):
            fj.attention(q, k, v, dropout_p=0.5, key=keys)
        fj.attention(q, k, v, dropout_p=0.5, key=keys[0])
    words = np.asarray(jax.random.key_data(jax.random.key(3)))
    np.testing.assert_array_equal(fj.attention(q, k, v, dropout_p=0.5, key=words),
                                  fj.attention(q, k, v, dropout_p=0.5, key=jax.random.key(3)))
    for dtype in (jnp.float32, jnp.int32, np.int64, jnp.bool_):
        with pytest.raises(fattn.InvalidArgument, match="key has dtype .*: dropout needs a key of jax.random"):
            fj.attention(q, k, v, dropout_p=0.5, key=words.astype(dtype))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_rows_that_do_not_exist(layout, monkeypatch):
    """Are 0 in results and gradients, whatever was in their memory; garbage in gradients of the result is not read."""
    call = jax.ffi.ffi_call

    def on_nan(target, results, **options):
        """ffi_call() that writes into arrays of NaN."""
        def run(*args, fields, **attributes):
            n = len(args)
            garbage = [jnp.full(r.shape, jnp.nan, r.dtype) for r in results]
            return call(target, results, input_output_aliases={n + i: i for i in range(len(results))}, **options)(
                *args, *garbage, fields=np.concatenate([fields[:n], fields[n:], fields[n:]]), **attributes)
        return run

    q, k, v = arrays(b=3)
    used, more = jnp.array([4, 0, 7], jnp.int32), {"sink": jnp.arange(4.0), "seqused_k": jnp.array([9, 3, 5], jnp.int32)}
    exists = np.arange(7) < np.asarray(used)[:, None]
    bias = jax.random.normal(jax.random.key(7), (3, 4, 7, 9))
    weights = jax.random.normal(jax.random.key(8), (3, 7, 4, 6))

    def attend(q, k, v, bias, each=None):
        if layout == "bhsd":
            q, k, v = (a.swapaxes(1, 2) for a in (q, k, v))
        o, lse = fj.attention(q, k, v, bias=bias, seqused_q=used if each is None else each, layout=layout,
                              return_lse=True, **more)
        return o if layout == "bshd" else o.swapaxes(1, 2), lse

    def gradients(garbage):
        cotangent = jnp.where(exists[..., None, None], weights, garbage)
        return jax.jit(lambda *a: jax.vjp(attend, *a)[1]((cotangent, cotangent[..., 0].swapaxes(1, 2))))(q, k, v, bias)

    whole = fj.attention(q, k, v, bias=bias, return_lse=True, **more)
    fj._runner.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(jax.ffi, "ffi_call", on_nan)
        mapped = jax.vmap(attend, (None, None, None, None, 0))(q, k, v, bias, jnp.stack([used * 0, used]))
        results = [jax.jit(attend)(q, k, v, bias), attend(q, k, v, bias), [a[1] for a in mapped]]
        made, of_garbage = gradients(0.0), gradients(jnp.nan)
    fj._runner.cache_clear()
    for o, lse in results:
        close(o[exists], whole[0][exists])
        close(lse.swapaxes(1, 2)[exists], whole[1].swapaxes(1, 2)[exists])
        assert (o[~exists] == 0).all() and (lse.swapaxes(1, 2)[~exists] == -np.inf).all()
    for a, b in zip(made, of_garbage):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(a).all()
    assert (made[0][~exists] == 0).all() and (made[0][exists] != 0).any()
    assert (made[3].swapaxes(1, 2)[~exists] == 0).all()


def test_slopes_have_no_gradient():
    """Which is an error where it is wanted, and nowhere else."""
    q, k, v = arrays()

    def loss(q, slopes):
        return fj.attention(q, k, v, alibi_slopes=slopes).sum()

    slopes = jnp.ones(4)
    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        jax.grad(wrap(loss))(q, slopes)
        jax.grad(lambda both: wrap(loss)(both[0], jax.lax.stop_gradient(both[1])))((q, slopes))
        with pytest.raises(fattn.InvalidArgument, match="alibi_slopes have no gradient"):
            jax.grad(wrap(loss), argnums=1)(q, slopes)


def test_double_precision():
    with jax.enable_x64(True):
        q, k, v = arrays(dtype=jnp.float64)
        o = fj.attention(q, k, v, causal=True, device="reference")
        close(o, oracle.attention(*(np.asarray(a) for a in (q, k, v)), causal=True)[0], 1e-12)


def test_plain_functions_take_arrays():
    q, k, v = arrays()
    o, lse = fattn.attention(q, k, v, causal=True, return_lse=True)
    assert isinstance(o, jax.Array) and isinstance(lse, jax.Array)
    close(o, fj.attention(q, k, v, causal=True), 1e-6)
    half = [a.astype(jnp.bfloat16) for a in (q, k, v)]
    assert fattn.attention(*half).dtype == jnp.bfloat16
    with pytest.raises(fattn.InvalidArgument, match="read-only"):
        fattn.attention(q, k, v, out=jnp.zeros_like(o))
    assert fattn.attention(q, k, v, layout="bshd").shape == o.shape


def test_merge():
    """Of arrays of another library, whose results are in memory of fattn's own."""
    q, k, v = arrays()
    halves = [fattn.attention(q, k[:, part], v[:, part], return_lse=True) for part in (slice(0, 4), slice(4, 9))]
    merged = fattn.merge(*halves[0], *halves[1])
    for a, wanted in zip(merged, fattn.attention(q, k, v, return_lse=True)):
        assert isinstance(a, jax.Array)
        close(a, wanted)
    for given in (dict(out=jnp.zeros_like(merged[0])), dict(lse=jnp.zeros_like(merged[1]))):
        with pytest.raises(fattn.InvalidArgument, match="is read-only"):
            fattn.merge(*halves[0], *halves[1], **given)


def test_plain_functions_need_memory_in_one_place():
    """Of an array that was deleted, or is divided among two devices of a process of its own, too."""
    q, k, v = arrays()
    o, lse = fattn.attention(q, k, v, return_lse=True)
    for place in range(3):
        given = [q, k, v]
        given[place] = given[place] + 0
        given[place].delete()
        with pytest.raises(fattn.NullPointer, match="has no memory: it was deleted, or donated"):
            fattn.attention(*given)
    o.delete()
    with pytest.raises(fattn.NullPointer, match="it was deleted"):
        fattn.merge(o, lse, o, lse)
    code = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import fattn, jax, pytest
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2,), ("b",))
for spec in (P("b"), P()):
    q = jax.device_put(jax.numpy.ones((2, 7, 4, 8)), NamedSharding(mesh, spec))
    with pytest.raises(fattn.Unsupported, match="cannot be read in place.*fattn.jax takes sharded arrays"):
        fattn.attention(q, q, q)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_chunks_and_keys_padded_on_the_left():
    q, k, v = arrays()
    for options in (dict(chunk=4), dict(seqstart_k=np.array([2, 0], np.int32), causal=True)):
        o = fj.attention(q, k, v, **{name: a if isinstance(a, int) else jnp.asarray(a)
                                     for name, a in options.items()})
        close(o, fattn.attention(*(np.asarray(a) for a in (q, k, v)), **options), 1e-6)


def test_bad_input():
    q, k, v = arrays()
    for change, exception, words in (
            (dict(k=k[0]), fattn.InvalidShape, "k has shape"),
            (dict(k=k.astype(jnp.int32)), fattn.InvalidArgument, "k has dtype int32"),
            (dict(dropout_p=0.5), fattn.InvalidArgument, "key is None: dropout needs a key of jax.random"),
            (dict(dropout_p=0.5, key=3), fattn.InvalidArgument, "key is 3: dropout needs a key"),
            (dict(chunk=2.5), fattn.InvalidArgument, "chunk is 2.5, not an integer"),
            (dict(causal=np.array([True, False])), fattn.InvalidArgument, "causal is array.*one value is needed"),
            (dict(causal=jnp.array([True])), fattn.InvalidArgument, "causal is Array.*one value is needed"),
            (dict(scale=np.array([0.3])), fattn.InvalidArgument, "scale is array.*one value is needed"),
            (dict(scale="a"), fattn.InvalidArgument, "scale is 'a', not a number"),
            (dict(dropout_p=np.array([0.3, 0.4])), fattn.InvalidArgument, "dropout_p is array.*one value is needed"),
            (dict(layout="sbhd"), fattn.InvalidArgument, "layout is 'sbhd'"),
            (dict(softcap=-1.0), fattn.InvalidArgument, "softcap is -1"),
            (dict(device="abacus"), fattn.UnknownDevice, "abacus"),
            (dict(device=3), fattn.InvalidArgument, "device is 3"),
            (dict(k=None), TypeError, "k is None, not an array"),
            (dict(q=q[:, :, :3]), fattn.InvalidShape, "heads_q is 3, not a multiple"),
            (dict(zip("qkv", arrays(d=577, dv=577))), fattn.InvalidShape, "577")):
        given = dict(q=q, k=k, v=v) | change
        for trace in (lambda: fj.attention(**given), lambda: jax.eval_shape(lambda: fj.attention(**given))):
            with pytest.raises(exception, match=words):
                trace()
    with jax.enable_x64(True):
        wide = arrays(dtype=jnp.float64)
        with pytest.raises(fattn.Unsupported, match="f64"):
            jax.eval_shape(fj.attention, *wide)
        jax.eval_shape(lambda *a: fj.attention(*a, device="reference"), *wide)
    # What only the run can see, with the library's sentence.
    right, wrong = jnp.array([1, 9], jnp.int32), jnp.array([1, 99], jnp.int32)
    for again in range(2):
        with pytest.raises(RUN_ERRORS, match=r"seqused_k\[1\] is 99"):
            jax.block_until_ready(fj.attention(q, k, v, seqused_k=wrong))
        fj.attention(q, k, v, seqused_k=right)
    with pytest.raises(fattn.Unsupported, match="implementation"):
        fj.dot_product_attention(q, k, k, implementation="cudnn")
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        for lengths, exception, words in (([1.5, 2.0], fattn.InvalidArgument, "has dtype float32"),
                                          ([1, 2, 3], fattn.InvalidShape, r"has shape \(3,\), not \(2,\)")):
            with pytest.raises(exception, match=f"{name} {words}"):
                fj.dot_product_attention(q, k, k, **{name: jnp.array(lengths)})


def test_options_are_part_of_a_program():
    """A traced one is an error that says how to give it, and not JAX's about what is inside."""
    q, k, v = arrays()
    for name, call in (("is_causal", lambda x: fj.dot_product_attention(q, k, v, is_causal=x)),
                       ("local_window_size", lambda x: fj.dot_product_attention(q, k, v, local_window_size=(x, 0))),
                       ("return_residual", lambda x: fj.dot_product_attention(q, k, v, return_residual=x)),
                       ("return_lse", lambda x: fj.attention(q, k, v, return_lse=x)),
                       ("causal", lambda x: fj.attention(q, k, v, causal=x)),
                       ("scale", lambda x: fj.attention(q, k, v, scale=x)),
                       ("chunk", lambda x: fj.attention(q, k, v, chunk=x))):
        with pytest.raises(fattn.InvalidArgument, match=f"{name} is traced.*static_argnames"):
            jax.jit(call)(1)

    by_scale = jax.jit(lambda scale: fj.attention(q * scale, k, v, scale=1.0))  # as the error says
    close(by_scale(0.3), fj.attention(q, k, v, scale=0.3))
    for one in (np.bool_(True), np.array(True)):
        np.testing.assert_array_equal(fj.attention(q, k, v, causal=one), fj.attention(q, k, v, causal=True))
    np.testing.assert_array_equal(fj.attention(q, k, v, causal=jnp.array(True)), fj.attention(q, k, v, causal=True))
    n, = export.symbolic_shape("n")
    shapes = [jax.ShapeDtypeStruct((2, n, *a.shape[2:]), a.dtype) for a in (q, k, v)]
    with pytest.raises(fattn.Unsupported, match="symbolic ones are not taken"):
        export.export(jax.jit(fj.attention))(*shapes)


def test_export(tmp_path):
    """A program with its gradient, and where JAX can write it to a file, in another process."""
    q, k, v = arrays(dv=8)

    def attend(q, k, v):
        return fj.dot_product_attention(q, k, v, is_causal=True)

    exported = export.export(jax.jit(attend), disabled_checks=fj.disabled_checks)(q, k, v)
    wanted, gradients = jax.vjp(attend, q, k, v)
    np.testing.assert_array_equal(exported.call(q, k, v), wanted)
    for a, b in zip(exported.vjp().call(q, k, v, jnp.ones_like(wanted)), gradients(jnp.ones_like(wanted))):
        np.testing.assert_array_equal(a, b)
    if importlib.util.find_spec("flatbuffers") is None:
        return
    (tmp_path / "program").write_bytes(exported.serialize(vjp_order=1))
    np.savez(tmp_path / "arrays.npz", q=q, k=k, v=v, wanted=wanted)
    code = """
import fattn.jax, sys, numpy as np
from jax import export
with open(sys.argv[1] + "/program", "rb") as file:
    exported = export.deserialize(bytearray(file.read()))
arrays = np.load(sys.argv[1] + "/arrays.npz")
np.testing.assert_array_equal(exported.call(arrays["q"], arrays["k"], arrays["v"]), arrays["wanted"])
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_platforms():
    """Those that fattn has are in a program, alone and together; others are an error that names them."""
    q = arrays()[0]
    function = jax.jit(lambda q: fj.attention(q, q, q))
    for platforms in (["cpu"], ["cuda"], ["rocm"], ["cpu", "cuda"]):
        exported = export.export(function, platforms=platforms, disabled_checks=fj.disabled_checks)(q)
        assert exported.platforms == tuple(platforms)
        assert [name for name in ("cpu", "cuda", "hip") if f'backend = "{name}"' in exported.mlir_module()] == [
            {"rocm": "hip"}.get(name, name) for name in platforms]
    for platforms in (["tpu"], ["cpu", "tpu"]):
        with pytest.raises(fattn.Unsupported, match="runs on CPUs and on GPUs of NVIDIA and AMD, not on tpu"):
            export.export(function, platforms=platforms, disabled_checks=fj.disabled_checks)(q)
    gradient = jax.grad(lambda q: fj.attention(q, q, q).sum())
    for transformed in (function, gradient, lambda q: jax.vmap(function)(q[None])):
        with pytest.raises(fattn.Unsupported, match="not on tpu"):
            jax.jit(transformed).trace(q).lower(lowering_platforms=("tpu",))


def test_refusals():
    q = arrays()[0]
    for transform in (jax.jit, jax.vmap, lambda f: jax.grad(lambda q: f(q).sum())):
        with pytest.raises(fattn.Unsupported, match="use fattn.jax"):
            transform(lambda q: fattn.attention(q, q, q))(q[None] if transform is jax.vmap else q)
    for twice in (jax.hessian, lambda f: jax.jacrev(jax.grad(f))):
        for wrap in (lambda f: f, jax.jit, jax.checkpoint, lambda f: lambda q: jax.vmap(f)(q[None])[0]):
            with pytest.raises(fattn.Unsupported, match="attention has no second derivatives"):
                twice(wrap(lambda q: fj.attention(q, q, q).sum()))(q)


def test_interface_is_that_of_xla(tmp_path):
    """python/xla.h against the header that jaxlib brings."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    with open(os.path.join(HERE, "..", "..", "python", "xla.h"), encoding="utf-8") as file:
        ours = file.read()
    pairs = {
        "xla_extension": ("XLA_FFI_Extension_Base", {}),
        "xla_api_version": ("XLA_FFI_Api_Version", {"extension": "extension_start",
                                                    "major": "major_version", "minor": "minor_version"}),
        "xla_metadata": ("XLA_FFI_Metadata", {}),
        "xla_metadata_extension": ("XLA_FFI_Metadata_Extension", {"base": "extension_base"}),
        "xla_error_create_args": ("XLA_FFI_Error_Create_Args", {"extension": "extension_start",
                                                                "code": "errc"}),
        "xla_stream_get_args": ("XLA_FFI_Stream_Get_Args", {"extension": "extension_start",
                                                            "context": "ctx"}),
        "xla_device_ordinal_get_args": ("XLA_FFI_DeviceOrdinal_Get_Args", {
            "extension": "extension_start", "context": "ctx", "ordinal": "device_ordinal"}),
        "xla_api": ("XLA_FFI_Api", {
            "extension": "extension_start", "version": "api_version", "internal": "internal_api",
            "error_create": "XLA_FFI_Error_Create", "unused1": "XLA_FFI_Error_GetMessage",
            "stream_get": "XLA_FFI_Stream_Get", "unused2": "XLA_FFI_Type_Register",
            "device_ordinal_get": "XLA_FFI_DeviceOrdinal_Get"}),
        "xla_buffer": ("XLA_FFI_Buffer", {"extension": "extension_start"}),
        "xla_values": ("XLA_FFI_Args", {"extension": "extension_start", "values": "args"}),
        "xla_text": ("XLA_FFI_ByteSpan", {"text": "ptr", "length": "len"}),
        "xla_array": ("XLA_FFI_Array", {}),
        "xla_attributes": ("XLA_FFI_Attrs", {"extension": "extension_start", "values": "attrs"}),
        "xla_call": ("XLA_FFI_CallFrame", {"extension": "extension_start", "context": "ctx",
                                           "arguments": "args", "results": "rets",
                                           "attributes": "attrs"}),
    }
    structs = re.findall(r"typedef struct \w+ \{(.*?)\n\} (\w+);", ours, re.S)
    assert {name for _, name in structs} == set(pairs)
    checks = []
    for body, name in structs:
        theirs, names = pairs[name]
        body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
        for line in filter(None, (x.strip() for x in body.split(";"))):
            for field in re.findall(r"\(\*(\w+)\)|\*{0,2}(\w+)(?:\[\d+\])?(?:,|$)", line):
                field = "".join(field)
                checks.append(f'_Static_assert(offsetof({name}, {field}) == '
                              f'offsetof({theirs}, {names.get(field, field)}), "{name}.{field}");')
    assert len(checks) > 60
    for ours_, theirs in (("XLA_METADATA", "XLA_FFI_Extension_Metadata"),
                          ("XLA_EXECUTE", "XLA_FFI_ExecutionStage_EXECUTE"),
                          ("XLA_INVALID_ARGUMENT", "XLA_FFI_Error_Code_INVALID_ARGUMENT"),
                          ("XLA_INTERNAL", "XLA_FFI_Error_Code_INTERNAL"),
                          ("XLA_API_MAJOR", "XLA_FFI_API_MAJOR")):
        checks.append(f'_Static_assert({ours_} == (int){theirs}, "{ours_}");')
    source = tmp_path / "xla.c"
    header = (tmp_path / "c_api.h")
    with open(os.path.join(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h"),
              encoding="utf-8") as file:
        # The header is C++ where it uses tags as types, and says that it is C.
        text = file.read()
    tags = sorted(set(re.findall(r"struct (XLA_FFI_\w+) \{", text)))
    header.write_text("\n".join(f"typedef struct {t} {t};" for t in tags) + "\n" + text)
    source.write_text(f'#include "{header}"\n#include "python/xla.h"\n' + "\n".join(checks) + "\n")
    done = subprocess.run([compiler, "-std=gnu11", "-w", "-fsyntax-only", "-I", os.path.join(HERE, "..", ".."),
                           source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]


def test_without_the_library():
    code = "from fattn import _c; _c.find = lambda name: '/nowhere/' + name; import fattn.jax"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "ImportError: fattn.jax: cannot load libfattn_xla.so" in ran.stderr
    assert "-Dpython=enabled" in ran.stderr
