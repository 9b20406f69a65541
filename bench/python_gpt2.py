# SPDX-License-Identifier: Apache-2.0
"""Training steps of GPT-2 small: attention through fattn's switch against PyTorch's own.

usage: python bench/python_gpt2.py [--steps 200] [--batch 8] [--length 1024] [--layers 12] [--width 768]
           [--vocabulary 50304] [--ways flash again fattn ...] [--precision bfloat16] [--compile]
           [--rate 6e-4] [--warmup 2000] [--device cuda] [--seconds 600] [--every 0] [--profile]

Models with the same weights get the same batches, taking turns in a random order for each step. The ways to compute
attention: "flash", "efficient", "cudnn" and "math" are PyTorch's backends, "again" is flash a second time, "fattn" is
the switch. Prints for each the median of a step's time, of the time until the host had queued it, and the distance
of its losses from the first way's, largest and average, over all steps and over the first quarter. The distance
between two ways of PyTorch's is what rounding alone does. Stops early after --seconds. With --profile: how long
a GPU was busy in one more step of each, and with kernels of attention. The learning rate rises to --rate over
--warmup steps, of which the default of --steps is a tenth. At the full rate from the first step on, training is
unstable, and rounding moves losses a hundred times as far. The text is that of this repository's documents, as
bytes.
"""

import argparse
import contextlib
import pathlib
import random
import statistics
import time

import fattn.torch
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = pathlib.Path(__file__).resolve().parent.parent
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "again": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
            "math": SDPBackend.MATH}


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
    def __init__(self, options):
        super().__init__()
        self.tokens = nn.Embedding(options.vocabulary, options.width)
        self.places = nn.Embedding(options.length, options.width)
        self.blocks = nn.ModuleList(Block(options.width, options.width // 64)
                                    for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, options.vocabulary, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Training:
    """One model and its way to compute attention."""

    def __init__(self, name, options):
        self.name, self.options = name, options
        torch.manual_seed(0)
        self.model = GPT2(options).to(options.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.rate, fused=True)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1 / max(1, options.warmup), 1.0,
                                                          max(1, options.warmup))
        self.losses, self.times, self.queued = [], [], []
        self.call = torch.compile(self.model) if options.compile else self.model

    def step(self, piece):
        """One step. The loss is read after the clock has stopped."""
        device = torch.device(self.options.device)
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        dtype = getattr(torch, self.options.precision)
        way = fattn.torch.sdpa() if self.name == "fattn" else sdpa_kernel(BACKENDS[self.name])
        with contextlib.ExitStack() as stack:
            stack.enter_context(way)
            wait()
            start = time.perf_counter()
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                logits = self.call(piece[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), piece[:, 1:].flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            queued = time.perf_counter()
            wait()
            self.times.append(time.perf_counter() - start)
            self.schedule.step()
            self.queued.append(queued - start)
        self.losses.append(loss.item())

    def profile(self, piece):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.step(piece)
        busy = {e.key: e.self_device_time_total for e in profile.key_averages()}
        words = ("fattn", "flash", "fmha", "cudnn", "sdpa", "wgmma")
        attention = sum(t for key, t in busy.items() if any(word in key.lower() for word in words))
        print(f"{self.name:10s} GPU busy {sum(busy.values()) / 1e3:.2f} ms, attention {attention / 1e3:.2f}")


def main():
    parser = argparse.ArgumentParser()
    for name, value in (("steps", 200), ("batch", 8), ("length", 1024), ("layers", 12), ("width", 768),
                        ("vocabulary", 50304), ("warmup", 2000), ("every", 0)):  # GPT-2's, padded to a multiple of 64
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--ways", nargs="+", default=["flash", "fattn"], choices=[*BACKENDS, "fattn"])
    parser.add_argument("--precision", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--seconds", type=float, default=600)
    options = parser.parse_args()
    begin = time.monotonic()
    text = b"".join(p.read_bytes() for p in sorted(ROOT.glob("docs/*.md")))
    text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    trainings = [Training(name, options) for name in options.ways]
    generator = torch.Generator().manual_seed(1)
    for step in range(options.steps):
        starts = torch.randint(len(text) - options.length - 1, (options.batch, 1), generator=generator)
        piece = text[starts + torch.arange(options.length + 1)].to(options.device)
        for training in random.sample(trainings, len(trainings)):
            training.step(piece)
        if options.every and step % options.every == 0:
            print(f"step {step:4d}  " + "  ".join(f"{t.name} {t.losses[-1]:.5f}" for t in trainings),
                  flush=True)
        if time.monotonic() - begin > options.seconds:
            break
    first, warm = trainings[0], min(5, len(trainings[0].times) - 1)
    print(f"{len(first.losses)} steps of {options.batch} x {options.length} tokens, {options.precision}"
          f"{', compiled' if options.compile else ''}: loss {first.losses[0]:.3f} to {first.losses[-1]:.3f}")
    theirs = statistics.median(first.times[warm:])
    for t in trainings:
        ours = statistics.median(t.times[warm:])
        apart = [abs(a - b) for a, b in zip(first.losses, t.losses)]
        quarter = max(1, len(apart) // 4)
        print(f"{t.name:10s} {1e3 * ours:8.2f} ms, queued in {1e3 * statistics.median(t.queued[warm:]):7.2f}, "
              f"ratio {theirs / ours:6.3f}; losses apart {max(apart):.1e} at most, "
              f"{statistics.mean(apart):.1e} on average; first quarter {max(apart[:quarter]):.1e}, "
              f"{statistics.mean(apart[:quarter]):.1e}; last {t.losses[-1]:.4f}")
    if options.profile and options.device == "cuda":
        for t in trainings:
            t.profile(piece)


if __name__ == "__main__":
    main()
