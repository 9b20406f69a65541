# SPDX-License-Identifier: Apache-2.0
"""What a call from Python costs besides attention itself: the second table of docs/PYTHON.md.

usage: python bench/python_calls.py

The problem is so small that its own time is that of the bare call, which is printed too. Times are CPU
times of this thread, so that others on the machine do not count; set OMP_NUM_THREADS=1.
"""

import time
import timeit

import fattn
import numpy
from fattn import _c, _plans


def measure(title, function, calls=5000, rounds=15):
    times = sorted(timeit.repeat(function, number=calls, repeat=rounds, timer=time.thread_time))
    print(f"{title:58s} {times[rounds // 4] / calls * 1e6:6.2f} us")


def rows(name, a):
    fattn.cache_clear()
    measure(f"{name}: fattn.attention(q, k, v)", lambda: fattn.attention(a, a, a))
    prepared = next(iter(_plans._cache.values()))
    plan, (_, buffers) = prepared.plans[16], prepared.frames[0]
    workspace = _plans._workspaces[-1].address if plan.workspace else None
    measure(f"{name}: fattn_execute()", lambda: _c.execute(plan.address, buffers, workspace, None))
    measure(f"{name}: causal=True, return_lse=True",
            lambda: fattn.attention(a, a, a, causal=True, return_lse=True))


rows("NumPy", numpy.random.default_rng(0).standard_normal((1, 1, 2, 16)).astype(numpy.float32))
try:
    import torch
except ImportError:
    print("PyTorch is not installed")
else:
    rows("PyTorch", torch.randn(1, 1, 2, 16))
    a = torch.randn(1, 2, 1, 16)
    measure("PyTorch: F.scaled_dot_product_attention",
            lambda: torch.nn.functional.scaled_dot_product_attention(a, a, a))
