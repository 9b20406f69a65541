# SPDX-License-Identifier: Apache-2.0
"""Attention for PyTorch: differentiable, compilable, on CPUs and GPUs.

    from fattn.torch import attention
    o = attention(q, k, v, causal=True)           # (batch, sequence, heads, channels), with gradients

    with fattn.torch.sdpa():                      # or fattn.torch.sdpa(True) for the whole process
        model(x)                                  # F.scaled_dot_product_attention runs through fattn

The operators behind are torch.ops.fattn.forward and torch.ops.fattn.backward; importing this module
registers them.
"""

from fattn.torch._functions import attention, attention_varlen, attention_with_kvcache
from fattn.torch._sdpa import scaled_dot_product_attention, sdpa

__all__ = ["attention", "attention_varlen", "attention_with_kvcache", "scaled_dot_product_attention",
           "sdpa"]
