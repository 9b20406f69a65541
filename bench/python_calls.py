# SPDX-License-Identifier: Apache-2.0
"""The cost of a call from Python besides attention itself: the second table of docs/notes/python.md.

usage: python bench/python_calls.py [ROUNDS] [NAME]

The problem is so small that the bare call, which is printed too, takes as long as attention itself. Times are CPU times
of this thread, so that other programs do not count; set OMP_NUM_THREADS=1. For a GPU's tensors it is the time to queue a
call: the program waits for the GPU between measurements, often enough that its queue never fills. With NAME (NumPy,
PyTorch or CUDA) only the rows of that library are printed.
"""

import sys
import time

import fattn
import numpy
from fattn import _c, _plans

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 375
NAMES = sys.argv[2:] or ["NumPy", "PyTorch", "CUDA"]


def measure(title, function, calls=200, wait=lambda: None):
    function()
    times = []
    for _ in range(ROUNDS):
        wait()
        start = time.thread_time()
        for _ in range(calls):
            function()
        times.append(time.thread_time() - start)
    wait()
    print(f"{title:65s} {sorted(times)[ROUNDS // 4] / calls * 1e6:6.2f} us")


def bare(a):
    """The bare fattn_execute() of the only problem in the cache."""
    prepared = next(iter(_plans._cache.values()))
    plan, (_, buffers) = prepared.plans[16], prepared.frames[0]
    workspace = stream = None
    if prepared.takes_workspace:
        memory = torch.empty(plan.workspace + 256, dtype=torch.uint8, device=a.device)
        workspace, stream = (memory.data_ptr() + 255) & -256, torch.cuda.current_stream().cuda_stream
        return lambda: (_c.execute(plan.address, buffers, workspace, stream), memory)
    if plan.workspace:
        workspace = _plans._workspaces[-1].address
    return lambda: _c.execute(plan.address, buffers, workspace, stream)


def rows(name, a, **options):
    fattn.cache_clear()
    measure(f"{name}: fattn.attention(q, k, v)", lambda: fattn.attention(a, a, a), **options)
    result = fattn.attention(a, a, a)  # what the pointers of the bare call then point to
    measure(f"{name}: fattn_execute()", bare(a), **options)
    del result
    measure(f"{name}: causal=True, return_lse=True",
            lambda: fattn.attention(a, a, a, causal=True, return_lse=True), **options)


def torch_rows(name, a, **options):
    rows(name, a, **options)
    b = a.transpose(1, 2)
    measure(f"{name}: fattn.torch.attention", lambda: fattn.torch.attention(a, a, a), **options)
    measure(f"{name}: fattn.torch.scaled_dot_product_attention",
            lambda: fattn.torch.scaled_dot_product_attention(b, b, b), **options)
    measure(f"{name}: F.scaled_dot_product_attention",
            lambda: torch.nn.functional.scaled_dot_product_attention(b, b, b), **options)
    mask = torch.ones(a.shape[1], a.shape[1], dtype=torch.bool, device=a.device)
    measure(f"{name}: fattn.torch.attention, mask", lambda: fattn.torch.attention(a, a, a, mask=mask), **options)
    measure(f"{name}: fattn.torch.scaled_dot_product_attention, mask",
            lambda: fattn.torch.scaled_dot_product_attention(b, b, b, mask), **options)
    measure(f"{name}: F.scaled_dot_product_attention, mask",
            lambda: torch.nn.functional.scaled_dot_product_attention(b, b, b, mask), **options)
    lengths = torch.tensor([0, a.shape[1]], dtype=torch.int32, device=a.device)
    packed, used = a[0], lengths[1:]
    measure(f"{name}: fattn.torch.attention_with_kvcache",
            lambda: fattn.torch.attention_with_kvcache(a, a, a, cache_seqlens=used), **options)
    for title, factor in (("tensors", torch.ones(1, a.shape[2], device=a.device)), ("numbers", 1.0)):
        measure(f"{name}: fattn.torch.attention_with_kvcache, {title} as descales",
                lambda: fattn.torch.attention_with_kvcache(a, a, a, cache_seqlens=used, k_descale=factor,
                                                           v_descale=factor), **options)
    measure(f"{name}: fattn.torch.attention_varlen", lambda: fattn.torch.attention_varlen(
        packed, packed, packed, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=a.shape[1],
        max_seqlen_k=a.shape[1]), **options)
    g = a.clone().requires_grad_()
    h = g.transpose(1, 2)
    measure(f"{name}: fattn.torch.attention, recording gradients", lambda: fattn.torch.attention(g, g, g),
            **options)
    ours, theirs = fattn.torch.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention
    measure(f"{name}: fattn.torch.scaled_dot_product_attention, recording", lambda: ours(h, h, h), **options)
    measure(f"{name}: F.scaled_dot_product_attention, recording", lambda: theirs(h, h, h), **options)
    q, k, v = (b.detach().clone().requires_grad_() for _ in range(3))
    for title, function in (("fattn.torch", ours), ("F", theirs)):
        o, dout = function(q, k, v), torch.ones_like(b)
        measure(f"{name}: backward of {title}.scaled_dot_product_attention",
                lambda: torch.autograd.grad(o, (q, k, v), dout, retain_graph=True), **options)
    for title, function in (("fattn.torch", ours), ("F", theirs)):
        measure(f"{name}: {title}.scaled_dot_product_attention, compiled, ten calls", compiled(function, b), 20, **options)


def compiled(function, a):
    """A graph of ten calls, of which each takes the result of the one before."""
    def step(a):
        for _ in range(10):
            a = function(a, a, a)
        return a

    graph = torch.compile(step, fullgraph=True)
    with torch.no_grad():
        graph(a)
    return torch.no_grad()(lambda: graph(a))


if "NumPy" in NAMES:
    rows("NumPy", numpy.random.default_rng(0).standard_normal((1, 1, 2, 16)).astype(numpy.float32))
try:
    import torch
except ImportError:
    print("PyTorch is not installed")
else:
    import fattn.torch
    if "PyTorch" in NAMES:
        torch_rows("PyTorch", torch.randn(1, 1, 2, 16))
    if "CUDA" in NAMES and torch.cuda.is_available():
        torch_rows("CUDA", torch.randn(1, 16, 2, 64, device="cuda", dtype=torch.bfloat16),
                   wait=torch.cuda.synchronize)
