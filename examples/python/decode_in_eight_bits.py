# SPDX-License-Identifier: Apache-2.0
"""Decoding over a paged cache of keys and values in 8 bits, which is divided by a factor for each sequence and head.

usage: python decode_in_eight_bits.py
"""

import fattn.torch
import torch

B, HQ, HK, D, PAGE, PROMPT, TOKENS = 2, 8, 2, 64, 16, 100, 120
torch.manual_seed(0)
q, k, v = (torch.randn(B, TOKENS, heads, D) for heads in (HQ, HK, HK))

# Factors with which the prompt's largest number is stored as 448. Larger numbers of later tokens saturate.
k_descale, v_descale = (a[:, :PROMPT].abs().amax((1, 3)) / 448 for a in (k, v))   # (B, HK)
columns = -(-TOKENS // PAGE)
k_cache, v_cache = torch.zeros(2, B * columns, PAGE, HK, D).to(torch.float8_e4m3fn)
table = torch.randperm(B * columns, dtype=torch.int32).view(B, columns)            # the pages of each sequence


def append(first, last):
    """Stores tokens `first` to `last` of each sequence."""
    at = torch.arange(first, last)
    pages = table[:, at // PAGE].long()
    for cache, a, factor in ((k_cache, k, k_descale), (v_cache, v, v_descale)):
        quotients = (a[:, first:last] / factor[:, None, :, None]).clamp(-448, 448)
        cache[pages, at % PAGE] = quotients.to(cache.dtype)


append(0, PROMPT)
decoded = []
for t in range(PROMPT, TOKENS):
    append(t, t + 1)
    lengths = torch.full((B,), t + 1, dtype=torch.int32)
    decoded.append(fattn.torch.attention_with_kvcache(
        q[:, t:t + 1], k_cache, v_cache, cache_seqlens=lengths, block_table=table, k_descale=k_descale,
        v_descale=v_descale))
decoded = torch.cat(decoded, 1)

wanted = fattn.torch.attention(q[:, PROMPT:], k, v, causal=True)
error = ((decoded - wanted).norm() / wanted.norm()).item()
print(f"{k_cache.nbytes + v_cache.nbytes} bytes instead of {4 * (k_cache.nbytes + v_cache.nbytes)}; "
      f"relative error {error:.3f}")
assert error < 0.05
