# SPDX-License-Identifier: Apache-2.0
"""Attention for PyTorch: differentiable, compilable, on CPUs and GPUs.

    from fattn.torch import attention
    o = attention(q, k, v, causal=True)           # (batch, sequence, heads, channels), with gradients

    with fattn.torch.sdpa():                      # or fattn.torch.sdpa(True) for the whole process
        model(x)                                  # F.scaled_dot_product_attention runs through fattn

    with fattn.torch.context_parallel(group):     # sequences divided over processes
        model(x)

The operators behind are forward and backward in torch.ops.fattn, and forward_common and backward_common, which calls
take if they have common options alone (causal, window, scale, mask, used lengths, pages). Importing this module registers
them.
"""

from typing import TYPE_CHECKING, Any

import torch

from fattn.torch._functions import attention, attention_varlen, attention_with_kvcache
from fattn.torch._sdpa import scaled_dot_product_attention, sdpa

if TYPE_CHECKING:
    from fattn.torch._context_parallel import context_parallel

__all__ = ["attention", "attention_varlen", "attention_with_kvcache", "context_parallel",
           "scaled_dot_product_attention", "sdpa"]


def __getattr__(name: str) -> Any:
    if name != "context_parallel":
        raise AttributeError(f"module 'fattn.torch' has no attribute {name!r}")
    from fattn.torch._context_parallel import context_parallel
    globals()[name] = context_parallel
    return context_parallel
