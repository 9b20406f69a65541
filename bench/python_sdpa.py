# SPDX-License-Identifier: Apache-2.0
"""PyTorch's scaled_dot_product_attention compared with fattn.torch's, on a CPU.

usage: python bench/python_sdpa.py [--heads 2] [--rounds 7] [--seconds 0] [--lengths 1024,2048]
           [--dims 64,128] [--types float32,bfloat16] [--masks all,causal] [--threads 1]

With one thread, times are CPU times of that thread; with more, elapsed times, for a machine without other users. The two
take turns, and the first call of a turn does not count, because threads of the other may still be spinning. Prints for
forward and for backward the medians of --rounds rounds, and as many more as fit into --seconds, and their ratio.
"""

import argparse
import statistics
import time

import fattn.torch
import torch
import torch.nn.functional as F


def times(functions, rounds, seconds=0.0, clock=time.thread_time):
    """Median of each, in seconds, taking turns."""
    for function in functions:
        function()
    taken = [[] for _ in functions]
    end = time.monotonic() + seconds
    while len(taken[0]) < rounds or time.monotonic() < end:
        for function, row in zip(functions, taken):
            function()
            start = clock()
            function()
            row.append(clock() - start)
    return [statistics.median(row) for row in taken]


def compare(kind, n, heads, d, causal, rounds, seconds, clock):
    """Yields "forward" and "backward", each with PyTorch's time and fattn's."""
    q, k, v = (torch.randn(1, n, heads, d).to(getattr(torch, kind)).transpose(1, 2).requires_grad_()
               for _ in range(3))
    dout = torch.randn(1, n, heads, d).to(q.dtype).transpose(1, 2)
    ways = (F.scaled_dot_product_attention, fattn.torch.scaled_dot_product_attention)
    outputs = [way(q, k, v, is_causal=causal) for way in ways]

    def forward(way):
        with torch.no_grad():
            way(q, k, v, is_causal=causal)

    def backward(o):
        torch.autograd.grad(o, (q, k, v), dout, retain_graph=True)

    # PyTorch's autograd runs backward of CPU tensors in the calling thread.
    for what, functions in (("forward", [lambda w=w: forward(w) for w in ways]),
                            ("backward", [lambda o=o: backward(o) for o in outputs])):
        yield what, *times(functions, rounds, seconds, clock)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", default="1024,2048,4096,8192")
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--types", default="float32,bfloat16")
    parser.add_argument("--masks", default="all,causal")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    print(f"{'type':9s} {'d':>4s} {'N':>6s} {'causal':6s} {'what':9s} {'PyTorch':>10s} {'fattn':>10s} ratio")
    for kind in options.types.split(","):
        for d in map(int, options.dims.split(",")):
            for n in map(int, options.lengths.split(",")):
                for causal in (mask == "causal" for mask in options.masks.split(",")):
                    for what, theirs, ours in compare(kind, n, options.heads, d, causal, options.rounds,
                                                      options.seconds, clock):
                        print(f"{kind:9s} {d:4d} {n:6d} {causal!s:6s} {what:9s} {theirs * 1e3:8.2f}ms "
                              f"{ours * 1e3:8.2f}ms {theirs / ours:5.2f}", flush=True)


if __name__ == "__main__":
    main()
