# SPDX-License-Identifier: Apache-2.0
"""fattn as an attention implementation of Hugging Face Transformers.

    import fattn.transformers                                   # registers it
    model = AutoModelForCausalLM.from_config(config, attn_implementation="fattn")

Masks are those of "sdpa": boolean, or None where causality alone is meant. Groups of heads, softcap, sinks
and position biases go to the library as they are, so that nothing is repeated, added or padded for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from fattn._errors import Unsupported
from fattn.torch import attention

__all__ = ["attention_forward"]


def attention_forward(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
                      attention_mask: Tensor | None, dropout: float = 0.0,
                      scaling: float | None = None, is_causal: bool | None = None,
                      position_bias: Tensor | None = None, softcap: float | None = None,
                      s_aux: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
    """What AttentionInterface calls: query (B, Hq, Sq, D), key (B, Hk, Sk, D), value (B, Hk, Sk, Dv); a
    boolean mask keeps where it is True, another is added. Returns (B, Sq, Hq, Dv) and None.

    Sliding windows and padding are in the mask. With None for one, a module that is causal means that
    query i sees keys 0 to i, except for a single query, which sees all.
    """
    if kwargs.get("output_attentions"):
        raise Unsupported('output_attentions: probabilities are never in memory; use "eager"')
    cache = kwargs.get("cache")
    if cache is not None:  # pages of continuous batching
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx,
                                  kwargs=kwargs)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    mask = bias = None
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            mask = attention_mask
        else:
            bias = attention_mask
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    if bias is not None and bias.dtype not in (query.dtype, torch.float32):
        bias = bias.to(query.dtype)
    if query.shape[0] != key.shape[0]:  # learned queries
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (t.expand(batch, -1, -1, -1) for t in (query, key, value))
    o = attention(query, key, value, causal=query.shape[2] > 1 and attention_mask is None and bool(causal),
                  anchor="top_left", layout="bhsd", scale=scaling, softcap=softcap, bias=bias, mask=mask,
                  sink=None if s_aux is None else s_aux.to(torch.float32), dropout_p=dropout)
    return o.transpose(1, 2), None


AttentionInterface.register("fattn", attention_forward)
AttentionMaskInterface.register("fattn", sdpa_mask)
