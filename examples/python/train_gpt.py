# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT on a licence, in PyTorch, and generates text. fattn computes causal attention
and its gradients.

usage: python train_gpt.py [--steps N] [TEXT]
"""

import argparse
import os

import fattn.torch
import torch
import torch.nn.functional as F
from torch import nn

HEADS, DIM, LAYERS, CONTEXT = 4, 96, 3, 128


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.project = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.grow, self.shrink = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        b, s, _ = x.shape
        # Slices of one tensor (batch, sequence, head, channel): nothing is copied.
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, DIM // HEADS).unbind(2)
        x = x + self.project(fattn.torch.attention(q, k, v, causal=True).flatten(2))
        return x + self.shrink(F.gelu(self.grow(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, symbols):
        super().__init__()
        self.token, self.place = nn.Embedding(symbols, DIM), nn.Embedding(CONTEXT, DIM)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, symbols)

    def forward(self, ids):
        x = self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def main():
    licences = ("/usr/share/common-licenses/GPL-3",
                os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "LICENSE"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("text", nargs="?", default=next(p for p in licences if os.path.exists(p)))
    options = parser.parse_args()
    with open(options.text, encoding="utf-8") as file:
        text = file.read()
    symbols = sorted(set(text))
    data = torch.tensor([symbols.index(c) for c in text])

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() and fattn.devices()[0].backend != "cpu" else "cpu"
    model, data = GPT(len(symbols)).to(device), data.to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(data) - CONTEXT - 1, (16,)).tolist()
        rows = torch.stack([data[i:i + CONTEXT + 1] for i in starts])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 0 or step == options.steps:
            print(f"step {step:4d}   loss {loss.item():.3f} nats a character", flush=True)

    ids = data[:8]
    with torch.no_grad():
        for _ in range(200):
            weights = F.softmax(model(ids[None, -CONTEXT:])[0, -1] / 0.7, 0)
            ids = torch.cat((ids, torch.multinomial(weights, 1)))
    print("".join(symbols[i] for i in ids.tolist()))


if __name__ == "__main__":
    main()
