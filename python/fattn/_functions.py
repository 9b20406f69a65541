# SPDX-License-Identifier: Apache-2.0
"""The public functions: names, shapes and defaults. The library does the rest."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any, Generic, Literal, Sequence, TypeVar, overload

from fattn import _c
from fattn._arrays import View, contiguous_strides, kind_of
from fattn._calls import (NO_EXTRAS, Gradients, Positions, backward, block_of, descales_of, forward, integers, number,
                          split_positions, split_seed, window_of)
from fattn._errors import InvalidArgument, InvalidShape, InvalidStride, naming_cache_seqlens
from fattn._plans import device_of, prepare
from fattn._problem import EXTRAS, Options, box_of, check_layout, integer, len_of, real

A = TypeVar("A")
Window = Sequence[int | None] | int | None
DType = Any  # a name, or what a library has for it
Layout = Literal["bshd", "bhsd"]
Anchor = Literal["bottom_right", "top_left"]

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class _Options(TypedDict, Generic[A], total=False):
        """Options of attention(), except return_lse, on which the type of the result depends."""

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
        k_descale: float | A | None
        v_descale: float | A | None
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
        chunk: int | None = None, positions: Sequence[Any] | None = None, k_descale: Any = None,
        v_descale: Any = None, anchor: Anchor = "bottom_right", layout: Layout = "bshd", batch_invariant: bool = False,
        checked: bool = False, out: Any = None, lse: Any = None, out_dtype: DType | None = None,
        return_lse: bool = False, batch_offset: int = 0, head_offset: int = 0,
        device: str | None = None) -> Any:
    """softmax(scale q k^T + bias, masks, windows, sinks ...) v, without storing the scores.

    Arrays of NumPy, PyTorch, CuPy, JAX or any library with DLPack are read in place. All arrays of a call
    are of one library and on one device, and so is the result. On a GPU the work is queued on the library's
    current stream, and the call does not wait for it (with arrays read by DLPack it does). No gradients are
    recorded: see attention_backward() and fattn.torch.

    Letters: B batch, Hq and Hk heads of queries and of keys, Sq and Sk lengths, D and Dv channels. Query head
    h reads key head h // (Hq // Hk). In layout "bhsd" the axes of q, k, v and the result are (B, H, S, D).

    Args:
        q: (B, Sq, Hq, D); float32, float16, bfloat16, or float64 on device "reference".
        k: (B, Sk, Hk, D), of q's dtype. k and v may also be of other types, such as a 16-bit cache with float32
            queries, or float8_e4m3fn, a cache in 8 bits.
        v: (B, Sk, Hk, Dv), of q's dtype. The last axes of q, k and v must be contiguous; their other strides
            may be any that are not negative.
        causal: a query attends to no key after its own position.
        window: (left, right), how many keys before and after its own position a query attends to; -1 or None: all.
            One integer stands for both.
        scale: factor of the scores; 1 / sqrt(D) if None.
        softcap: scores x become softcap * tanh(x / softcap).
        bias: added to scores, float32 or of q's dtype, on a CPU also float16 or bfloat16 whatever that is; broadcast
            to (B, Hq, Sq, Sk). -inf hides a pair.
        mask: boolean or 8-bit integers, True or non-zero keeps a pair; broadcast to (B, Hq, Sq, Sk).
        block_mask: the same for blocks of block_size = (queries, keys); broadcast to
            (B, Hq, ceil(Sq / queries), ceil(Sk / keys)).
        alibi_slopes: float32 (Hq) or (B, Hq): -slope * distance is added to scores.
        alibi_bias: slopes multiply bias, which is needed then, instead of distances (CPU).
        sink: float32 (Hq), the logit of an extra key whose value is 0, for each head.
        dropout_p: probability to drop a weight, 0 to 1. The pattern depends on seed, offset and positions
            only. seed may be an int64 array of (seed, offset) on the arrays' device. With a dropout_p of 0,
            as in evaluation, both are ignored.
        seqused_q, seqused_k: int32 (B), how many rows and keys of each sequence exist. Results of rows that
            do not exist are undefined.
        seqstart_k: int32 (B), the first key of each sequence that exists; those before it are padding (CPU).
            The others keep their positions.
        chunk: keys are divided into chunks of this length, counted from position 0; a query attends only to
            the chunk of its own position, as in Llama 4.
        positions: where local rows and keys lie in a longer sequence; a Positions, or a tuple like one.
        k_descale, v_descale: what k and v are multiplied by, for caches whose numbers were divided by it: a
            number, or float32 that broadcasts to (B, Hk). None: 1. Two arrays are read in place if they have the same
            strides there, such as two of one shape; otherwise both are copied.
        anchor: which corner causal, window and ALiBi are anchored to where Sq != Sk. PyTorch's is_causal
            is "top_left".
        batch_invariant: the bits of a row's result depend on its own inputs only, not on the rest of the batch.
        checked: on a GPU, validate lengths and tables first, and wait for that. On a CPU they always are.
        out, lse: arrays to write results to, (B, Sq, Hq, Dv) and float32 (B, Hq, Sq).
        out_dtype: "float32", or a library's float32, for a result in float32; otherwise it is of q's dtype.
        return_lse: return (result, lse), with lse the natural logarithm of each row's sum of exponentials.
        batch_offset, head_offset: global index of the first sequence and of the first query head, for dropout
            in shards of a batch.
        device: "cpu", "cuda", "reference" ...; None: that of the arrays. If arrays in host memory are given
            and a GPU is named, they are copied to it, and results back.

    Returns:
        (B, Sq, Hq, Dv), of q's dtype unless out_dtype or out says otherwise; with return_lse also lse, float32
        (B, Hq, Sq). On device "reference" with float64, where float32 stands here it is float64. A row that
        attends to no key is 0, and its lse is -inf.

    Raises:
        fattn.Error: one of its subclasses, such as InvalidShape or Unsupported; nothing has been written then.
        TypeError: what should be an array is not one. A wrong option raises InvalidArgument instead.
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
            positions is None and seed_array is None and k_descale is None and v_descale is None):
        numbers, arrays = split_positions(positions)
        extras = (bias, mask, block_mask, alibi_slopes, sink, None, None, seqused_q, seqused_k, None,
                  seqstart_k, *arrays, seed_array, *descales_of(k_descale, v_descale, q))
    o, row_sums = forward(
        q, k, v,
        (_c.FORWARD, causal, None if window is None else window_of(window), scale, softcap, dropout_p,
         anchor, layout, out_dtype, return_lse or lse is not None, 0, features, None, None, block_size,
         batch_offset, head_offset, device, False, chunk),
        extras, numbers, seeds, out, lse)
    return (o, row_sums) if return_lse else o


def attention_varlen(
        q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any = None,
        max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, causal: bool = False,
        window: Window = None, scale: float | None = None, softcap: float | None = None,
        bias: Any = None, mask: Any = None, alibi_slopes: Any = None, sink: Any = None,
        dropout_p: float = 0.0, seed: Any = 0, offset: int = 0, seqused_q: Any = None,
        seqused_k: Any = None, seqstart_k: Any = None, chunk: int | None = None, block_table: Any = None,
        positions: Sequence[Any] | None = None, k_descale: Any = None, v_descale: Any = None,
        anchor: Anchor = "bottom_right", layout: Layout = "bshd", batch_invariant: bool = False,
        checked: bool = False, out: Any = None, lse: Any = None, out_dtype: DType | None = None,
        return_lse: bool = False, device: str | None = None) -> Any:
    """attention() of sequences of different lengths, packed one after another.

    Args:
        q: (total_q, Hq, D); in layout "bhsd" (Hq, total_q, D).
        k, v: (total_k, Hk, D) and (total_k, Hk, Dv); with block_table pages as in
            attention_with_kvcache().
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1), contiguous: sequence b owns rows cu[b] to cu[b + 1].
            Without cu_seqlens_k, k and v are not packed: they are pages, or (B, Sk, Hk, D), of which
            sequence b has the first seqused_k[b] keys. So a step of an engine has its prompts and single
            tokens in one call, over one cache.
        max_seqlen_q, max_seqlen_k: the greatest lengths. On a CPU they are read from cu_seqlens when None; on
            a GPU they are needed. With block_table max_seqlen_k is the capacity when None. Over (B, Sk, Hk, D) it
            is an error.
        bias, mask: broadcast to (B, Hq, max_seqlen_q, max_seqlen_k), indexed by positions in a sequence.
        block_table: int32 (B, max_pages), the pages of each sequence's keys.

    Returns:
        (total_q, Hq, Dv), or (Hq, total_q, Dv) in layout "bhsd"; with return_lse also lse, float32 (Hq, total_q).
        Rows that belong to no sequence are undefined.

    Other arguments, and errors: attention().
    """
    extras, numbers, seeds, features = _extras(
        bias, mask, alibi_slopes, sink, seqused_q, seqused_k, positions, dropout_p, seed, offset,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, block_table=block_table,
        seqstart_k=seqstart_k, batch_invariant=batch_invariant, checked=checked,
        descales=descales_of(k_descale, v_descale, q))
    if max_seqlen_q is None:
        max_seqlen_q = _longest(cu_seqlens_q, "q")
    if max_seqlen_k is None and block_table is None and cu_seqlens_k is not None:
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
    """The length of the longest sequence, read from host memory."""
    name = f"cu_seqlens_{of}"
    kind = kind_of(cu_seqlens, name)
    view = kind.view(cu_seqlens, name)
    if view.device != "cpu":
        raise InvalidArgument(f"max_seqlen_{of} is needed, because {name} is on a GPU")
    count = len_of(view, name)
    if view.dtype != "int32" or view.strides != (1,):
        raise InvalidArgument(f"{name} is {view.dtype} with stride {view.strides[0]}, not contiguous int32")
    values = (ctypes.c_int32 * (count + 1)).from_address(kind.pointer(cu_seqlens))
    return max((values[b + 1] - values[b] for b in range(count)), default=0)


def _extras(bias: Any, mask: Any, alibi_slopes: Any, sink: Any, seqused_q: Any, seqused_k: Any,
            positions: Sequence[Any] | None, dropout_p: float, seed: Any, offset: int, *,
            block_mask: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
            block_table: Any = None, seqstart_k: Any = None, batch_invariant: bool = False,
            checked: bool = False, alibi_bias: bool = False, descales: tuple[Any, ...] = (),
            features: int = 0) -> tuple[tuple[Any, ...], Any, Any, int]:
    """Extras in their order, positions and seed as numbers, features."""
    numbers, arrays = split_positions(positions)
    seeds, seed_array = split_seed(seed, offset) if dropout_p != 0 else (None, None)
    for bit, wanted in ((_c.POSITIONS, positions is not None), (_c.CHECKED, checked),
                        (_c.BATCH_INVARIANT, batch_invariant), (_c.ALIBI_BIAS, alibi_bias)):
        if wanted:
            features |= bit
    return ((bias, mask, block_mask, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, seqused_q,
             seqused_k, block_table, seqstart_k, *arrays, seed_array, *descales), numbers, seeds, features)


def attention_with_kvcache(
        q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any = None, block_table: Any = None,
        max_seqlen_k: int | None = None, causal: bool = False, window: Window = None,
        scale: float | None = None, softcap: float | None = None, bias: Any = None, mask: Any = None,
        alibi_slopes: Any = None, sink: Any = None, seqstart_k: Any = None, chunk: int | None = None,
        k_descale: Any = None, v_descale: Any = None, anchor: Anchor = "bottom_right", layout: Layout = "bshd",
        batch_invariant: bool = False, checked: bool = False, out: Any = None, lse: Any = None,
        out_dtype: DType | None = None, return_lse: bool = False, device: str | None = None) -> Any:
    """attention() of new queries to keys and values in a partly filled or paged cache, which is only read.

    Args:
        q: (B, Sq, Hq, D).
        k_cache, v_cache: (B, Sk, Hk, D) and (B, Sk, Hk, Dv); with block_table (pages, page_size, Hk, D)
            and (pages, page_size, Hk, Dv); in layout "bhsd" heads come before keys.
        cache_seqlens: int32 (B), number of filled keys of each sequence, including the new ones. With
            causal, the last query attends to the last of them.
        block_table: int32 (B, max_pages), the pages of each sequence.
        max_seqlen_k: the greatest value of cache_seqlens, only with block_table; the capacity if None.

    Returns (B, Sq, Hq, Dv), with return_lse also lse, float32 (B, Hq, Sq). Other arguments, and errors: attention().
    """
    extras, numbers, seeds, features = _extras(
        bias, mask, alibi_slopes, sink, None, cache_seqlens, None, 0.0, 0, 0, block_table=block_table,
        seqstart_k=seqstart_k, batch_invariant=batch_invariant, checked=checked,
        descales=descales_of(k_descale, v_descale, q))
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
    """Gradients of attention(), or with cu_seqlens of attention_varlen(), called with the same options.

    Args:
        dout: gradient of the result, of its shape and dtype.
        o, lse: the result and its lse, from `return_lse=True`.
        dlse: gradient of lse, of its shape and dtype; None: 0.
        want: which gradients to compute, of "dq", "dk", "dv", "dbias", "dsink".
        dq, dk, dv, dbias, dsink: arrays to write gradients to. One that is given is computed, whether want
            names it or not.
        max_seqlen_q, max_seqlen_k: as in attention_varlen(), only with cu_seqlens.
        accumulate: add to the given gradients, which must all be float32. Each one that want names must be given.
        deterministic: the same bits from run to run on GPUs as well; CPUs always give them.

    Returns:
        Gradients(dq, dk, dv, dbias, dsink), None for those that were not wanted. dq, dk and dv have the shapes
        and dtypes of q, k and v, also where an axis of these has stride 0; dbias and dsink have those of bias and
        sink, in float32. An axis of size 1 along which bias is broadcast is summed over. Rows of dq, dk and dv past
        the last sequence, and rows of dq past seqused_q, are undefined; rows of dk and dv past seqused_k are 0.

    There are no gradients of alibi_slopes, and none with block_table. Other arguments, and errors: attention(),
    attention_varlen().
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
            raise InvalidArgument(f"want has {name!r}, which is not one of {', '.join(Gradients._fields)}")
        if accumulate and name not in given:
            raise InvalidArgument(f"accumulate adds to {name}, which is wanted but not given")
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
    """Merges the results of the same queries over two disjoint sets of keys into the result over all of them.

    Args:
        o1, o2: float32 (B, S, H, Dv), as attention() gives them with out_dtype="float32"; in layout "bhsd"
            (B, H, S, Dv).
        lse1, lse2: float32 (B, H, S), contiguous.
        out, lse: arrays to write to; may be (o1, lse1) or (o2, lse2).
        device: as in attention().

    Returns (o, lse), of the shapes and dtypes of o1 and lse1. Arrays, streams and errors are as in attention();
    no gradients are recorded.
    """
    kind = kind_of(o1, "o1")
    arrays = {"o1": o1, "lse1": lse1, "o2": o2, "lse2": lse2}
    for name, array in arrays.items():
        kind_of(array, name)  # raises TypeError unless it is one
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
        views[name] = kind.view_for_planning(array, name)
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
    """The dropout pattern of a seed, for inspection and tests: the same on any device.

    Args:
        dropout_p, seed, offset, batch_offset, head_offset: as in attention(); seed is a number.
        q_offset, k_offset: positions of the first row and of the first key, as in Positions.

    Returns a NumPy array, boolean (batch, heads, seqlen_q, seqlen_k): True where a weight is kept.
    """
    import numpy
    (seed, offset), array = split_seed(seed, offset)
    if array is not None:
        raise InvalidArgument(f"seed is {array!r}, not an integer")
    shape = integers(batch=batch, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    if min(shape) < 0:
        raise InvalidShape(f"a size of {shape} is negative")
    keep: Any = numpy.empty(shape, numpy.uint8)
    args = _c.DropoutArgs()
    args.struct_size = ctypes.sizeof(args)
    args.batch, args.heads, args.seqlen_q, args.seqlen_k = keep.shape
    for name, value in (("batch_offset", batch_offset), ("head_offset", head_offset), ("q_offset", q_offset),
                        ("k_offset", k_offset)):
        setattr(args, name, integer(value, name))
    args.p, args.seed, args.offset = real(dropout_p, "dropout_p"), seed, offset
    args.keep = keep.ctypes.data
    _c.check(_c.lib.fattn_dropout_mask(device_of("cpu", "cpu"), ctypes.byref(args), None))
    return keep.view(numpy.bool_)


# --- Inspection of scores and plans ---------------------------------------------------------------


def inspect(q: A, k: A, v: A, *, what: Literal["scores", "probabilities"] = "scores",
            causal: bool = False, window: Window = None, scale: float | None = None,
            softcap: float | None = None, bias: A | None = None, mask: A | None = None,
            block_mask: A | None = None, block_size: tuple[int, int] | None = None,
            alibi_slopes: A | None = None, alibi_bias: bool = False, sink: A | None = None,
            seqused_q: A | None = None, seqused_k: A | None = None, seqstart_k: A | None = None,
            chunk: int | None = None, positions: Sequence[Any] | None = None,
            k_descale: float | A | None = None, v_descale: float | A | None = None,
            anchor: Anchor = "bottom_right", layout: Layout = "bshd", device: str | None = None) -> A:
    """The matrix that attention() never stores, for looking at heads and for tests.

    Args:
        what: "scores", the inputs of the softmax, -inf where a query does not attend to a key; or
            "probabilities", exp(score - lse), 0 there.

    Returns (B, Hq, Sq, Sk), float32, or float64 for float64 arrays. Rows and keys that a sequence does not have
    are treated as keys that are not attended to. It is computed in double precision by one thread, for arrays in
    host memory; for those on a GPU it raises Unsupported. Other arguments, and errors: attention().
    """
    if what not in ("scores", "probabilities"):
        raise InvalidArgument(f'what is {what!r}, neither "scores" nor "probabilities"')
    kind = kind_of(q, "q")
    extras, numbers, _, features = _extras(
        bias, mask, alibi_slopes, sink, seqused_q, seqused_k, positions, 0.0, 0, 0,
        block_mask=block_mask, seqstart_k=seqstart_k, alibi_bias=alibi_bias,
        descales=descales_of(k_descale, v_descale, q))
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
    """How a problem is computed on a device: kernel, tiles, workspace and predicted traffic.

    Takes the arrays and options of a call of attention(), or with cu_seqlens or block_table of
    attention_varlen() or attention_with_kvcache(); backward=True describes the backward of that call. Only shapes,
    strides, dtypes and device of the arrays matter. Calls cache their own plans: this class is for inspecting
    them. str() has the plan in words.

        print(fattn.Plan(q, k, v, causal=True))

    Errors: attention().
    """

    def __init__(self, q: Any, k: Any, v: Any, *, causal: bool = False, window: Window = None,
                 scale: float | None = None, softcap: float | None = None, bias: Any = None,
                 mask: Any = None, block_mask: Any = None, block_size: tuple[int, int] | None = None,
                 alibi_slopes: Any = None, alibi_bias: bool = False, sink: Any = None,
                 dropout_p: float = 0.0,
                 cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: int | None = None,
                 max_seqlen_k: int | None = None, seqused_q: Any = None, seqused_k: Any = None,
                 seqstart_k: Any = None, chunk: int | None = None, block_table: Any = None,
                 positions: Sequence[Any] | None = None, k_descale: Any = None, v_descale: Any = None,
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
            batch_invariant=batch_invariant, descales=descales_of(k_descale, v_descale, q), features=features)
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
        """The largest number of parts into which a run cuts the keys of a row."""
        self.work_items: int = info.work_items
        """Independent pieces of work."""
        self.workspace_bytes: int = info.workspace_bytes
        """Bytes of memory that a run needs besides its arrays."""
        self.predicted_bytes: float = info.predicted_bytes
        """Bytes that this plan is predicted to move between slow and fast memory."""
        self.standard_bytes: float = info.standard_bytes
        """The same for attention that stores its scores."""
        self.lower_bound_bytes: float = info.lower_bound_bytes
        """The same if every input is read once and every output written once."""
        self.flops: float = info.flops
        """Multiplications and additions of the matrix products."""
        self.effective_dropout: float = info.effective_dropout
        """The dropout probability after rounding."""

    def __str__(self) -> str:
        return self._handle.describe()

    def __deepcopy__(self, memo: Any) -> Plan:
        return self  # which does not change


def explain(q: Any, k: Any, v: Any, **options: Any) -> str:
    """The plan of attention(q, k, v, **options) in words, with the reason why each faster kernel declined. Takes the
    arguments of Plan."""
    return str(Plan(q, k, v, **options))
