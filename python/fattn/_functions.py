# SPDX-License-Identifier: Apache-2.0
"""The public functions: names, shapes and defaults. The library does the rest."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any, Generic, Literal, Sequence, TypeVar, overload

from fattn import _c
from fattn._arrays import View, contiguous_strides, kind_of
from fattn._calls import (NO_EXTRAS, Gradients, Positions, backward, block_of, forward, integers, number,
                          split_positions, split_seed, window_of)
from fattn._errors import InvalidArgument, InvalidShape, InvalidStride, naming_cache_seqlens
from fattn._plans import device_of, prepare
from fattn._problem import EXTRAS, Options, box_of, check_layout, integer, len_of

A = TypeVar("A")
Window = Sequence[int | None] | int | None
DType = Any  # a name, or what a library has for it
Layout = Literal["bshd", "bhsd"]
Anchor = Literal["bottom_right", "top_left"]

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class _Options(TypedDict, Generic[A], total=False):
        """Of attention(), but for return_lse, on which the type of its result depends."""

        causal: bool
        window: Window
        scale: float | None
        softcap: float | None
        bias: A | None
        mask: A | None
        block_mask: A | None
        block_size: tuple[int, int] | None
        alibi_slopes: A | None
        alibi_bias: bool
        sink: A | None
        dropout_p: float
        seed: int | A
        offset: int
        seqused_q: A | None
        seqused_k: A | None
        seqstart_k: A | None
        chunk: int | None
        positions: Sequence[Any] | None
        anchor: Anchor
        layout: Layout
        batch_invariant: bool
        checked: bool
        out: A | None
        lse: A | None
        out_dtype: DType | None
        batch_offset: int
        head_offset: int
        device: str | None


@overload
def attention(q: A, k: A, v: A, *, return_lse: Literal[False] = ..., **options: Unpack[_Options[A]]) -> A: ...
@overload
def attention(q: A, k: A, v: A, *, return_lse: Literal[True], **options: Unpack[_Options[A]]) -> tuple[A, A]: ...
@overload
def attention(q: A, k: A, v: A, *, return_lse: bool, **options: Unpack[_Options[A]]) -> A | tuple[A, A]: ...
def attention(
        q: Any, k: Any, v: Any, *, causal: bool = False, window: Window = None,
        scale: float | None = None, softcap: float | None = None, bias: Any = None, mask: Any = None,
        block_mask: Any = None, block_size: tuple[int, int] | None = None, alibi_slopes: Any = None,
        alibi_bias: bool = False, sink: Any = None, dropout_p: float = 0.0, seed: Any = 0,
        offset: int = 0, seqused_q: Any = None, seqused_k: Any = None, seqstart_k: Any = None,
        chunk: int | None = None, positions: Sequence[Any] | None = None, anchor: Anchor = "bottom_right",
        layout: Layout = "bshd", batch_invariant: bool = False,
        checked: bool = False, out: Any = None, lse: Any = None, out_dtype: DType | None = None,
        return_lse: bool = False, batch_offset: int = 0, head_offset: int = 0,
        device: str | None = None) -> Any:
    """softmax(scale q k^T + bias, masks, windows, sinks ...) v, without storing the scores.

    Arrays of NumPy, PyTorch, CuPy, JAX or any library with DLPack are read in place. The result is
    of the same library, on the same device, and queued on the caller's stream. Letters: B batch, Hq and
    Hk heads of queries and of keys, Sq and Sk lengths, D and Dv channels. Query head h reads key head
    h // (Hq // Hk). In layout "bhsd" the axes of q, k, v and the result are (B, H, S, D).

    Args:
        q: (B, Sq, Hq, D); float32, float16, bfloat16, or float64 on device "reference".
        k: (B, Sk, Hk, D), of q's dtype. On a CPU k and v may be of other types, as of a 16-bit cache under
            float32 queries.
        v: (B, Sk, Hk, Dv), of q's dtype. Last axes are contiguous; other strides are free.
        causal: a query attends to no key after its own position.
        window: (left, right), how many keys before and after its own position a query attends to; -1 or None for all.
            One integer stands for both.
        scale: factor of the scores; 1 / sqrt(D) if None.
        softcap: scores x become softcap * tanh(x / softcap).
        bias: added to scores, float32 or of q's dtype, on a CPU also of the other 16-bit type; broadcast to
            (B, Hq, Sq, Sk).
        mask: boolean, True keeps; broadcast to (B, Hq, Sq, Sk).
        block_mask: boolean, a value for each block of block_size = (queries, keys); broadcast to
            (B, Hq, ceil(Sq / queries), ceil(Sk / keys)).
        alibi_slopes: float32 (Hq) or (B, Hq): scores get -slope * distance.
        alibi_bias: slopes multiply bias, which is needed, and not distances (CPU).
        sink: float32 (Hq), logits of an extra key whose value is 0.
        dropout_p: probability to drop a weight, 0 to 1. The pattern follows from seed, offset and the
            position alone. seed may be an int64 array of (seed, offset) on the arrays' device. With a
            dropout_p of 0, as in evaluation, neither is looked at.
        seqused_q, seqused_k: int32 (B), how many rows and keys of each sequence exist.
        seqstart_k: int32 (B), keys of each sequence before this one are padding (CPU). Those that exist
            keep their positions.
        chunk: keys are cut into chunks of so many, counted from position 0; a query attends only to the
            chunk of its own position, as in Llama 4.
        positions: where local rows and keys lie in a longer sequence; a Positions, or a tuple like one.
        anchor: which corner causal, window and ALiBi are anchored to where Sq != Sk. PyTorch's is_causal
            is "top_left".
        batch_invariant: a row's result depends on its own inputs only.
        checked: on a GPU, validate lengths and tables, and wait for that.
        out, lse: arrays to write results to, (B, Sq, Hq, Dv) and float32 (B, Hq, Sq).
        out_dtype: "float32", or a library's float32, for a result in float32; otherwise it is of q's dtype.
        return_lse: return (result, lse) with lse the natural logarithm of each row's sum.
        batch_offset, head_offset: global index of the first entry, for dropout of shards.
        device: "cpu", "cuda", "reference" ...; the arrays' own when None. Arrays in host memory are
            copied to and from a GPU that is named.

    Raises:
        fattn.Error: one of its subclasses; nothing has been written then.
        TypeError: an argument is no array, or an option is of no type that could be one.
    """
    features = 0
    if batch_invariant:
        features |= _c.BATCH_INVARIANT
    if checked:
        features |= _c.CHECKED
    if alibi_bias:
        features |= _c.ALIBI_BIAS
    extras: tuple[Any, ...] = NO_EXTRAS
    numbers = seeds = None
    if positions is not None:
        features |= _c.POSITIONS
    if scale is not None or softcap is not None or chunk is not None or block_size is not None:
        scale, softcap, block_size = number(scale), number(softcap), block_of(block_size)
        chunk, = integers(chunk=chunk)
    if dropout_p != 0:
        seeds, seed_array = split_seed(seed, offset)
        dropout_p = number(dropout_p)
        batch_offset, head_offset = integers(batch_offset=batch_offset, head_offset=head_offset)
    else:
        seed_array, dropout_p, batch_offset, head_offset = None, 0.0, 0, 0
    if not (bias is None and mask is None and sink is None and alibi_slopes is None and
            block_mask is None and seqused_k is None and seqused_q is None and seqstart_k is None and
            positions is None and seed_array is None):
        numbers, arrays = split_positions(positions)
        extras = (bias, mask, block_mask, alibi_slopes, sink, None, None, seqused_q, seqused_k, None,
                  seqstart_k, *arrays, seed_array)
    o, row_sums = forward(
        q, k, v,
        (_c.FORWARD, causal, None if window is None else window_of(window), scale, softcap, dropout_p,
         anchor, layout, out_dtype, return_lse or lse is not None, 0, features, None, None, block_size,
         batch_offset, head_offset, device, False, chunk),
        extras, numbers, seeds, out, lse)
    return (o, row_sums) if return_lse else o


def attention_varlen(
        q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any,
        max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, causal: bool = False,
        window: Window = None, scale: float | None = None, softcap: float | None = None,
        bias: Any = None, mask: Any = None, alibi_slopes: Any = None, sink: Any = None,
        dropout_p: float = 0.0, seed: Any = 0, offset: int = 0, seqused_q: Any = None,
        seqused_k: Any = None, seqstart_k: Any = None, chunk: int | None = None, block_table: Any = None,
        positions: Sequence[Any] | None = None, anchor: Anchor = "bottom_right", layout: Layout = "bshd",
        batch_invariant: bool = False,
        checked: bool = False, out: Any = None, lse: Any = None, out_dtype: DType | None = None,
        return_lse: bool = False, device: str | None = None) -> Any:
    """attention() of packed sequences of different lengths.

    Args:
        q: (total_q, Hq, D); in layout "bhsd" (Hq, total_q, D).
        k, v: (total_k, Hk, D) and (total_k, Hk, Dv); with block_table pages as in
            attention_with_kvcache().
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1), contiguous: sequence b owns rows cu[b] to cu[b + 1].
        max_seqlen_q, max_seqlen_k: the longest sequences. On a CPU they are read from cu_seqlens when
            None; on a GPU they are needed.
        block_table: int32 (B, pages).
        return_lse: return (result, lse), lse float32 (Hq, total_q).

    Other arguments and errors: attention(). bias and mask are (B, Hq, max_seqlen_q, max_seqlen_k), by
    positions in their sequence.
    """
    extras, numbers, seeds, features = _extras(
        bias, mask, alibi_slopes, sink, seqused_q, seqused_k, positions, dropout_p, seed, offset,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, block_table=block_table,
        seqstart_k=seqstart_k, batch_invariant=batch_invariant, checked=checked)
    if max_seqlen_q is None:
        max_seqlen_q = _longest(cu_seqlens_q, "q")
    if max_seqlen_k is None and block_table is None:
        max_seqlen_k = _longest(cu_seqlens_k, "k")
    max_seqlen_q, max_seqlen_k, chunk = integers(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, chunk=chunk)
    o, row_sums = forward(
        q, k, v,
        (_c.FORWARD, causal, window_of(window), number(scale), number(softcap), number(dropout_p), anchor, layout,
         out_dtype, return_lse or lse is not None, 0, features, max_seqlen_q, max_seqlen_k, None, 0, 0, device, False,
         chunk),
        extras, numbers, seeds, out, lse)
    return (o, row_sums) if return_lse else o


def _longest(cu_seqlens: Any, of: str) -> int:
    """The longest of the sequences, read from host memory."""
    name = f"cu_seqlens_{of}"
    kind = kind_of(cu_seqlens, name)
    view = kind.view(cu_seqlens, name)
    if view.device != "cpu":
        raise InvalidArgument(f"max_seqlen_{of} is needed: {name} is in a device's memory")
    count = len_of(view, name)
    if view.dtype != "int32" or view.strides != (1,):
        raise InvalidArgument(f"{name} is not contiguous int32")
    values = (ctypes.c_int32 * (count + 1)).from_address(kind.pointer(cu_seqlens))
    return max((values[b + 1] - values[b] for b in range(count)), default=0)


def _extras(bias: Any, mask: Any, alibi_slopes: Any, sink: Any, seqused_q: Any, seqused_k: Any,
            positions: Sequence[Any] | None, dropout_p: float, seed: Any, offset: int, *,
            block_mask: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
            block_table: Any = None, seqstart_k: Any = None, batch_invariant: bool = False,
            checked: bool = False, alibi_bias: bool = False,
            features: int = 0) -> tuple[tuple[Any, ...], Any, Any, int]:
    """Extras in their order, positions and seed as numbers, features."""
    numbers, arrays = split_positions(positions)
    seeds, seed_array = split_seed(seed, offset) if dropout_p != 0 else (None, None)
    for bit, wanted in ((_c.POSITIONS, positions is not None), (_c.CHECKED, checked),
                        (_c.BATCH_INVARIANT, batch_invariant), (_c.ALIBI_BIAS, alibi_bias)):
        if wanted:
            features |= bit
    return ((bias, mask, block_mask, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, seqused_q,
             seqused_k, block_table, seqstart_k, *arrays, seed_array), numbers, seeds, features)


def attention_with_kvcache(
        q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any = None, block_table: Any = None,
        max_seqlen_k: int | None = None, causal: bool = False, window: Window = None,
        scale: float | None = None, softcap: float | None = None, bias: Any = None, mask: Any = None,
        alibi_slopes: Any = None, sink: Any = None, seqstart_k: Any = None, chunk: int | None = None,
        anchor: Anchor = "bottom_right", layout: Layout = "bshd", batch_invariant: bool = False,
        checked: bool = False, out: Any = None, lse: Any = None, out_dtype: DType | None = None,
        return_lse: bool = False, device: str | None = None) -> Any:
    """attention() of new queries against a partly filled or paged cache.

    Args:
        q: (B, Sq, Hq, D).
        k_cache, v_cache: (B, Sk, Hk, D) and (B, Sk, Hk, Dv); with block_table (pages, page_size, Hk, D)
            and (pages, page_size, Hk, Dv); in layout "bhsd" heads come before keys.
        cache_seqlens: int32 (B), number of filled keys of each sequence, including the new ones. With
            causal, the last query attends to the last of them.
        block_table: int32 (B, max_pages), the pages of each sequence.
        max_seqlen_k: the greatest value of cache_seqlens; the capacity if None.

    Other arguments and errors: attention().
    """
    extras, numbers, seeds, features = _extras(
        bias, mask, alibi_slopes, sink, None, cache_seqlens, None, 0.0, 0, 0, block_table=block_table,
        seqstart_k=seqstart_k, batch_invariant=batch_invariant, checked=checked)
    if block_table is None:
        max_seqlen_k = None
    max_seqlen_k, chunk = integers(max_seqlen_k=max_seqlen_k, chunk=chunk)
    with naming_cache_seqlens:
        o, row_sums = forward(
            q, k_cache, v_cache,
            (_c.FORWARD, causal, window_of(window), number(scale), number(softcap), 0.0, anchor, layout, out_dtype,
             return_lse or lse is not None, 0, features, None, max_seqlen_k, None, 0, 0, device, False, chunk),
            extras, numbers, seeds, out, lse)
    return (o, row_sums) if return_lse else o


def attention_backward(
        dout: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, dlse: Any = None,
        causal: bool = False, window: Window = None, scale: float | None = None,
        softcap: float | None = None, bias: Any = None, mask: Any = None, block_mask: Any = None,
        block_size: tuple[int, int] | None = None, alibi_slopes: Any = None, alibi_bias: bool = False,
        sink: Any = None, dropout_p: float = 0.0, seed: Any = 0, offset: int = 0,
        cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None, seqused_q: Any = None, seqused_k: Any = None,
        seqstart_k: Any = None, chunk: int | None = None, positions: Sequence[Any] | None = None,
        anchor: Anchor = "bottom_right", layout: Layout = "bshd", deterministic: bool = False,
        accumulate: bool = False, want: Sequence[str] = ("dq", "dk", "dv"), dq: Any = None,
        dk: Any = None, dv: Any = None, dbias: Any = None, dsink: Any = None, batch_offset: int = 0,
        head_offset: int = 0, checked: bool = False, device: str | None = None) -> Gradients:
    """Gradients of attention() or attention_varlen(), which must be given the same options.

    Args:
        dout: gradient of the result, of its shape and dtype.
        o, lse: the result and its lse, from `return_lse=True`.
        dlse: float32, gradient of lse.
        want: which gradients: of "dq", "dk", "dv", "dbias", "dsink". dq, dk and dv are of the types of
            q, k and v, dbias and dsink float32. dbias has bias's shape and is summed over axes of size 1.
        dq, dk, dv, dbias, dsink: arrays to write gradients to; a given array is computed.
        accumulate: add to the given gradients, which must all be float32.
        deterministic: the same bits from run to run on GPUs as well; CPUs always give them.

    Other arguments: attention(), attention_varlen(). Returns Gradients(dq, dk, dv, dbias, dsink).
    """
    features = (_c.DETERMINISTIC if deterministic else 0) | (_c.ACCUMULATE if accumulate else 0)
    extras, numbers, seeds, features = _extras(
        bias, mask, alibi_slopes, sink, seqused_q, seqused_k, positions, dropout_p, seed, offset,
        block_mask=block_mask, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, checked=checked,
        seqstart_k=seqstart_k, alibi_bias=alibi_bias, features=features)
    given = {name: a for name, a in zip(Gradients._fields, (dq, dk, dv, dbias, dsink))
             if a is not None}
    outputs = 0
    for name in (*want, *given):
        if name not in Gradients._fields:
            raise InvalidArgument(f"want has {name!r}, none of {', '.join(Gradients._fields)}")
        outputs |= _c.OUT_DQ << Gradients._fields.index(name)
    if outputs == 0:
        return Gradients()
    if cu_seqlens_q is not None and max_seqlen_q is None:
        max_seqlen_q = _longest(cu_seqlens_q, "q")
    if cu_seqlens_k is not None and max_seqlen_k is None:
        max_seqlen_k = _longest(cu_seqlens_k, "k")
    max_seqlen_q, max_seqlen_k, chunk, batch_offset, head_offset = integers(
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, chunk=chunk, batch_offset=batch_offset,
        head_offset=head_offset)
    return backward(
        dout, q, k, v, o, lse, dlse,
        (_c.BACKWARD, causal, window_of(window), number(scale), number(softcap), number(dropout_p), anchor, layout,
         None, False, outputs, features, max_seqlen_q, max_seqlen_k, block_of(block_size), batch_offset, head_offset,
         device, False, chunk),
        extras, numbers, seeds, given)


# --- Merging and dropout --------------------------------------------------------------------------


def merge(o1: Any, lse1: Any, o2: Any, lse2: Any, *, layout: Layout = "bshd", out: Any = None,
          lse: Any = None, device: str | None = None) -> tuple[Any, Any]:
    """Merges two results over disjoint keys into that over all of them.

    Args:
        o1, o2: float32 (B, S, H, Dv), as attention() gives them with out_dtype="float32".
        lse1, lse2: float32 (B, H, S), contiguous.
        out, lse: arrays to write to; may be (o1, lse1) or (o2, lse2).

    Returns (o, lse). Raises as attention() does.
    """
    kind = kind_of(o1, "o1")
    arrays = {"o1": o1, "lse1": lse1, "o2": o2, "lse2": lse2}
    if out is None:
        out = kind.empty(tuple(o1.shape), "float32", o1)
    if lse is None:
        lse = kind.empty(tuple(lse1.shape), "float32", lse1)
    args = _c.MergeArgs()
    args.struct_size = ctypes.sizeof(args)
    views = _views(kind, arrays | {"o": out, "lse": lse})
    check_layout(layout)
    boxes = {name: box_of(name, views[name], layout, False) for name in ("o1", "o2", "o")}
    b, s, h, c, _ = boxes["o1"]
    args.batch, args.seqlen, args.heads, args.dim_v = b, s, h, c
    for name, box in boxes.items():
        if box[:4] != (b, s, h, c):
            raise InvalidShape(f"{name} has shape {views[name].shape}, o1 {views['o1'].shape}")
        field = getattr(args, name + "_stride")
        field.batch, field.seq, field.head = box.strides
    for name in ("lse1", "lse2", "lse"):
        if views[name].shape != (b, h, s):
            raise InvalidShape(f"{name} has shape {views[name].shape}, not {(b, h, s)}")
        if any(n > 1 and step != wanted for n, step, wanted in
               zip((b, h, s), views[name].strides, contiguous_strides((b, h, s)))):
            raise InvalidStride(f"{name} must be contiguous")
    for name in ("o", "lse"):
        if not views[name].writable:
            raise InvalidArgument(f"{name} is read-only")
    for name, array in (*arrays.items(), ("o", out), ("lse", lse)):
        setattr(args, name, kind.pointer(array))
    handle = device_of(device, views["o1"].device)
    _c.check(_c.lib.fattn_merge(handle, ctypes.byref(args), kind.stream(o1)))
    return kind.finish(out, o1, handle), kind.finish(lse, o1, handle)


def _views(kind: Any, arrays: dict[str, Any]) -> dict[str, View]:
    views = {}
    for name, array in arrays.items():
        if kind_of(array, name) is not kind:
            raise InvalidArgument(f"{name} is a {kind_of(array).name} array, not {kind.name}")
        views[name] = kind.view(array, name)
        if views[name].dtype != "float32":
            raise InvalidArgument(f"{name} has dtype {views[name].dtype}, not float32")
    first = next(iter(views.values()))
    for name, view in views.items():
        if view.device != first.device:
            raise InvalidArgument(f"{name} is on device {view.device}, not on {first.device}")
    return views


def dropout_mask(batch: int, heads: int, seqlen_q: int, seqlen_k: int, *, dropout_p: float,
                 seed: int = 0, offset: int = 0, batch_offset: int = 0, head_offset: int = 0,
                 q_offset: int = 0, k_offset: int = 0) -> Any:
    """The dropout pattern of a seed as a NumPy array, boolean (batch, heads, seqlen_q, seqlen_k): True is
    kept. The same on any device. For inspection and tests."""
    import numpy
    (seed, offset), _ = split_seed(seed, offset)
    if min(batch, heads, seqlen_q, seqlen_k) < 0:
        raise InvalidShape(f"a size of {(batch, heads, seqlen_q, seqlen_k)} is negative")
    keep: Any = numpy.empty((batch, heads, seqlen_q, seqlen_k), numpy.uint8)
    args = _c.DropoutArgs()
    args.struct_size = ctypes.sizeof(args)
    args.batch, args.heads, args.seqlen_q, args.seqlen_k = keep.shape
    for name, value in (("batch_offset", batch_offset), ("head_offset", head_offset), ("q_offset", q_offset),
                        ("k_offset", k_offset)):
        setattr(args, name, integer(value, name))
    args.p, args.seed, args.offset = dropout_p, seed, offset
    args.keep = keep.ctypes.data
    _c.check(_c.lib.fattn_dropout_mask(device_of("cpu", "cpu"), ctypes.byref(args), None))
    return keep.view(numpy.bool_)


# --- Scores and plans that are looked at ----------------------------------------------------------


def inspect(q: A, k: A, v: A, *, what: Literal["scores", "probabilities"] = "scores",
            causal: bool = False, window: Window = None, scale: float | None = None,
            softcap: float | None = None, bias: A | None = None, mask: A | None = None,
            block_mask: A | None = None, block_size: tuple[int, int] | None = None,
            alibi_slopes: A | None = None, alibi_bias: bool = False, sink: A | None = None,
            seqused_q: A | None = None, seqused_k: A | None = None, seqstart_k: A | None = None,
            chunk: int | None = None, positions: Sequence[Any] | None = None,
            anchor: Anchor = "bottom_right", layout: Layout = "bshd", device: str | None = None) -> A:
    """The matrix that attention() never stores: for looking at heads, and for tests.

    Args:
        what: "scores" as the softmax sees them, -inf where a key is not attended to, or "probabilities"
            exp(score - lse), 0 there.

    Other arguments: attention(). Returns float32 (B, Hq, Sq, Sk). Rows and keys that a sequence does not
    have read as keys that are not attended to. Computed in double precision by one thread, for arrays in
    host memory; raises Unsupported for those of a GPU.
    """
    if what not in ("scores", "probabilities"):
        raise InvalidArgument(f'what is {what!r}, neither "scores" nor "probabilities"')
    kind = kind_of(q, "q")
    extras, numbers, _, features = _extras(
        bias, mask, alibi_slopes, sink, seqused_q, seqused_k, positions, 0.0, 0, 0,
        block_mask=block_mask, seqstart_k=seqstart_k, alibi_bias=alibi_bias)
    arrays: dict[str, Any] = {"q": q, "k": k, "v": v}
    arrays.update((name, e) for (name, *_), e in zip(EXTRAS, extras) if e is not None)
    options = Options(_c.FORWARD, causal, window_of(window), scale, softcap, 0.0, anchor, layout,
                      features=features, block_size=block_of(block_size), device=device, chunk=chunk)
    prepared = prepare(kind, options, arrays)
    problem = prepared.problem
    shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    dtype = "float64" if problem.dtype == _c.F64 else "float32"
    buffers, _memory = _c.new_struct(_c.Buffers, _c.lib.fattn_buffers_init)
    for name, array in arrays.items():
        setattr(buffers, name, kind.pointer(array))
    for name, number in zip(Positions._fields, numbers or ()):
        setattr(buffers, name, number)
    args, _room = _c.new_struct(_c.InspectArgs, _c.lib.fattn_inspect_args_init)
    args.what = _c.SCORES if what == "scores" else _c.PROBABILITIES
    result = kind.empty(shape, dtype, q)
    args.to = kind.pointer(result)
    if prepared.host_memory:  # what follows leaves entries of keys that do not exist as they are
        entry = ctypes.c_double if dtype == "float64" else ctypes.c_float
        count = shape[0] * shape[1] * shape[2] * shape[3]
        bits = bytes(entry(-math.inf if what == "scores" else 0.0)) * shape[3]
        for row in range(count // max(shape[3], 1)):
            ctypes.memmove(args.to + row * len(bits), bits, len(bits))
    _c.check(_c.lib.fattn_inspect(prepared.device, ctypes.addressof(problem), ctypes.addressof(buffers),
                                  ctypes.addressof(args)))
    finished: A = kind.finish(result, q, prepared.device)
    return finished


class Plan:
    """How a problem is computed on a device.

    Takes the arrays and options of an attention() call; only shapes, strides, dtypes and device of the
    arrays matter. attention() caches its own plans, so this class is only for inspecting them.

        print(fattn.Plan(q, k, v, causal=True))
    """

    def __init__(self, q: Any, k: Any, v: Any, *, causal: bool = False, window: Window = None,
                 scale: float | None = None, softcap: float | None = None, bias: Any = None,
                 mask: Any = None, block_mask: Any = None, block_size: tuple[int, int] | None = None,
                 alibi_slopes: Any = None, alibi_bias: bool = False, sink: Any = None,
                 dropout_p: float = 0.0,
                 cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: int | None = None,
                 max_seqlen_k: int | None = None, seqused_q: Any = None, seqused_k: Any = None,
                 seqstart_k: Any = None, chunk: int | None = None, block_table: Any = None,
                 positions: Sequence[Any] | None = None,
                 anchor: Anchor = "bottom_right", layout: Layout = "bshd",
                 batch_invariant: bool = False, out_dtype: DType | None = None,
                 return_lse: bool = False, backward: bool = False, deterministic: bool = False,
                 device: str | None = None) -> None:
        kind = kind_of(q, "q")
        features = _c.DETERMINISTIC if deterministic else 0
        extras, _, _, features = _extras(
            bias, mask, alibi_slopes, sink, seqused_q, seqused_k, positions, dropout_p, 0, 0,
            block_mask=block_mask, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            block_table=block_table, seqstart_k=seqstart_k, alibi_bias=alibi_bias,
            batch_invariant=batch_invariant, features=features)
        if cu_seqlens_q is not None and max_seqlen_q is None:
            max_seqlen_q = _longest(cu_seqlens_q, "q")
        if cu_seqlens_k is not None and max_seqlen_k is None and block_table is None:
            max_seqlen_k = _longest(cu_seqlens_k, "k")
        arrays = {"q": q, "k": k, "v": v}
        arrays.update((name, e) for (name, *_), e in zip(EXTRAS, extras) if e is not None)
        options = Options(
            _c.FORWARD, causal, window_of(window), scale, softcap, dropout_p, anchor, layout, out_dtype,
            return_lse, 0, features, max_seqlen_q, max_seqlen_k, block_of(block_size), 0, 0, device, False,
            chunk)
        prepared = prepare(kind, options, arrays)
        if backward:
            prepared = prepared.backward()
        self._handle = prepared.plan(16)
        info = self._handle.info()
        self.kernel: str = info.kernel.decode()
        """Name of the kernel."""
        self.br: int = info.br
        """Queries of a tile."""
        self.bc: int = info.bc
        """Keys of a tile."""
        self.splits: int = info.splits
        """Parts that the keys of a row are cut into."""
        self.work_items: int = info.work_items
        """Independent pieces of work."""
        self.workspace_bytes: int = info.workspace_bytes
        """What a run needs besides its arrays."""
        self.predicted_bytes: float = info.predicted_bytes
        """Slow-memory traffic of this plan."""
        self.standard_bytes: float = info.standard_bytes
        """Traffic of attention that materialises its scores."""
        self.lower_bound_bytes: float = info.lower_bound_bytes
        """Every input read once, every output written once."""
        self.flops: float = info.flops
        """Multiplications and additions of the matrix products."""
        self.effective_dropout: float = info.effective_dropout
        """The dropout probability after rounding."""

    def __str__(self) -> str:
        return self._handle.describe()

    def __deepcopy__(self, memo: Any) -> Plan:
        return self  # which does not change


def explain(q: Any, k: Any, v: Any, **options: Any) -> str:
    """The plan of attention(q, k, v, **options) in words, with the reason why each faster kernel
    declined. Takes the arguments of Plan."""
    return str(Plan(q, k, v, **options))
