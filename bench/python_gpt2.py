# SPDX-License-Identifier: Apache-2.0
"""Training steps of GPT-2 small on a GPU: attention through fattn's switch against PyTorch's flash attention.

usage: python bench/python_gpt2.py [--steps 200] [--batch 8] [--length 1024] [--layers 12] [--width 768]
           [--every 20]

Two models with the same weights see the same batches, taking turns, under autocast in bfloat16. Prints both
losses as they go, at the end the largest distance between the two curves, the medians of a step's time and
their ratio. The text is that of this repository's documents, as bytes.
"""

import argparse
import contextlib
import pathlib
import statistics

import fattn.torch
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

VOCABULARY = 50304  # GPT-2's, padded to a multiple of 64
ROOT = pathlib.Path(__file__).resolve().parent.parent


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, n, width = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2)
                   for t in self.qkv(self.norm1(x)).split(width, dim=2))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).reshape(b, n, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, layers, width, length):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser()
    for name, value in (("steps", 200), ("batch", 8), ("length", 1024), ("layers", 12), ("width", 768),
                        ("every", 20)):
        parser.add_argument("--" + name, type=int, default=value)
    options = parser.parse_args()
    device = torch.device("cuda")
    text = b"".join(p.read_bytes() for p in sorted(ROOT.glob("docs/*.md")))
    text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    ways = {"PyTorch": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION), "fattn": fattn.torch.sdpa}
    models, optimizers, losses, times = {}, {}, {}, {}
    for name in ways:
        torch.manual_seed(0)
        models[name] = GPT2(options.layers, options.width, options.length).to(device)
        optimizers[name] = torch.optim.AdamW(models[name].parameters(), lr=3e-4, fused=True)
        losses[name], times[name] = [], []
    generator = torch.Generator().manual_seed(1)
    for step in range(options.steps):
        starts = torch.randint(len(text) - options.length - 1, (options.batch, 1), generator=generator)
        piece = text[starts + torch.arange(options.length + 1)].to(device)
        for name, way in ways.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with contextlib.ExitStack() as stack:
                stack.enter_context(way())
                torch.cuda.synchronize()
                begin.record()
                with torch.autocast("cuda", torch.bfloat16):
                    logits = models[name](piece[:, :-1])
                loss = F.cross_entropy(logits.float().flatten(0, 1), piece[:, 1:].flatten())
                loss.backward()
                optimizers[name].step()
                optimizers[name].zero_grad()
                end.record()
            torch.cuda.synchronize()
            losses[name].append(loss.item())
            times[name].append(begin.elapsed_time(end))
        if step % options.every == 0 or step == options.steps - 1:
            print(f"step {step:4d}  " + "  ".join(f"{n} {losses[n][-1]:.5f} {times[n][-1]:7.2f} ms"
                                                  for n in ways), flush=True)
    distance = max(abs(a - b) for a, b in zip(losses["PyTorch"], losses["fattn"]))
    theirs, ours = (statistics.median(times[name][5:]) for name in ways)
    print(f"losses differ by {distance:.2e} at most")
    print(f"PyTorch's flash {theirs:.2f} ms a step, fattn {ours:.2f} ms, ratio {theirs / ours:.3f}")


if __name__ == "__main__":
    main()
