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
    result = fattn.attention(a, a, a)  # what the pointers of the bare call then point to
    plan, (_, buffers) = prepared.plans[16], prepared.frames[0]
    workspace = _plans._workspaces[-1].address if plan.workspace else None
    measure(f"{name}: fattn_execute()", lambda: _c.execute(plan.address, buffers, workspace, None))
    del result
    measure(f"{name}: causal=True, return_lse=True",
            lambda: fattn.attention(a, a, a, causal=True, return_lse=True))


rows("NumPy", numpy.random.default_rng(0).standard_normal((1, 1, 2, 16)).astype(numpy.float32))
try:
    import torch
except ImportError:
    print("PyTorch is not installed")
else:
    import fattn.torch
    a = torch.randn(1, 1, 2, 16)
    rows("PyTorch", a)
    measure("PyTorch: fattn.torch.attention", lambda: fattn.torch.attention(a, a, a))
    measure("PyTorch: fattn.torch.scaled_dot_product_attention",
            lambda: fattn.torch.scaled_dot_product_attention(a, a, a))
    measure("PyTorch: F.scaled_dot_product_attention",
            lambda: torch.nn.functional.scaled_dot_product_attention(a, a, a))
