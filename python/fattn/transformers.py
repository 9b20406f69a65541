# SPDX-License-Identifier: Apache-2.0
"""fattn as an attention implementation of Hugging Face Transformers.

    import fattn.transformers                                   # registers it
    model = AutoModelForCausalLM.from_config(config, attn_implementation="fattn")

Masks are those of "sdpa": boolean, or None for causality alone. A mask that consists of causality, a sliding window or
chunks, and padding is marked as such when it is made, and the library skips what it hides. Grouped heads, softcap,
sinks and position biases are passed to the library as they are: no tensor is repeated, added or padded for them.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import (AttentionMaskInterface, causal_mask_function, chunked_causal_mask_function,
                                        eager_mask, prepare_padding_mask, sdpa_mask,
                                        sliding_window_causal_mask_function)

from fattn._errors import Unsupported
from fattn.torch import attention
from fattn.torch._functions import channels_together
from fattn.torch._schemas import TENSORS

__all__ = ["GrowingCache", "attention_forward", "attention_mask"]


class _Pattern(NamedTuple):
    """The parts of a mask: causality, and these."""

    window: int | None        # how many keys a query attends to, its own included
    chunk: int | None         # length of chunks; a query attends to the keys of its own
    offsets: tuple[int, int]  # positions of the first query and key
    padding: Tensor | None    # (B, 1, 1, Sk), True keeps
    is_whole: bool            # whether these are all parts; if not, the mask hides more within the window
    version: int              # of the mask tensor when it was described


_ATTRIBUTE = "fattn_pattern"


def _closure(function: Any) -> dict[str, Any]:
    cells = getattr(function, "__closure__", None) or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells)))


class _Local(NamedTuple):
    """The part of a mask that hides keys besides causality."""

    window: int | None = None
    chunk: int | None = None
    left_padding: Tensor | None = None  # (B), of the tokens from which chunks are counted


def _local_of(function: Any) -> _Local | None:
    """What a mask function of Transformers adds to causality: nothing, a sliding window or chunks. The function is
    recognised by comparison with those that Transformers makes for these; None for any other."""
    if function is causal_mask_function:
        return _Local()
    for known in (sliding_window_causal_mask_function(1), chunked_causal_mask_function(1, torch.zeros(1))):
        parts = _closure(function).get("mask_functions", ())
        wanted = _closure(known).get("mask_functions", ())
        if (getattr(function, "__code__", None) is known.__code__ and len(parts) == len(wanted) == 2 and
                parts[0].__code__ is wanted[0].__code__ and parts[1] is causal_mask_function):
            found = _closure(parts[0])
            window, chunk, padding = (found.get(n) for n in ("sliding_window", "chunk_size", "left_padding"))
            if isinstance(window, int):
                return _Local(window=window)
            if isinstance(chunk, int) and isinstance(padding, Tensor):
                return _Local(chunk=chunk, left_padding=padding)
    return None


def _common(left_padding: Tensor | None) -> int | None:
    """The padding of all sequences, if it is the same for all and can be read without waiting for a GPU."""
    if left_padding is None or left_padding.device.type != "cpu":
        return None
    numbers = set(left_padding.tolist())
    return int(numbers.pop()) if len(numbers) == 1 else None


def attention_mask(batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0,
                   mask_function: Any = causal_mask_function, attention_mask: Tensor | None = None,
                   **kwargs: Any) -> Tensor | None:
    """Called by AttentionMaskInterface: sdpa's mask, boolean (B, 1, Sq, Sk) or None, with its parts as an attribute.
    The result of an operation on the mask lacks the attribute, and is then read like any mask."""
    if q_length not in (1, kv_length):  # a model may drop queries later: None would not say which keys are theirs
        kwargs["allow_is_causal_skip"] = False
    mask: Tensor | None = sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function,
                                    attention_mask, **kwargs)
    if mask is None or torch.compiler.is_compiling():
        return mask
    local = _local_of(mask_function)
    # The offset of a static cache is a tensor. Reading it waits for a GPU, which a prompt is worth and a token is not.
    if local is None or isinstance(q_offset, Tensor) and (q_offset.numel() != 1 or
                                                          q_length == 1 and q_offset.device.type != "cpu"):
        return mask
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, None, None, kv_offset:kv_offset + kv_length].to(torch.bool)
    q_offset, kv_offset, is_whole = int(q_offset), int(kv_offset), True
    window, chunk = local.window, local.chunk
    if chunk is None:
        q_offset, kv_offset = q_offset - kv_offset, 0
    elif (common := _common(local.left_padding)) is not None:
        shift = -common % chunk  # chunks begin where padding ends
        q_offset, kv_offset = q_offset + shift, kv_offset + shift
    else:  # a chunk lies within a window of its width; the mask says which part of the window it is
        window, chunk, is_whole = chunk, None, False
    setattr(mask, _ATTRIBUTE, _Pattern(window, chunk, (q_offset, kv_offset), padding, is_whole, mask._version))
    return mask


def _pattern_of(mask: Any) -> _Pattern | None:
    pattern: _Pattern | None = getattr(mask, _ATTRIBUTE, None)
    return pattern if pattern is not None and pattern.version == mask._version else None


def attention_forward(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
                      attention_mask: Tensor | None, dropout: float = 0.0,
                      scaling: float | None = None, is_causal: bool | None = None,
                      position_bias: Tensor | None = None, softcap: float | None = None,
                      s_aux: Tensor | None = None, sinks: Tensor | None = None, indices: Tensor | None = None,
                      block_indices: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
    """Called by AttentionInterface: query (B, Hq, Sq, D), key (B, Hk, Sk, D), value (B, Hk, Sk, Dv); a boolean mask
    keeps a pair where it is True, any other is added to the scores. Returns (B, Sq, Hq, Dv) and None. Gradients,
    streams and errors are those of fattn.torch.attention().

    Sliding windows and padding are in the mask. If it is None and the module is causal, the last query attends to all
    keys, and each query before it to one key less.

    s_aux, sinks: a score for each head, (Hq), or for each row, (B, Hq, Sq, 1), beside those of the keys.
    indices, block_indices: what a model's indexer has selected, see _selected().
    """
    if kwargs.get("output_attentions"):
        raise Unsupported('output_attentions: probabilities are never in memory; use attn_implementation="eager"')
    cache = kwargs.get("cache")
    if cache is not None:  # pages of continuous batching
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx,
                                  kwargs=kwargs)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    causal = query.shape[2] > 1 and attention_mask is None and bool(causal)
    # Models whose layers share keys drop all queries but the last ones; a mask was None only for as many keys.
    anchor: Literal["bottom_right", "top_left"] = "bottom_right" if attention_mask is None else "top_left"
    mask = bias = window = chunk = positions = None
    pattern = None if torch.compiler.is_compiling() else _pattern_of(attention_mask)
    if pattern is not None:
        causal, chunk = True, pattern.chunk
        mask = pattern.padding if pattern.is_whole else attention_mask
        window = None if pattern.window is None else (pattern.window - 1, 0)
        positions = (*pattern.offsets, -1, -1) if any(pattern.offsets) else None
    elif attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            mask = attention_mask
        else:
            bias = attention_mask
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    if bias is not None and bias.dtype not in (query.dtype, torch.float32):
        bias = bias.to(query.dtype)
    selected = _selected(module, indices, block_indices, query, key)
    if selected is not None:
        mask = selected if mask is None else selected & mask
    if query.shape[0] != key.shape[0]:  # learned queries
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (t.expand(batch, -1, -1, -1) for t in (query, key, value))
    query, key, value = (channels_together(t, name) for t, name in zip((query, key, value), TENSORS))
    sink = s_aux if sinks is None else sinks
    if sink is not None:
        sink = sink.to(torch.float64 if query.dtype == torch.float64 else torch.float32)
    by_row = sink is not None and sink.dim() > 1
    o = attention(query, key, value, causal=causal, window=window, positions=positions, anchor=anchor,
                  layout="bhsd", scale=scaling, softcap=softcap, bias=bias, mask=mask, chunk=chunk,
                  sink=None if by_row else sink, dropout_p=dropout, return_lse=by_row)
    if by_row:  # a sink takes its share of each row: o * exp(lse) / (exp(lse) + exp(sink))
        o, lse = o
        o = (o * torch.sigmoid(lse.unsqueeze(-1) - sink)).to(query.dtype)
    return o.transpose(1, 2), None


def _selected(module: Any, indices: Tensor | None, block_indices: Tensor | None, query: Tensor,
              key: Tensor) -> Tensor | None:
    """The keys that an indexer has selected for each query, as a mask; None if there is no indexer. For "eager" and
    "sdpa" a model puts them into its mask itself. indices: (B, Sq, K), keys. block_indices: (B, H, Sq, K), blocks of
    keys for each of H groups of heads; -1 for none."""
    if indices is not None:
        keep = query.new_zeros((*indices.shape[:2], key.shape[2]), dtype=torch.bool)
        return keep.scatter(-1, indices.long(), True).unsqueeze(1)
    if block_indices is None:
        return None
    size = module.indexer.block_size
    blocks = -(-key.shape[2] // size)
    chosen = block_indices.long().masked_fill(block_indices < 0, blocks)  # one more block, for those that are none
    keep = query.new_zeros((*block_indices.shape[:3], blocks + 1), dtype=torch.bool).scatter(-1, chosen, True)
    keep = keep[..., :blocks].repeat_interleave(size, -1)[..., :key.shape[2]]
    return keep.repeat_interleave(query.shape[1] // keep.shape[1], 1)


class _Rooms:
    """A cache layer whose keys and values are views of memory with room for more: a new token is written behind the
    others, which stay where they are. Tensors that it has returned never change."""

    keys: Tensor
    values: Tensor
    is_initialized: bool

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)  # type: ignore[misc]
        self._rooms = [(self.keys, 0), (self.values, 0)]  # and how much of it is written

    def _append(self, key_states: Tensor, value_states: Tensor, kept: int | None = None) -> tuple[Tensor, Tensor]:
        """The cached keys and values with the new ones behind them. kept: the largest number that will ever be cached,
        if there is a limit."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return (self._append_to(0, self.keys, key_states, kept),
                self._append_to(1, self.values, value_states, kept))

    def _append_to(self, which: int, held: Tensor, new: Tensor, kept: int | None) -> Tensor:
        length = held.shape[-2] if held.numel() else 0
        room, written = self._rooms[which]
        start = written - length
        # After a cache was reordered, or a part of its batch selected, its tensors are no longer in this memory. After
        # it was cropped, a caller may still hold the tokens behind. Inference tensors can only be written in inference
        # mode.
        if (room.dim() != 4 or room.shape[-2] < written + new.shape[-2] or room.shape[:2] != new.shape[:2] or
                length and room.data_ptr() + start * room.stride(2) * room.itemsize != held.data_ptr() or
                room.is_inference() and not torch.is_inference_mode_enabled()):
            start, written = 0, length
            end = length + new.shape[-2]
            spare = max((end if kept is None else min(end, kept)) // 8, 64)
            room = new.new_empty((*new.shape[:2], end + spare, new.shape[-1]))
            if length:
                room[:, :, :length] = held
        end = written + new.shape[-2]
        room[:, :, written:end] = new
        self._rooms[which] = room, end
        return room[:, :, start:end]

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self._rooms = []


def _in_place(states: Tensor) -> bool:
    """Whether memory may be reused: gradients need every version of the keys, and under a compiler, and in
    subclasses, tensors have no addresses."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling() or type(states) is not Tensor)


class _GrowingLayer(_Rooms, DynamicLayer):  # type: ignore[misc]
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any,
               **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not _in_place(key_states):
            states: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return states
        self.keys, self.values = self._append(key_states, value_states)
        return self.keys, self.values


class _GrowingWindowLayer(_Rooms, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """Keeps one key less than the window, unless it records the past."""

    sliding_window: int
    record_past: bool

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any,
               **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not _in_place(key_states) or self.record_past:
            states: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return states
        keys, values = self._append(key_states, value_states, self.sliding_window)
        self.cumulative_length += key_states.shape[-2]
        self.keys, self.values = (t[:, :, -self.sliding_window + 1:] for t in (keys, values))
        return keys, values


def _grow(cache: Any) -> None:
    def growing(layer: Any) -> Any:
        # Layers of other types, as hybrid models have them, may lack is_initialized.
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or layer.is_initialized:
            return layer
        if type(layer) is DynamicLayer:
            return _GrowingLayer()
        return _GrowingWindowLayer(layer.sliding_window) if layer.sliding_window > 1 else layer

    cache.layers = [growing(layer) for layer in cache.layers]
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = _GrowingLayer


class GrowingCache(DynamicCache):  # type: ignore[misc]
    """A DynamicCache that does not copy. DynamicCache copies all keys and values for each token, which takes longer
    than attention to them; this cache has room for an eighth more tokens, and copies only when it is full.

    A model whose attention is "fattn" makes such caches by itself; this class is for others, and for a cache that is
    made without the model's config.

        model.generate(**inputs, past_key_values=fattn.transformers.GrowingCache(config=model.config))
    """

    layers: list[Any]
    layer_class_to_replicate: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _grow(self)


_make_cache = DynamicCache.__init__


@functools.wraps(_make_cache)
def _make_cache_of_model(self: Any, ddp_cache_data: Any = None, config: Any = None, offloading: bool = False,
                         *args: Any, **kwargs: Any) -> None:
    """DynamicCache.__init__, by which a model and generate() make a cache: with fattn's attention it grows in
    place. With offloading it does not, since keys that are moved to the CPU and back get new memory anyway."""
    _make_cache(self, ddp_cache_data, config, offloading, *args, **kwargs)
    if (type(self) is DynamicCache and config is not None and not offloading and
            config.get_text_config(decoder=True)._attn_implementation in _NAMES):
        _grow(self)


def _misreads_masks(model: type) -> bool:
    """Whether a model of Transformers takes masks from AttentionMaskInterface, but has an attention of its own, which
    would add a boolean mask to the scores."""
    modules = [sys.modules.get(base.__module__) for base in model.__mro__
               if base.__module__.startswith("transformers.models.")]
    names = {name: value for module in modules for name, value in vars(module).items()}
    own = any([isinstance(value, type) and issubclass(value, torch.nn.Module) and "Attention" in name
               for name, value in names.items()])
    makes_masks = any([getattr(value, "__module__", "") == "transformers.masking_utils" for value in names.values()])
    return own and makes_masks and "ALL_ATTENTION_FUNCTIONS" not in names


# Models that declare a support of other masks, but concatenate one with numbers to be added.
_CONCATENATING = ("transformers.models.deepseek_v4.modeling_deepseek_v4",)


def _wants_eager_masks(model: Any) -> bool:
    """Whether a model was written for the masks of eager attention alone: other attention beside that of
    AttentionInterface may add them to its scores, and where there is none a query attends to all keys, whatever the
    module's is_causal says."""
    return (not (model._supports_sdpa or model._supports_attention_backend) or
            any(base.__module__ in _CONCATENATING for base in type(model).__mro__))


def attention_forward_as_eager(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """attention_forward() for models with eager attention's masks: only a mask hides keys."""
    return attention_forward(*args, **kwargs | {"is_causal": False})


_NAME, _NAME_AS_EAGER = _NAMES = "fattn", "fattn_with_eager_masks"
_choose = PreTrainedModel.get_correct_attn_implementation


@functools.wraps(_choose)
def _choose_by_masks(self: Any, requested_attention: Any, *args: Any, **kwargs: Any) -> Any:
    """PreTrainedModel.get_correct_attn_implementation, which a model calls when it is made."""
    if requested_attention in _NAMES:
        if _misreads_masks(type(self)):
            part = getattr(self.config, "base_config_key", "")
            more = f'; as a part of another model, attn_implementation={{"{part}": "eager"}}, with "fattn" for the ' \
                   'other parts' if part else ""
            raise Unsupported(f'{type(self).__name__} has an attention of its own, not that of AttentionInterface: use '
                              f'attn_implementation="eager"{more}')
        requested_attention = _NAME_AS_EAGER if _wants_eager_masks(self) else _NAME
    return _choose(self, requested_attention, *args, **kwargs)


PreTrainedModel.get_correct_attn_implementation = _choose_by_masks
DynamicCache.__init__ = _make_cache_of_model
for _name, _attend, _mask in ((_NAME, attention_forward, attention_mask),
                              (_NAME_AS_EAGER, attention_forward_as_eager, eager_mask)):
    AttentionInterface.register(_name, _attend)
    AttentionMaskInterface.register(_name, _mask)
