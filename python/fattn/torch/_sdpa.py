# SPDX-License-Identifier: Apache-2.0
"""PyTorch's scaled_dot_product_attention by fattn, and the switch that puts it in the original's place."""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import Any, Callable, Literal, TypeVar

import torch
import torch.nn.functional
from torch import Tensor
from torch.jit._builtins import _register_builtin
from torch.overrides import handle_torch_function, has_torch_function_variadic

from fattn._errors import InvalidArgument, InvalidShape, InvalidStride, Unsupported
from fattn.torch._calls import (Recorded, RecordedWithLse, call_of, find_known, make_known, recorded,
                                recorded_with_lse)
from fattn.torch._functions import (any_autocast, autocast, channels_together, is_causal_bias, is_traced, is_watched,
                                    new_seed, number, operator, readable, type_name)
from fattn.torch._schemas import TENSORS

_grads = torch.is_grad_enabled
_has_override = has_torch_function_variadic
_function_modes = torch._C._len_torch_function_stack
_deterministic = torch.are_deterministic_algorithms_enabled
_Function = TypeVar("_Function", bound=Callable[..., Any])
_original: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention


def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, argument for argument.

    query is (..., Hq, L, E), key (..., H, S, E) and value (..., H, S, Ev), of one dtype; the result is (..., Hq, L, Ev).
    is_causal is anchored at the top left. A boolean attn_mask keeps a pair where it is True; one of float32 or
    query's dtype is added to the scores. Rows without a key are 0. Nested tensors of layout torch.jagged are
    accepted too. Gradients, devices and streams are as in PyTorch; the pattern of dropout is fattn's own, with a seed
    from PyTorch's generator. Wrong arguments raise RuntimeError or TypeError, as in PyTorch, or a fattn.Error; what
    fattn cannot compute raises fattn.Unsupported or another fattn.Error.
    """
    if (_has_override(query, key, value, attn_mask) and not is_traced() and
            not _is_own(query, key, value, attn_mask)):
        return handle_torch_function(
            scaled_dot_product_attention, (query, key, value, attn_mask), query, key, value, attn_mask=attn_mask,
            dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    if scale is not None:
        scale = number(scale, "scale")
    plain = dropout_p == 0 and not is_traced()
    if plain:
        options = is_causal, scale, enable_gqa, _grads(), _deterministic(), any_autocast(), attn_mask is None
        if attn_mask is None:
            known = find_known(options, query, key, value)
            if known is not None:
                return recorded(known, query, key, value) if known.records else known.forward(query, key, value)[0]
        else:
            known = find_known(options, query, key, value, attn_mask)
            if known is not None:
                return (recorded_with_lse(known, query, key, value, attn_mask) if known.records else
                        known.forward(query, key, value, attn_mask))[0]
    dropout_p = number(dropout_p, "dropout_p")
    if _are_nested(query, key, value):
        return _nested(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    before = query, key, value, attn_mask
    if any_autocast():
        query, key, value = autocast(query, key, value)
    if query.dtype != key.dtype or query.dtype != value.dtype:
        raise RuntimeError(f"scaled_dot_product_attention: query, key and value are {query.dtype}, "
                           f"{key.dtype} and {value.dtype}: one dtype is needed")
    if (plain and not is_watched(query, key, value, attn_mask) and _are_dense(query, key, value, enable_gqa) and
            query.stride(-1) == key.stride(-1) == value.stride(-1) == 1 and not (is_causal and attn_mask is not None)):
        mask = () if attn_mask is None else (mask_for(query, attn_mask),)
        places = tuple([TENSORS.index("mask" if t.dtype == torch.bool else "bias") for t in mask])
        given = query, key, value, *mask
        record = _grads() and any([t.requires_grad for t in given])
        call = call_of((is_causal, -1, -1, scale, None, 0.0, True, True, False, None, None, 0, 0, None, False, False,
                        options[4], None, None, False), places, record, not enable_gqa)
        cast = any([t is not other for t, other in zip(given, before)])
        known = make_known(None if cast else options, call, record, *given)
        if not record:
            return known.forward(*given)[0]
        return RecordedWithLse.apply(known, *given)[0] if mask else Recorded.apply(known, *given)
    if query.dim() == key.dim() == value.dim() == 3:
        return scaled_dot_product_attention(query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), attn_mask,
                                            dropout_p, is_causal, scale, enable_gqa)[0]
    if is_causal and attn_mask is not None:
        raise RuntimeError("scaled_dot_product_attention: attn_mask and is_causal cannot be given together")
    lower_right = is_lower_right(attn_mask)
    if lower_right is not None:
        attn_mask, is_causal = None, True
    if attn_mask is not None:
        attn_mask = mask_for(query, attn_mask)
    return _dense(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, not lower_right)


def _are_dense(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether they are of rank 4 and their leading axes need not broadcast, as nearly always."""
    q, k, v = query.shape, key.shape, value.shape
    return bool(len(q) == len(k) == len(v) == 4 and q[0] == k[0] == v[0] and k[1] == v[1] and
                (q[1] == k[1] or enable_gqa and k[1] > 0 and q[1] % k[1] == 0))


def _are_nested(query: Any, key: Any, value: Any) -> bool:
    nested: list[bool] = []
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, Tensor):
            raise TypeError(f"scaled_dot_product_attention: {name} is a {type_name(t)}, not a tensor")
        nested.append(t.is_nested)
    if any(nested) and not all(nested):
        raise TypeError("scaled_dot_product_attention: query, key and value must all be nested tensors, or none of "
                        "them")
    return nested[0]


def _is_own(*tensors: Any) -> bool:
    """Whether there are tensors whose __torch_function__ knows PyTorch's function alone, and which are taken here.
    Modes come before them."""
    return _function_modes() == 0 and any(is_causal_bias(t) or isinstance(t, Tensor) and t.is_nested
                                          for t in tensors)


def is_lower_right(attn_mask: Any) -> bool | None:
    """Where a causal bias is anchored; None of other masks. The bias itself has no numbers in its memory."""
    if not is_causal_bias(attn_mask):
        return None
    return bool(attn_mask.variant == type(attn_mask.variant).LOWER_RIGHT)


def mask_for(query: Tensor, attn_mask: Any) -> Tensor:
    """attn_mask, if it is of a type that PyTorch takes; query is as autocast has left it."""
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"scaled_dot_product_attention: attn_mask is a {type_name(attn_mask)}, not a tensor")
    mask, dtype = attn_mask, attn_mask.dtype
    if dtype != torch.float32:  # which stays as it is: fattn adds it to scores of any type
        mask = autocast(attn_mask)[0]
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(f"scaled_dot_product_attention: attn_mask is {dtype}: it needs to be torch.bool, "
                           f"torch.float32 or query's {query.dtype}")
    return mask


def _broadcast(tensors: list[Tensor], rank: int,
               enable_gqa: bool) -> tuple[list[Tensor], tuple[int, ...]]:
    """The tensors with rank 4 and equal leading axes, and their leading axes before that."""
    if min(t.dim() for t in tensors) < 2:
        raise RuntimeError("scaled_dot_product_attention: query, key and value need two axes or more")
    for i, t in enumerate(tensors):
        for _ in range(max(rank, 4) - t.dim()):
            t = t.unsqueeze(0)
        tensors[i] = t
    kept = 3 if enable_gqa else 2  # without groups heads broadcast like any other axis
    shapes = [t.shape[:-kept] for t in tensors]
    leading: tuple[int, ...] = shapes[0]
    if not shapes[0] == shapes[1] == shapes[2]:
        try:
            leading = torch.broadcast_shapes(*shapes)
        except RuntimeError:
            q, k, v = map(tuple, shapes)
            hint = "" if enable_gqa or len(q) < 2 else "; enable_gqa=True lets numbers of heads differ"
            raise RuntimeError(f"scaled_dot_product_attention: the leading axes of query, {q}, key, {k}, and value, {v}, "
                               f"do not broadcast{hint}") from None
        tensors = [t.expand(*leading, *t.shape[-kept:]) for t in tensors]
    if enable_gqa:
        heads = [t.shape[-3] for t in tensors]
        if heads[0] % heads[1] or heads[1] != heads[2]:
            kind = RuntimeError if heads[0] % heads[1] or heads[0] % heads[2] else Unsupported
            raise kind(f"scaled_dot_product_attention: {heads[0]} heads of query, {heads[1]} of key, {heads[2]} of "
                       "value: query's must be a multiple of key's, and key's equal to value's")
        leading = (*leading, heads[0])
    if rank > 4:
        tensors = [readable(t, name).flatten(0, -4) for t, name in zip(tensors, TENSORS)]
    return tensors, leading


def _dense(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
           is_causal: bool, scale: float | None, enable_gqa: bool, top_left: bool = True) -> Tensor:
    """For strided tensors of any rank: their leading axes are folded into one."""
    tensors = [query, key, value]
    leading: tuple[int, ...]
    rank = max(t.dim() for t in tensors)
    if _are_dense(query, key, value, enable_gqa):
        leading = query.shape[:2]
    else:
        tensors, leading = _broadcast(tensors, rank, enable_gqa)
    q, k, v = (channels_together(t, name) for t, name in zip(tensors, TENSORS))
    bias = mask = None
    if attn_mask is not None:
        if len(leading) > 2 and attn_mask.dim() > 3:
            attn_mask = readable(attn_mask, "attn_mask").expand(*leading[:-1], *attn_mask.shape[-3:]).flatten(0, -4)
        if attn_mask.dtype == torch.bool:
            mask = attn_mask
        else:
            bias = attn_mask
    seed = new_seed(q) if dropout_p != 0 else None
    o = operator(q, k, v, bias, mask, None, None, None, None, None, None, None, None, None, seed, None, None,
                 is_causal, -1, -1, scale, None, dropout_p, top_left, True, False, None, None, 0, 0, None,
                 False, False, _deterministic(), None, None, False, lse=False)[0]
    if rank < 4:
        return o[(0,) * (4 - rank)]
    return o if rank == 4 else o.unflatten(0, leading[:-1])


def _nested(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
            is_causal: bool, scale: float | None, enable_gqa: bool) -> Tensor:
    """Jagged (batch, heads, length, channels): a packed sequence."""
    tensors: list[Any] = [query, key, value]
    if attn_mask is not None or any(t.layout != torch.jagged or t.dim() != 4 for t in tensors):
        raise Unsupported("nested tensors are taken as (batch, heads, length, channels) of layout "
                          "torch.jagged, without attn_mask")
    if not enable_gqa and not query.shape[1] == key.shape[1] == value.shape[1]:
        raise RuntimeError("scaled_dot_product_attention: numbers of heads differ without enable_gqa")
    packed = [t.transpose(1, 2) for t in tensors]  # (batch, length, heads, channels)
    if not _same_rows(packed[1], packed[2]):
        raise RuntimeError("scaled_dot_product_attention: sequences of key and value have different lengths, or "
                           "begin elsewhere in their tensors")
    q, k, v = autocast(*(channels_together(t.values(), name) for t, name in zip(packed, TENSORS)))
    (cu_q, used_q, longest_q), (cu_k, used_k, longest_k) = (_lengths(t) for t in packed[:2])
    seed = new_seed(q) if dropout_p != 0 else None
    o = operator(q, k, v, None, None, None, None, None, cu_q, cu_k, used_q, used_k, None, None, seed, None, None,
                 is_causal, -1, -1, scale, None, dropout_p, True, False, False, longest_q, longest_k, 0, 0,
                 None, False, False, _deterministic(), None, None, False, lse=False)[0]
    nested: Tensor = torch.nested.nested_tensor_from_jagged(
        o, packed[0].offsets(), packed[0].lengths(), min_seqlen=packed[0]._get_min_seqlen(),
        max_seqlen=packed[0]._get_max_seqlen())
    return nested.transpose(1, 2)


def _lengths(t: Any) -> tuple[Tensor, Tensor | None, int]:
    """cu_seqlens, seqused and max_seqlen of a jagged tensor. One with lengths has holes between its sequences."""
    offsets, lengths = t.offsets(), t.lengths()
    if lengths is None:
        return offsets.to(torch.int32), None, t._get_max_seqlen()
    return offsets.to(torch.int32), lengths.to(torch.int32), int(offsets.diff().max())


def _same_rows(a: Any, b: Any) -> bool:
    """Whether two jagged tensors have their sequences in the same places. As a rule they share offsets."""
    return all(x is y or x is not None and y is not None and x.shape == y.shape and bool((x == y).all())
               for x, y in ((a.offsets(), b.offsets()), (a.lengths(), b.lengths())))


# --- The switch -----------------------------------------------------------------------------------

_told: set[str] = set()


def _or_original(*args: Any, **kwargs: Any) -> Tensor:
    """By fattn, or, where it raises an error, by PyTorch, with a warning once for each reason."""
    try:
        return scaled_dot_product_attention(*args, **kwargs)
    except (NotImplementedError, InvalidArgument, InvalidShape, InvalidStride) as error:
        o = _original(*args, **kwargs)
        if str(error) not in _told:
            _told.add(str(error))
            warnings.warn(f"PyTorch's own attention runs instead of fattn's: {error}", stacklevel=2)
        return o


# TorchScript cannot read these functions. It compiles PyTorch's own in their place.
for _function in (scaled_dot_product_attention, _or_original):
    _register_builtin(_function, "aten::scaled_dot_product_attention")


class Switch:
    """Sets torch.nn.functional.scaled_dot_product_attention: to the function of the context that was entered last,
    in whatever thread, and has not been left; without contexts to that of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Any = None       # while there are contexts
        self._contexts: list[Any] = []  # of one function each, a list, by whose identity it is left

    @property
    def process(self) -> Any:
        return self._process if self._contexts else torch.nn.functional.scaled_dot_product_attention

    def set(self, function: Any) -> Any:
        """Sets the function of the process; returns the one before."""
        with self._lock:
            before, self._process = self.process, function
            self._apply()
        return before

    def enter(self, function: Any) -> Any:
        """Enters a context with this function; returns what leave() takes."""
        context = [function]
        with self._lock:
            self._process = self.process
            self._contexts.append(context)
            self._apply()
        return context

    def leave(self, context: Any) -> None:
        with self._lock:
            self._contexts = [other for other in self._contexts if other is not context]
            self._apply()

    def _apply(self) -> None:
        torch.nn.functional.scaled_dot_product_attention = self._contexts[-1][0] if self._contexts else self._process


switch = Switch()


class sdpa(contextlib.ContextDecorator):
    """Routes torch.nn.functional.scaled_dot_product_attention through fattn, in the whole process.

        with fattn.torch.sdpa():
            model(x)

        @fattn.torch.sdpa()        # whenever step() is called
        def step(x): ...

        fattn.torch.sdpa(True)     # from now on
        fattn.torch.sdpa(False)    # no longer

    This reaches models that look the function up in torch.nn.functional when they run, as PyTorch's own modules
    and Transformers do. A module that imported the function by name before keeps PyTorch's.

    Contexts nest, and may overlap in several threads: of those that have been entered and not left, the last
    one decides, for all threads, because PyTorch runs backward and its checkpoints in threads of its own. When all
    contexts have been left, the switch is as it was before.

    Args:
        on: True or False sets the switch for the process, from this call on. In a `with` statement or a decorator
            it holds for the context only, and None means True.
        unsupported: "error" raises fattn.Unsupported where fattn cannot compute a call (a type, a head
            dimension, a device); "torch" lets PyTorch compute it, with a warning once for each reason.
    """

    def __init__(self, on: bool | None = None, *,
                 unsupported: Literal["error", "torch"] = "error") -> None:
        if unsupported not in ("error", "torch"):
            raise ValueError(f'unsupported is {unsupported!r}, neither "error" nor "torch"')
        ours = scaled_dot_product_attention if unsupported == "error" else _or_original
        self._function = _original if on is not None and not on else ours
        self._entered: list[Any] = []
        self._before: Any = None if on is None else switch.set(self._function)

    def __enter__(self) -> sdpa:
        self._entered.append(switch.enter(self._function))
        self._leave_process()
        return self

    def __call__(self, function: _Function) -> _Function:
        self._leave_process()
        return super().__call__(function)

    def _leave_process(self) -> None:
        """Takes back what __init__() set for the process: this object turned out to be a context or a decorator."""
        if self._before is not None:
            switch.set(self._before)
            self._before = None

    def __exit__(self, *_: Any) -> None:
        switch.leave(self._entered.pop())
