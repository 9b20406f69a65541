# SPDX-License-Identifier: Apache-2.0
"""fattn: exact attention (FlashAttention) on CPUs, NVIDIA and AMD GPUs, for any array with DLPack.

    import numpy as np, fattn
    q = np.random.default_rng(0).standard_normal((2, 300, 8, 64), np.float32)
    o = fattn.attention(q, q, q, causal=True)     # (batch, sequence, heads, channels)

fattn.torch, fattn.flash_attn, fattn.transformers and fattn.jax are for those libraries; importing fattn
imports none of them, and NumPy only when it is used. See docs/PYTHON.md.
"""

from fattn._c import VERSION as __version__
from fattn._calls import Gradients, Positions
from fattn._devices import DeviceInfo, devices, info
from fattn._errors import (BadEnvironment, DeviceError, Error, InvalidArgument, InvalidData,
                           InvalidShape, InvalidStride, InvalidStruct, Misaligned, NoDevice,
                           NullPointer, OutOfMemory, Overflow, Overlap, RankLost, RanksDisagree,
                           RankTimeout, UnknownDevice, Unsupported)
from fattn._functions import (Plan, attention, attention_backward, attention_varlen,
                              attention_with_kvcache, dropout_mask, explain, inspect, merge)
from fattn._plans import cache_clear

__all__ = [
    "BadEnvironment", "DeviceError", "DeviceInfo", "Error", "Gradients", "InvalidArgument",
    "InvalidData", "InvalidShape", "InvalidStride", "InvalidStruct", "Misaligned", "NoDevice",
    "NullPointer", "OutOfMemory", "Overflow", "Overlap", "Plan", "Positions", "RankLost",
    "RankTimeout", "RanksDisagree", "UnknownDevice", "Unsupported", "__version__",
    "attention", "attention_backward", "attention_varlen", "attention_with_kvcache",
    "cache_clear", "devices", "dropout_mask", "explain", "info", "inspect", "merge",
]
