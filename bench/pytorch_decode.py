#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decoding, one query token for each sequence, compared with PyTorch's scaled_dot_product_attention on one GPU.

Prints a table of tab-separated values: for each batch and number of keys the median microseconds of
fattn and of each of PyTorch's backends, the rate at which fattn reads keys and values beside that
of a copy (bytes read and written), and the ratios. Keys come from memory: runs go around as many
copies of them as no cache holds, and are recorded in a graph, so that no launch waits for the host.

The exit status is 1 when a result is wrong, as in pytorch.py.

    bench/pytorch_decode.py --library build/libfattn.so.0 --batch 1 16 --length 8192 32768
"""
import argparse
import sys

import torch
from torch.nn.attention import sdpa_kernel

from pytorch import DTYPES, PEERS, PTR, Fattn, Feature, judge, load, measure

CACHE = 1 << 28  # bytes, more than any cache of a GPU


class Case(Fattn):
    """One batch: its tensors and plan, run on whatever stream is current."""

    def __init__(self, library, batch, heads, heads_k, length, dim, kind):
        q, k, v = (torch.randn(batch, *shape, dim, device="cuda", dtype=kind)
                   for shape in ((heads, 1), (heads_k, length), (heads_k, length)))
        super().__init__(library, q, k, v, False, torch.empty_like(q), Feature("plain", q, k))
        for name in "dq dk dv".split():
            del self.tensors[name]  # their memory is for more keys
        self.info = self.plan("fwd")

    def fattn(self):
        self.stream = PTR(torch.cuda.current_stream().cuda_stream)
        self.run("fwd")

    def peer(self, name):
        q, k, v = (self.tensors[x] for x in "qkv")
        with sdpa_kernel(PEERS[name]):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def recorded(calls):
    """The calls as one graph; None if they cannot be captured."""
    try:
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph
    except RuntimeError:
        return None


def compare(library, options, batch, length, copy):
    """A row: fattn's kernel and splits, seconds of each contender, of the copy, and judge()."""
    size = 4 * batch * options.heads_k * length * options.dim
    cases = [Case(library, batch, options.heads, options.heads_k, length, options.dim,
                  DTYPES[options.dtype][0]) for _ in range(-(-CACHE // size))]
    graphs = {"fattn": recorded([case.fattn for case in cases])}
    for name in options.peers:
        graphs[name] = recorded([lambda case=case, name=name: case.peer(name) for case in cases])
    runs = {name: graph.replay for name, graph in graphs.items() if graph}
    median = measure({**runs, "copy": copy}, options.repeats, True)
    each = {name: median[name] / len(cases) for name in runs}
    peer = next((name for name in options.peers if name in runs), None)
    verdict = None, True
    if peer:
        verdict = judge([(cases[0].tensors["o"], cases[0].peer(peer))], options.dtype, False)
    for case in cases:
        case.close()
    return cases[0].info, size, each, median["copy"], verdict


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", default="libfattn.so.0")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--length", nargs="+", type=int, default=[2048, 8192, 32768, 131072])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-k", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", default="bf16", choices=["f16", "bf16"])
    parser.add_argument("--peers", nargs="+", default=["flash", "cudnn"], choices=PEERS)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()

    library, wrong = load(options.library, "cuda"), 0
    source = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    print("dtype", "d", "Hq", "Hk", "B", "Sk", "kernel", "splits", "fattn_us",
          *(name + "_us" for name in options.peers), "GB/s", "copy_GB/s", "/copy",
          *("/" + name for name in options.peers), "error", sep="\t")
    for batch in options.batch:
        for length in options.length:
            # Keys and values of 2 bytes, and a tenth more for everything else.
            if 4.4 * batch * options.heads_k * length * options.dim > torch.cuda.mem_get_info()[0]:
                continue
            info, size, each, copy, (error, fine) = compare(library, options, batch, length,
                                                            lambda: target.copy_(source))
            wrong += not fine
            rate, ceiling = size / each["fattn"] / 1e9, 2 * source.numel() / copy / 1e9
            print(options.dtype, options.dim, options.heads, options.heads_k, batch, length,
                  info.kernel.decode(), info.splits, f"{each['fattn'] * 1e6:.1f}",
                  *(f"{each[n] * 1e6:.1f}" if n in each else "-" for n in options.peers),
                  f"{rate:.0f}", f"{ceiling:.0f}", f"{rate / ceiling:.3f}",
                  *(f"{each[n] / each['fattn']:.3f}" if n in each else "-" for n in options.peers),
                  "-" if error is None else f"{error:.1e}" + ("" if fine else "!"), sep="\t",
                  flush=True)
    if wrong:
        print(f"{wrong} rows are wrong: their errors are marked", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
