# SPDX-License-Identifier: Apache-2.0
"""attention(), attention_varlen() and attention_with_kvcache() for tensors. They call the operators of
fattn.torch._ops or, if nothing but autograd needs to see an operator, the library directly."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from operator import index as operator_index
from typing import TYPE_CHECKING, Any, Literal, Sequence, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from fattn._calls import block_of, window_of
from fattn._calls import number as plain_number
from fattn._errors import InvalidArgument, naming_cache_seqlens
from fattn._problem import check_anchor, check_layout
from fattn._problem import integer as plain_integer
from fattn._problem import real
from fattn.torch._calls import (Recorded, RecordedWithLse, call_of, check_readable, find_known, make_known, recorded,
                                recorded_with_lse)
from fattn.torch._ops import dispatched, eager
from fattn.torch._schemas import TENSORS

Window = Sequence[int | None] | int | None
Layout = Literal["bshd", "bhsd"]
Anchor = Literal["bottom_right", "top_left"]

if TYPE_CHECKING:  # all options except return_lse, on which the type of a result depends
    from typing_extensions import Required, TypedDict, Unpack

    class _CommonOptions(TypedDict, total=False):
        causal: bool
        window: Window
        scale: float | None
        softcap: float | None
        bias: Tensor | None
        mask: Tensor | None
        alibi_slopes: Tensor | None
        sink: Tensor | None
        seqstart_k: Tensor | None
        chunk: int | None
        k_descale: Tensor | float | None
        v_descale: Tensor | float | None
        anchor: Anchor
        layout: Layout
        out_dtype: torch.dtype | None
        batch_invariant: bool
        checked: bool
        device: str | None

    class _CacheOptions(_CommonOptions, total=False):
        cache_seqlens: Tensor | None
        block_table: Tensor | None
        max_seqlen_k: int | None

    class _TrainingOptions(_CommonOptions, total=False):
        dropout_p: float
        seed: Tensor | None
        seqused_q: Tensor | None
        seqused_k: Tensor | None
        deterministic: bool | None

    class _VarlenOptions(_TrainingOptions, total=False):
        cu_seqlens_q: Required[Tensor]
        cu_seqlens_k: Tensor | None
        max_seqlen_q: Required[int]
        max_seqlen_k: int | None
        block_table: Tensor | None

    class _Options(_TrainingOptions, total=False):
        block_mask: Tensor | None
        block_size: tuple[int, int] | None
        alibi_bias: bool
        positions: Sequence[int] | None

_functorch_active = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
any_autocast = torch._C._is_any_autocast_enabled
_tracing = torch._C._get_tracing_state
_is_compiling = torch.compiler.is_compiling
is_traced = torch.compiler.is_dynamo_compiling  # guards and is_watched() notice other compilers
_grads = torch.is_grad_enabled
_deterministic = torch.are_deterministic_algorithms_enabled
_TENSOR = (Tensor, torch.nn.Parameter)
_PLAIN = (*_TENSOR, type(None))
_QKV = TENSORS[:3]
_N = len(TENSORS)
_EXTRAS = range(3, _N)  # places of the tensors that may be None
_BIAS_ALONE, _MASK_ALONE = (TENSORS.index("bias"),), (TENSORS.index("mask"),)


def is_watched(*tensors: Tensor | None) -> bool:
    """Whether something besides autograd needs to see an operator: a compiler, a transform, a mode, a profiler, a
    subclass, a view that negates, a tensor without memory. Autocast does not: callers cast, with autocast() below."""
    if (_is_compiling() or _modes() != 0 or _functorch_active() or _tracing() is not None or
            forward_ad._current_level >= 0 or profiler._is_profiler_enabled):
        return True
    for t in tensors:
        if t.__class__ not in _PLAIN or (t is not None and (t.is_neg() or t.is_meta)):
            return True
    return False


def are_watched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """is_watched() of three tensors, in less time."""
    return (_is_compiling() or q.__class__ not in _TENSOR or k.__class__ not in _TENSOR or
            v.__class__ not in _TENSOR or q.is_neg() or k.is_neg() or v.is_neg() or q.is_meta or k.is_meta or
            v.is_meta or _modes() != 0 or
            _functorch_active() or _tracing() is not None or forward_ad._current_level >= 0 or
            profiler._is_profiler_enabled)


def readable(t: Tensor, name: str) -> Tensor:
    """t, which PyTorch is about to copy; raises NullPointer if its memory is gone."""
    if not is_watched(t):
        check_readable(t, name)
    return t


def operator(*arguments: Any, lse: bool) -> tuple[Tensor, Any]:
    """fattn::forward, by a shorter way where nothing but autograd watches. lse: whether it is wanted; it may be None
    otherwise."""
    if not is_traced():
        extras = tuple([i for i in _EXTRAS if arguments[i] is not None])
        key = arguments[_N:], extras, lse, _grads(), any_autocast()
        given = [*arguments[:3], *[arguments[i] for i in extras]]
        known = find_known(key, *given)
        if known is not None:
            return recorded_with_lse(known, *given) if known.records else known.forward(*given)
    tensors = arguments[:_N]
    check_types(tensors)
    if is_traced() or is_watched(*tensors):
        know_dtensors()
        return dispatched(*arguments)
    return eager(key, tensors, arguments[_N:], lse, _grads() and any([t.requires_grad for t in given]))


def number(x: Any, name: str) -> Any:
    """x as a number. A tensor without axes is accepted, as in PyTorch's functions, but has no gradient."""
    if not isinstance(x, Tensor):
        return x if is_traced() else plain_number(x)
    if x.requires_grad or x.dim() != 0:
        raise TypeError(f"{name} is a tensor that {'requires a gradient' if x.requires_grad else 'has axes'}, "
                        f"not a number")
    return x.item()


def integer(x: Any, name: str) -> Any:
    """x, an integer or None, as Python's own; a symbolic integer is returned as it is."""
    if x is None or type(x) is int:
        return x
    x = number(x, name)
    return x if is_traced() or isinstance(x, torch.SymInt) else plain_integer(x, name)


def index(x: Any) -> Any:
    """operator.index(), but a symbolic integer, which Dynamo shows as an int, is returned as it is."""
    return x if type(x) is int or isinstance(x, torch.SymInt) else operator_index(x)


def type_name(a: Any) -> str:
    return f"{type(a).__module__}.{type(a).__qualname__}".removeprefix("builtins.")


def is_causal_bias(a: Any) -> bool:
    """Whether a is a CausalBias of PyTorch. Importing its module takes a second; if it is not imported, there is none."""
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(a, module.CausalBias)


def know_dtensors() -> None:
    """Tells PyTorch how fattn's operators divide DTensors, once their module is imported, which takes half a second."""
    if "torch.distributed.tensor" in sys.modules:
        try:
            from fattn.torch import _sharding as _sharding
        except ImportError:  # a PyTorch too old for such rules
            pass


def check_types(tensors: Sequence[Any]) -> None:
    """Raises TypeError if one of the tensors, as in TENSORS or the first of them, has no numbers that can be read."""
    for t, name in zip(tensors, TENSORS):
        if t.__class__ in _TENSOR and not t.is_nested or t is None and name not in _QKV:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type_name(t)}, not a tensor")
        if is_causal_bias(t):
            raise TypeError(f"{name} is a CausalBias, which has no numbers: use causal and anchor instead")
        if t.is_nested:
            raise TypeError(f"{name} is a nested tensor, which only scaled_dot_product_attention takes")


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors, which are the first of TENSORS, in autocast's dtype if autocast is on for their device. A cache in 8
    bits stays as it is."""
    if not any_autocast():
        return tensors
    check_types(tensors)
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple([readable(t, name).to(dtype) if t is not None and t.dtype is not dtype and t.is_floating_point() and
                  t.dtype != torch.float64 and t.element_size() > 1 else t for t, name in zip(tensors, TENSORS)])


def new_seed(like: Tensor) -> Tensor:
    """(seed, offset) from PyTorch's generator, so that manual_seed and checkpointing govern dropout. For a DTensor
    that of the first process."""
    seed = torch.randint(0, 1 << 62, (2,), dtype=torch.int64, device=like.device)
    if type(like).__name__ != "DTensor":
        return seed
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(seed, like.device_mesh)


def descales(k_descale: Any, v_descale: Any, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Both factors as tensors, or neither."""
    if k_descale is None and v_descale is None:
        return None, None
    check_types((q,))
    k, v = k_descale, v_descale
    shape = k.shape if isinstance(k, Tensor) else v.shape if isinstance(v, Tensor) else ()
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if not isinstance(k, Tensor):  # of a DTensor new_full() makes another
        k = q.new_full(shape, 1.0 if k is None else real(k, "k_descale"), dtype=dtype)
    if not isinstance(v, Tensor):
        v = q.new_full(shape, 1.0 if v is None else real(v, "v_descale"), dtype=dtype)
    return k, v


def channels_together(t: Tensor, name: str) -> Tensor:
    """t, copied if its channels are not contiguous."""
    return t if t.dim() == 0 or t.stride(-1) == 1 or t.shape[-1] == 1 else readable(t, name).contiguous()


@overload
def attention(
        q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ...,
        **options: Unpack[_Options]) -> Tensor: ...
@overload
def attention(
        q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True],
        **options: Unpack[_Options]) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
        q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool,
        **options: Unpack[_Options]) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Window = None,
        scale: float | None = None, softcap: float | None = None, bias: Tensor | None = None,
        mask: Tensor | None = None, block_mask: Tensor | None = None,
        block_size: tuple[int, int] | None = None, alibi_slopes: Tensor | None = None,
        alibi_bias: bool = False, sink: Tensor | None = None, dropout_p: float = 0.0,
        seed: Tensor | None = None, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
        seqstart_k: Tensor | None = None, chunk: int | None = None,
        positions: Sequence[int] | None = None, k_descale: Tensor | float | None = None,
        v_descale: Tensor | float | None = None,
        anchor: Anchor = "bottom_right", layout: Layout = "bshd",
        out_dtype: torch.dtype | None = None, return_lse: bool = False, batch_invariant: bool = False,
        checked: bool = False, deterministic: bool | None = None,
        device: str | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """fattn.attention() for tensors, differentiable in q, k, v, bias and sink.

    Args:
        q: (B, Sq, Hq, D), or in layout "bhsd" (B, Hq, Sq, D); likewise k, v and the result.
        seed: int64 (2), seed and offset of dropout on q's device. If None, they are drawn from PyTorch's generator,
            so that manual_seed() determines them and activation checkpointing repeats them.
        positions: (q_offset, k_offset, whole_q, whole_k), the positions of rows and keys in a longer sequence.
        k_descale, v_descale: float32 tensors that broadcast to (B, Hk), or numbers; for a forward without gradients.
            If only one is given, or one is a number, a tensor is filled in each call.
        out_dtype: torch.float32, or None for q's dtype.
        return_lse: return (result, lse), lse float32 (B, Hq, Sq), differentiable too.
        deterministic: gradients with the same bits from run to run on GPUs; None:
            torch.are_deterministic_algorithms_enabled().

    The result is on q's device, of q's dtype unless out_dtype says otherwise, and contiguous as (batch, sequence,
    head, channel) in both layouts. On a GPU the call returns when the work is queued on PyTorch's current stream.
    Under autocast q, k, v and bias are cast to its dtype. Rows past seqused_q are 0 and have an lse of -inf;
    gradients there and past seqused_k are 0. Second derivatives and forward mode raise fattn.Unsupported. Other
    arguments, and errors: fattn.attention().
    """
    autocasts = any_autocast()
    if autocasts:
        q, k, v, bias = autocast(q, k, v, bias)
    if scale is not None or softcap is not None or chunk is not None:
        scale, softcap, chunk = number(scale, "scale"), number(softcap, "softcap"), integer(chunk, "chunk")
    left, right = (-1, -1) if window is None else window_of(window, index) or (-1, -1)
    if deterministic is None:
        deterministic = _deterministic()
    extra, extras = (mask, _MASK_ALONE) if bias is None else (bias, _BIAS_ALONE)
    if not (bias is not None and mask is not None or sink is not None or block_mask is not None or
            block_size is not None or alibi_slopes is not None or dropout_p != 0 or seqused_k is not None or
            seqused_q is not None or seqstart_k is not None or positions is not None or k_descale is not None or
            v_descale is not None or is_traced()):
        numbers = (causal, left, right, scale, softcap, 0.0, check_anchor(anchor) == "top_left",
                   check_layout(layout) == "bhsd", _wide(out_dtype, q), None, None, 0, 0, None, batch_invariant,
                   checked, deterministic, device, chunk, alibi_bias)
        if extra is not None:  # what operator() may know
            known = find_known((numbers, extras, return_lse, _grads(), autocasts), q, k, v, extra)
            if known is not None:
                result = (recorded_with_lse(known, q, k, v, extra) if known.records else
                          known.forward(q, k, v, extra))
                return result if return_lse else result[0]
        else:
            key = numbers, return_lse, _grads(), autocasts
            known = find_known(key, q, k, v)
            if known is not None and known.records:
                return recorded_with_lse(known, q, k, v) if return_lse else recorded(known, q, k, v)
            if known is None and not (are_watched(q, k, v) or q.is_nested or k.is_nested or v.is_nested):
                record = _grads() and (q.requires_grad or k.requires_grad or v.requires_grad)
                known = make_known(key, call_of(numbers, (), return_lse or record), record, q, k, v)
                if record:
                    return (RecordedWithLse if return_lse else Recorded).apply(known, q, k, v)
            if known is not None:
                result = known.forward(q, k, v)
                return result if return_lse else result[0]
    dropout_p = number(dropout_p, "dropout_p")
    if dropout_p != 0 and seed is None:
        seed = new_seed(q)
    if positions is not None:
        positions = tuple([integer(x, "a number of positions") for x in positions])
    block_m, block_n = block_of(block_size) or (0, 0)
    if block_mask is not None and block_size is None:
        raise InvalidArgument("block_size is needed with block_mask")
    result = operator(
        q, k, v, bias, mask, block_mask, alibi_slopes, sink, None, None, seqused_q, seqused_k, None,
        seqstart_k, seed if dropout_p != 0 else None, *descales(k_descale, v_descale, q), causal, left, right, scale,
        softcap, dropout_p, check_anchor(anchor) == "top_left", check_layout(layout) == "bhsd", _wide(out_dtype, q),
        None, None, block_m, block_n, positions, batch_invariant, checked, deterministic, device, chunk, alibi_bias,
        lse=return_lse)
    return result if return_lse else result[0]


def _wide(out_dtype: torch.dtype | None, q: Tensor) -> bool:
    if out_dtype is None:
        return False
    allowed = tuple(dict.fromkeys((q.dtype, torch.float32)))
    if out_dtype not in allowed:
        raise InvalidArgument(f"out_dtype is {out_dtype}, not {' or '.join(map(str, allowed))}")
    return bool(out_dtype != q.dtype)


@overload
def attention_varlen(
        q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ...,
        **options: Unpack[_VarlenOptions]) -> Tensor: ...
@overload
def attention_varlen(
        q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True],
        **options: Unpack[_VarlenOptions]) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
        q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool,
        **options: Unpack[_VarlenOptions]) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_varlen(
        q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, max_seqlen_q: int,
        cu_seqlens_k: Tensor | None = None, max_seqlen_k: int | None = None,
        causal: bool = False, window: Window = None,
        scale: float | None = None, softcap: float | None = None, bias: Tensor | None = None,
        mask: Tensor | None = None, alibi_slopes: Tensor | None = None, sink: Tensor | None = None,
        dropout_p: float = 0.0, seed: Tensor | None = None, seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None, seqstart_k: Tensor | None = None, chunk: int | None = None,
        block_table: Tensor | None = None, k_descale: Tensor | float | None = None,
        v_descale: Tensor | float | None = None,
        anchor: Anchor = "bottom_right", layout: Layout = "bshd",
        out_dtype: torch.dtype | None = None, return_lse: bool = False, batch_invariant: bool = False,
        checked: bool = False, deterministic: bool | None = None,
        device: str | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """fattn.attention_varlen() for tensors, differentiable like attention(), except with block_table.

    max_seqlen_q is always needed, and max_seqlen_k with cu_seqlens_k. Rows that belong to no sequence, past the end of
    the last one or past seqused_q, are 0 in the result and in gradients; their lse is -inf. Other arguments:
    attention(), fattn.attention_varlen(); streams, autocast and errors: attention().
    """
    q, k, v, bias = autocast(q, k, v, bias)
    scale, softcap, dropout_p = number(scale, "scale"), number(softcap, "softcap"), number(dropout_p, "dropout_p")
    chunk = integer(chunk, "chunk")
    max_seqlen_q, max_seqlen_k = integer(max_seqlen_q, "max_seqlen_q"), integer(max_seqlen_k, "max_seqlen_k")
    if dropout_p != 0 and seed is None:
        seed = new_seed(q)
    left, right = window_of(window, index) or (-1, -1)
    result = operator(
        q, k, v, bias, mask, None, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
        block_table, seqstart_k, seed if dropout_p != 0 else None, *descales(k_descale, v_descale, q), causal, left,
        right, scale, softcap, dropout_p, check_anchor(anchor) == "top_left", check_layout(layout) == "bhsd",
        _wide(out_dtype, q), max_seqlen_q, max_seqlen_k, 0, 0, None, batch_invariant, checked,
        _deterministic() if deterministic is None else deterministic, device, chunk, False, lse=return_lse)
    return result if return_lse else result[0]


@overload
def attention_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, *, return_lse: Literal[False] = ...,
        **options: Unpack[_CacheOptions]) -> Tensor: ...
@overload
def attention_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, *, return_lse: Literal[True],
        **options: Unpack[_CacheOptions]) -> tuple[Tensor, Tensor]: ...
@overload
def attention_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, *, return_lse: bool,
        **options: Unpack[_CacheOptions]) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor | None = None,
        block_table: Tensor | None = None, max_seqlen_k: int | None = None, causal: bool = False,
        window: Window = None, scale: float | None = None, softcap: float | None = None,
        bias: Tensor | None = None, mask: Tensor | None = None, alibi_slopes: Tensor | None = None,
        sink: Tensor | None = None, seqstart_k: Tensor | None = None, chunk: int | None = None,
        k_descale: Tensor | float | None = None, v_descale: Tensor | float | None = None,
        anchor: Anchor = "bottom_right", layout: Layout = "bshd",
        out_dtype: torch.dtype | None = None, return_lse: bool = False,
        batch_invariant: bool = False, checked: bool = False,
        device: str | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """fattn.attention_with_kvcache() for tensors, differentiable like attention(), except with block_table: if a
    gradient would be recorded there, the call raises fattn.Unsupported. Arguments: fattn.attention_with_kvcache();
    streams, autocast and errors: attention()."""
    q, k_cache, v_cache, bias = autocast(q, k_cache, v_cache, bias)
    scale, softcap, chunk = number(scale, "scale"), number(softcap, "softcap"), integer(chunk, "chunk")
    max_seqlen_k = integer(max_seqlen_k, "max_seqlen_k")
    left, right = window_of(window, index) or (-1, -1)
    # Dynamo of PyTorch 2.11 refuses context managers that it does not know.
    with nullcontext() if torch.compiler.is_compiling() else naming_cache_seqlens:
        result = operator(
            q, k_cache, v_cache, bias, mask, None, alibi_slopes, sink, None, None, None, cache_seqlens,
            block_table, seqstart_k, None, *descales(k_descale, v_descale, q), causal, left, right, scale, softcap, 0.0,
            check_anchor(anchor) == "top_left", check_layout(layout) == "bhsd", _wide(out_dtype, q), None,
            max_seqlen_k, 0, 0, None, batch_invariant, checked, False, device, chunk, False, lse=return_lse)
    return result if return_lse else result[0]
