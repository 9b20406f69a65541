# SPDX-License-Identifier: Apache-2.0
"""The public functions of the flash-attn package (2.x), with the same arguments, on every device of fattn.

    from fattn.flash_attn import flash_attn_func        # instead of: from flash_attn import ...

Shapes are (batch, length, heads, channels), packed ones (total, heads, channels). The dtypes are float32, float16 and
bfloat16; the result has q's. softcap 0 means none. With return_attn_probs the result is
(out, softmax_lse, None), softmax_lse float32. Gradients, streams, autocast and errors are those of
fattn.torch.attention(). docs/PYTHON.md lists the differences from flash-attn: the pattern of dropout, the lse of
rows without keys (-inf), and the third result, which is None.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fattn._arrays import kind_of
from fattn._calls import window_of
from fattn._errors import InvalidArgument, InvalidData, InvalidShape, Unsupported, naming_cache_seqlens
from fattn._plans import _cache, prepare
from fattn._problem import Options
from fattn.torch import attention, attention_varlen, attention_with_kvcache
from fattn.torch._calls import E4M3
from fattn.torch._functions import channels_together, check_types, index, is_watched, type_name

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
           "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
           "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache"]

Result = Any  # out, or (out, softmax_lse, None) with return_attn_probs


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0,
                    softmax_scale: float | None = None, causal: bool = False,
                    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                    alibi_slopes: Tensor | None = None, deterministic: bool = False,
                    return_attn_probs: bool = False) -> Result:
    """Attention of q (B, Sq, Hq, D) to k and v (B, Sk, Hk, D); causal is anchored at the bottom right. Returns
    (B, Sq, Hq, D)."""
    check_types((q, k, v))
    q, k, v = channels_together(q, "q"), channels_together(k, "k"), channels_together(v, "v")
    result = attention(q, k, v, causal=causal, window=window_size, scale=softmax_scale,
                       softcap=softcap or None, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
                       deterministic=deterministic, return_lse=True)
    return (*result, None) if return_attn_probs else result[0]


def flash_attn_qkvpacked_func(qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                              causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                              softcap: float = 0.0, alibi_slopes: Tensor | None = None,
                              deterministic: bool = False, return_attn_probs: bool = False) -> Result:
    """flash_attn_func() of qkv (B, S, 3, H, D), which is read in place."""
    q, k, v = _unpacked(qkv, "qkv", 3, 5)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, dropout_p: float = 0.0,
                             softmax_scale: float | None = None, causal: bool = False,
                             window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                             alibi_slopes: Tensor | None = None, deterministic: bool = False,
                             return_attn_probs: bool = False) -> Result:
    """flash_attn_func() of q and kv (B, Sk, 2, Hk, D)."""
    k, v = _unpacked(kv, "kv", 2, 5)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                           max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                           softmax_scale: float | None = None, causal: bool = False,
                           window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                           alibi_slopes: Tensor | None = None, deterministic: bool = False,
                           return_attn_probs: bool = False, block_table: Tensor | None = None) -> Result:
    """Sequences of different lengths: q (total_q, Hq, D), k and v (total_k, Hk, D), or with block_table
    (pages, page_size, Hk, D). cu_seqlens_q and cu_seqlens_k are int32 (B + 1). Returns (total_q, Hq, D)."""
    check_types((q, k, v))
    q, k, v = channels_together(q, "q"), channels_together(k, "k"), channels_together(v, "v")
    result = attention_varlen(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, causal=causal, window=window_size, scale=softmax_scale,
        softcap=softcap or None, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
        block_table=block_table, deterministic=deterministic, return_lse=True)
    return (*result, None) if return_attn_probs else result[0]


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int,
                                     dropout_p: float = 0.0, softmax_scale: float | None = None,
                                     causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                                     softcap: float = 0.0, alibi_slopes: Tensor | None = None,
                                     deterministic: bool = False,
                                     return_attn_probs: bool = False) -> Result:
    """flash_attn_varlen_func() of qkv (total, 3, H, D)."""
    q, k, v = _unpacked(qkv, "qkv", 3, 4)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes,
                                  deterministic, return_attn_probs)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                                    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                                    softmax_scale: float | None = None, causal: bool = False,
                                    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                    alibi_slopes: Tensor | None = None, deterministic: bool = False,
                                    return_attn_probs: bool = False) -> Result:
    """flash_attn_varlen_func() of q and kv (total_k, 2, Hk, D)."""
    k, v = _unpacked(kv, "kv", 2, 4)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                  dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                                  deterministic, return_attn_probs)


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None,
                            v: Tensor | None = None, rotary_cos: Tensor | None = None,
                            rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
                            cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None,
                            block_table: Tensor | None = None, softmax_scale: float | None = None,
                            causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                            softcap: float = 0.0, rotary_interleaved: bool = True,
                            alibi_slopes: Tensor | None = None, num_splits: int = 0,
                            return_softmax_lse: bool = False) -> Result:
    """Decoding: attention of q (B, Sq, Hq, D) to a cache, into which k and v are written first.

    Args:
        k_cache, v_cache: (batch_cache, seqlen_cache, Hk, D), or (pages, page_size, Hk, D) with block_table
            int32 (B, max_pages); any page_size.
        k, v: (B, seqlen_new, Hk, D), written behind the first cache_seqlens keys. Into caches of float8_e4m3fn they
            are written without a factor, saturated at 448.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), by which q and k are rotated.
        cache_seqlens: an int or int32 (B), the number of keys in the cache before k is written.
        cache_batch_idx: int32 (B), which entries of the cache are read.
        cache_leftpad: int32 (B), the start of each sequence; not together with rotary embedding.
        num_splits: ignored; the planner decides.

    Returns out (B, Sq, Hq, D), with return_softmax_lse also lse, float32 (B, Hq, Sq). No gradients are recorded.
    """
    with torch.no_grad():
        if cache_batch_idx is not None and block_table is not None:
            raise InvalidArgument("cache_batch_idx and block_table cannot be given together")
        if (k is None) != (v is None):
            raise InvalidArgument("k and v must be given together")
        if (rotary_cos is None) != (rotary_sin is None):
            raise InvalidArgument("rotary_cos and rotary_sin must be given together")
        if rotary_cos is not None and k is None:
            raise InvalidArgument("rotary_cos is given without k and v")
        if rotary_cos is not None and cache_leftpad is not None:
            raise Unsupported("cache_leftpad is not supported together with rotary embedding")
        check_types((q, k_cache, v_cache))
        q = channels_together(q, "q")
        lengths = _lengths(cache_seqlens, q)
        if cache_batch_idx is not None:  # an entry of the cache is a page of its own
            block_table = cache_batch_idx.to(torch.int32)[:, None].contiguous()
        mask = None
        if cache_leftpad is not None:
            keys = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
            mask = (torch.arange(keys, device=q.device) >= cache_leftpad[:, None])[:, None, None]
        window = window_of(window_size, index)
        options: dict[str, Any] = dict(causal=causal, window=window, scale=softmax_scale, softcap=softcap or None)
        if k is not None and v is not None:
            if lengths is None:
                raise InvalidArgument("cache_seqlens is needed if k and v are given")
            _check_plan(options, q=q, k=k_cache, v=v_cache, seqused_k=lengths, block_table=block_table, mask=mask,
                        alibi_slopes=alibi_slopes)
            _check_new(k, v, k_cache, v_cache, lengths, block_table)
            at = lengths.to(torch.int64)[:, None] + torch.arange(k.shape[1], device=q.device)
            if rotary_cos is not None and rotary_sin is not None:
                moving = causal or window not in (None, (-1, -1))
                q_at = (lengths.to(torch.int64)[:, None] +
                        torch.arange(q.shape[1], device=q.device) * int(moving))
                _check_rotary(rotary_cos, rotary_sin, q, q_at, at)
                q = _rotate(q, q_at, rotary_cos, rotary_sin, rotary_interleaved)
                k = _rotate(k, at, rotary_cos, rotary_sin, rotary_interleaved)
            if block_table is None:
                page, slot = torch.arange(q.shape[0], device=q.device)[:, None], at
            else:
                page, slot = block_table.to(torch.int64).gather(1, at // k_cache.shape[1]), at % k_cache.shape[1]
            k_cache[page, slot] = _stored(k, k_cache.dtype)
            v_cache[page, slot] = _stored(v, v_cache.dtype)
            lengths = (lengths + k.shape[1]).to(torch.int32)
        result = attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, block_table=block_table,
                                        mask=mask, alibi_slopes=alibi_slopes, return_lse=True, **options)
        return result if return_softmax_lse else result[0]


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as a cache of this type holds it. In e4m3, which has no infinity, numbers past its largest one are that one;
    older versions of PyTorch would make them NaN."""
    return (x.clamp(-448, 448) if dtype == E4M3 != x.dtype else x).to(dtype)


def _unpacked(packed: Tensor, name: str, count: int, rank: int) -> tuple[Tensor, ...]:
    """The tensors of a packed one: (B, S, count, H, D), or (total, count, H, D)."""
    if not isinstance(packed, Tensor):
        raise TypeError(f"{name} is a {type_name(packed)}, not a tensor")
    if packed.dim() != rank or packed.shape[-3] != count:
        wanted = f"({'batch, length' if rank == 5 else 'total'}, {count}, heads, channels)"
        raise InvalidShape(f"{name} has shape {tuple(packed.shape)}, not {wanted}")
    return tuple(packed.unbind(-3))


# --- What is checked before anything is written ---------------------------------------------------


def _lengths(cache_seqlens: Any, q: Tensor) -> Tensor | None:
    """cache_seqlens as int32 (B)."""
    if cache_seqlens is None:
        return None
    if not isinstance(cache_seqlens, Tensor):
        return torch.full((q.shape[0],), index(cache_seqlens), dtype=torch.int32, device=q.device)
    if cache_seqlens.dtype != torch.int32:
        raise InvalidArgument(f"cache_seqlens has dtype {cache_seqlens.dtype}, not torch.int32")
    return cache_seqlens


def _check_plan(options: dict[str, Any], **arrays: Tensor | None) -> None:
    """Raises the error that attention_with_kvcache() would raise for these shapes, types and options. A valid
    combination is remembered."""
    given = {name: a for name, a in arrays.items() if a is not None}
    if is_watched(*given.values()):
        return
    kind = given["q"].device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        given.update((name, torch.empty_like(given[name], dtype=dtype)) for name in "qkv"
                     if given[name].dtype != E4M3)
    reader = kind_of(given["q"])
    key = "flash_attn", tuple(options.items()), tuple([(name, reader.key(a)) for name, a in given.items()])
    with naming_cache_seqlens:
        if key not in _cache:
            prepare(reader, Options(**options, return_lse=True), given, key)
        reader.check_memory(given.values(), _cache[key].reaches)


def _check_new(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor,
               block_table: Tensor | None) -> None:
    """Checks that new keys and values fit into the cache."""
    new = k.shape[1]
    for name, a, cache in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = (lengths.shape[0], new, *cache.shape[2:])
        if tuple(a.shape) != wanted:
            raise InvalidShape(f"{name} has shape {tuple(a.shape)}, not {wanted}")
        if a.device != cache.device:
            raise InvalidArgument(f"{name} is on device {a.device}, the cache on {cache.device}")
    pages, page_size = k_cache.shape[:2]
    capacity = page_size * (1 if block_table is None else block_table.shape[1])
    if not _within(lengths, 0, capacity - new):
        _check_data((lengths >= 0) & (lengths <= capacity - new),
                    f"cache_seqlens and {new} new keys exceed the cache's {capacity}")
    if block_table is not None and not _within(block_table, 0, pages - 1):
        used = torch.arange(block_table.shape[1], device=k.device) * page_size < lengths[:, None] + new
        _check_data(~used | (block_table >= 0) & (block_table < pages),
                    f"an entry of block_table or cache_batch_idx is not in 0..{pages - 1}")


def _check_rotary(cos: Tensor, sin: Tensor, q: Tensor, *positions: Tensor) -> None:
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[3]:
        raise InvalidShape(f"rotary_cos has shape {tuple(cos.shape)}, rotary_sin {tuple(sin.shape)}: both must be "
                           f"(positions, at most {q.shape[3] // 2})")
    for at in positions:
        if not _within(at, 0, cos.shape[0] - 1):
            _check_data(at < cos.shape[0], f"rotary_cos has {cos.shape[0]} positions, and more are needed")


def _within(numbers: Tensor, low: int, high: int) -> bool:
    """False if some number is known to be outside low..high, or while compiling; True on a GPU, since reading the
    numbers would wait for it."""
    if numbers.device.type != "cpu":
        return True
    if torch.compiler.is_compiling() or numbers.numel() == 0:
        return False
    least, greatest = numbers.aminmax()
    return low <= int(least) and int(greatest) <= high


def _check_data(right: Tensor, message: str) -> None:
    """Raises InvalidData unless all of `right` is true; compiled programs raise PyTorch's RuntimeError."""
    if torch.compiler.is_compiling():
        torch._assert_async(right.all(), message)
    elif not right.all():
        raise InvalidData(message)


def _rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The rotary embedding of x (B, S, H, D) at positions (B, S), in its first 2 cos.shape[1] channels."""
    half = cos.shape[1]
    c, s = (table[positions][:, :, None].float() for table in (cos, sin))
    turned = x[..., :2 * half].float()
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * c - b * s, a * s + b * c), -1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half:]), -1)
