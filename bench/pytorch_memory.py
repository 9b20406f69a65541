#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Memory of forward and backward, compared with PyTorch's scaled_dot_product_attention on one GPU.

Prints a table of tab-separated values: for each length the MiB of the inputs (q, k, v, dout), and
for fattn and each of PyTorch's backends the largest amount that one forward and one backward had
allocated at any time besides them, outputs counted, and fattn's over the smallest it could be: o,
lse, dq, dk, dv, and delta and dq in f32, which backward adds to. With --plot, also a picture. A
contender without a number ran out of memory.

    bench/pytorch_memory.py --library build/libfattn.so.0 --length 1024 4096 16384 65536
"""
import argparse

import torch
from torch.nn.attention import sdpa_kernel

from pytorch import DTYPES, PEERS, Fattn, Feature, draw, load

MIB = 1 << 20


def run_fattn(library, q, k, v, dout, causal):
    fattn = Fattn(library, q, k, v, causal, dout, Feature("plain", q, k))
    for direction in ("fwd", "bwd"):
        fattn.plan(direction)
        fattn.run(direction)
        torch.cuda.synchronize()
        library.fattn_plan_destroy(fattn.plans.pop(direction)[0])


def run_peer(name, q, k, v, dout, causal):
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    with sdpa_kernel(PEERS[name]):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.autograd.grad(o, (q, k, v), dout)


def peak(run, *arguments):
    """The peak of bytes allocated while it runs, besides those allocated before; None if memory does not suffice."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        run(*arguments)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated() - before


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", default="libfattn.so.0")
    parser.add_argument("--length", nargs="+", type=int, default=[1 << n for n in range(10, 17)])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--mask", default="causal", choices=["full", "causal"])
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args()

    library, causal = load(options.library, "cuda"), options.mask == "causal"
    kind, table = DTYPES[options.dtype][0], []
    print("dtype", "d", "mask", "B", "H", "N", "inputs", "fattn", *options.peers, "/least", sep="\t")
    for length in options.length:
        inputs = [torch.randn(options.batch, options.heads, length, options.dim, device="cuda",
                              dtype=kind) for _ in range(4)]
        row = {"fattn": peak(run_fattn, library, *inputs, causal)}
        for name in options.peers:
            row[name] = peak(run_peer, name, *inputs, causal)
        table.append(row)
        elements, rows = inputs[0].numel(), inputs[0].numel() // options.dim
        size = inputs[0].element_size()
        least = 4 * size * elements + 2 * 4 * rows + (4 * elements if size < 4 else 0)
        print(options.dtype, options.dim, options.mask, options.batch, options.heads, length,
              f"{4 * size * elements / MIB:.1f}",
              *(f"{row[n] / MIB:.1f}" if row[n] else "-" for n in row),
              f"{row['fattn'] / least:.3f}" if row["fattn"] else "-", sep="\t", flush=True)
        del inputs
    if options.plot:
        curves = {name: [(n, row[name] / MIB) for n, row in zip(options.length, table) if row[name]]
                  for name in table[0]}
        draw(options.plot, "MiB", {"Forward and backward, besides the inputs": curves}, log=True)


if __name__ == "__main__":
    main()
