# SPDX-License-Identifier: Apache-2.0
"""The public functions of the flash-attn package (2.x), argument for argument, on every device of fattn.

    from fattn.flash_attn import flash_attn_func        # instead of: from flash_attn import ...

Shapes are (batch, length, heads, channels), packed ones (total, heads, channels). softcap 0 means none. What
differs is in docs/PYTHON.md: the pattern of dropout, lse of rows without keys (-inf), and the third
result of return_attn_probs, which is None.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fattn._errors import InvalidArgument, InvalidData, Unsupported
from fattn.torch import attention, attention_varlen, attention_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
           "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
           "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache"]

Result = Any  # out, or (out, softmax_lse, None) with return_attn_probs


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0,
                    softmax_scale: float | None = None, causal: bool = False,
                    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                    alibi_slopes: Tensor | None = None, deterministic: bool = False,
                    return_attn_probs: bool = False) -> Result:
    """Attention of q (B, Sq, Hq, D) to k and v (B, Sk, Hk, D); causal is anchored at the bottom right."""
    result = attention(q, k, v, causal=causal, window=window_size, scale=softmax_scale,
                       softcap=softcap or None, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
                       deterministic=deterministic, return_lse=True)
    return (*result, None) if return_attn_probs else result[0]


def flash_attn_qkvpacked_func(qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                              causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                              softcap: float = 0.0, alibi_slopes: Tensor | None = None,
                              deterministic: bool = False, return_attn_probs: bool = False) -> Result:
    """flash_attn_func() of qkv (B, S, 3, H, D), which is read in place."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, dropout_p: float = 0.0,
                             softmax_scale: float | None = None, causal: bool = False,
                             window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                             alibi_slopes: Tensor | None = None, deterministic: bool = False,
                             return_attn_probs: bool = False) -> Result:
    """flash_attn_func() of q and kv (B, Sk, 2, Hk, D)."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                           max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                           softmax_scale: float | None = None, causal: bool = False,
                           window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                           alibi_slopes: Tensor | None = None, deterministic: bool = False,
                           return_attn_probs: bool = False, block_table: Tensor | None = None) -> Result:
    """Sequences of different lengths: q (total_q, Hq, D), k and v (total_k, Hk, D) or pages."""
    result = attention_varlen(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=int(max_seqlen_q),
        max_seqlen_k=int(max_seqlen_k), causal=causal, window=window_size, scale=softmax_scale,
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
    q, k, v = qkv.unbind(1)
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
    k, v = kv.unbind(1)
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
            int32 (B, pages); any page_size.
        k, v: (B, seqlen_new, Hk, D), written behind the first cache_seqlens keys.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), by which q and k are rotated.
        cache_seqlens: an int or int32 (B), keys in the cache before k.
        cache_batch_idx: int32 (B), which entries of the cache are read.
        cache_leftpad: int32 (B), the start of each sequence; not together with rotary embedding.
        num_splits: a hint, which is ignored: the planner decides.

    Returns out, with return_softmax_lse also lse (B, Hq, Sq). Gradients are not recorded.
    """
    with torch.no_grad():
        batch = q.shape[0]
        if cache_batch_idx is not None and block_table is not None:
            raise InvalidArgument("cache_batch_idx and block_table together")
        if (k is None) != (v is None):
            raise InvalidArgument("of k and v one is given")
        lengths: Tensor | None = (
            torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
            if isinstance(cache_seqlens, int) else cache_seqlens)
        if cache_batch_idx is not None:  # an entry of the cache is a page of its own
            block_table = cache_batch_idx.to(torch.int32)[:, None].contiguous()
        if k is not None and v is not None:
            if lengths is None:
                raise InvalidArgument("cache_seqlens is needed where k and v are given")
            at = lengths.to(torch.int64)[:, None] + torch.arange(k.shape[1], device=q.device)
            capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
            if q.device.type == "cpu" and (at.numel() and (at.min() < 0 or at.max() >= capacity)):
                raise InvalidData(f"cache_seqlens and {k.shape[1]} new keys pass the cache's {capacity}")
            if rotary_cos is not None and rotary_sin is not None:
                if cache_leftpad is not None:
                    raise Unsupported("cache_leftpad together with rotary embedding")
                moving = causal or tuple(window_size) != (-1, -1)
                q_at = (lengths.to(torch.int64)[:, None] +
                        torch.arange(q.shape[1], device=q.device) * int(moving))
                q = _rotate(q, q_at, rotary_cos, rotary_sin, rotary_interleaved)
                k = _rotate(k, at, rotary_cos, rotary_sin, rotary_interleaved)
            if block_table is None:
                page = torch.arange(batch, device=q.device)[:, None]
            else:
                page = block_table.to(torch.int64).gather(1, at // k_cache.shape[1])
            slot = at if block_table is None else at % k_cache.shape[1]
            k_cache[page, slot] = k.to(k_cache.dtype)
            v_cache[page, slot] = v.to(v_cache.dtype)
            lengths = (lengths + k.shape[1]).to(torch.int32)
        elif rotary_cos is not None:
            raise InvalidArgument("rotary_cos is given without k and v")
        mask = None
        if cache_leftpad is not None:
            keys = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
            mask = (torch.arange(keys, device=q.device) >= cache_leftpad[:, None])[:, None, None]
        result = attention_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, block_table=block_table, causal=causal,
            window=window_size, scale=softmax_scale, softcap=softcap or None, mask=mask,
            alibi_slopes=alibi_slopes, return_lse=True)
        return result if return_softmax_lse else result[0]


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
