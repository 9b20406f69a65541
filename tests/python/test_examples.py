# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/python: each checks itself, or its last loss is checked here. And the
pieces of Python that README.md and docs/PYTHON.md print."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
FOLDER = os.path.join(ROOT, "examples", "python")


def run(name, *arguments, needs=()):
    for module in needs:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"no {module}")
    done = subprocess.run([sys.executable, os.path.join(FOLDER, name), *arguments], capture_output=True,
                          text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run():
    with open(__file__, encoding="utf-8") as file:
        assert set(re.findall(r'run\("(\w+\.py)"', file.read())) == {
            name for name in os.listdir(FOLDER) if name.endswith(".py")}


def test_numpy_arrays():
    assert "True" in run("numpy_arrays.py")


def test_train_gpt():
    losses = [float(x) for x in re.findall(r"loss (\S+)", run("train_gpt.py", "--steps", "60",
                                                              needs=["torch"]))]
    assert losses[-1] < 2.6


def test_generate():
    run("generate.py", needs=["torch", "transformers"])


def test_decode_in_eight_bits():
    run("decode_in_eight_bits.py", needs=["torch"])


def need_xla():
    from fattn import _c
    import ctypes
    try:
        ctypes.CDLL(_c.find("libfattn_xla.so"))
    except OSError as error:
        pytest.skip(str(error))


def test_jax_arrays():
    need_xla()
    run("jax_arrays.py", needs=["jax"])


# By a word of a piece: the module it needs, what it takes for granted, and what must hold after it.
PIECES = {
    "np.random.default_rng(0)": ("numpy", "", "assert o.shape == q.shape and o.dtype == np.float32"),
    "fattn.torch.attention(q": ("torch", """
import torch
original = torch.nn.functional.scaled_dot_product_attention
q, k, v = torch.randn(3, 2, 20, 4, 16)
x = torch.randn(2, 20, 64)
seen = []
def model(x):
    heads = x.unflatten(-1, (4, 16)).transpose(1, 2)
    seen.append(torch.nn.functional.scaled_dot_product_attention(heads, heads, heads))
""", """
assert o.shape == q.shape and len(seen) == 1
assert torch.allclose(seen[0], original(*[x.unflatten(-1, (4, 16)).transpose(1, 2)] * 3), atol=1e-5)
"""),
    "float8_e4m3fn": ("torch", """
import torch, fattn.torch
q, k, v = torch.randn(2, 1, 8, 16), torch.randn(2, 20, 4, 16), torch.randn(2, 20, 4, 16)
""", """
wide = [cache.float() * factor[:, None, :, None] for cache, factor in ((k_cache, k_descale), (v_cache, v_descale))]
assert all(torch.allclose(a, b, rtol=0.07, atol=1e-4) for a, b in zip(wide, (k, v)))
assert torch.allclose(o, fattn.torch.attention(q, *wide), atol=1e-5)
"""),
    "context_parallel(group)": ("torch", """
import os, tempfile, torch, fattn.torch
meeting = "file://" + os.path.join(tempfile.mkdtemp(), "meeting")
torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=meeting)
group = None
q, k, v = torch.randn(3, 2, 20, 4, 16)
ids, positions, targets = (torch.arange(20)[None].repeat(2, 1) for _ in range(3))
weight = torch.randn(20, 4, 16, requires_grad=True)
def model(ids, positions, targets):
    heads = weight[positions].transpose(1, 2)
    o = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return (o.sum((1, 3)) * targets).sum()
""", """
torch.distributed.destroy_process_group()
assert o.shape == q.shape and weight.grad.abs().sum() > 0
"""),
    "AutoModelForCausalLM": ("transformers", """
import tempfile
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
name = tempfile.mkdtemp()
GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_head=2, n_layer=1)).save_pretrained(name)
""", "assert model.config._attn_implementation == 'fattn'"),
    "fattn.jax": ("jax", """
import jax
q, k, v = (jax.random.normal(jax.random.key(i), (2, 20, 4, 16)) for i in range(3))
""", """
assert abs(o - jax.nn.dot_product_attention(q, k, v, is_causal=True)).max() < 1e-5
"""),
}


def pieces():
    for document in "README.md", os.path.join("docs", "PYTHON.md"):
        with open(os.path.join(ROOT, document), encoding="utf-8") as file:
            text = file.read()
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            yield pytest.param(match[1], id=f"{document}:{text[:match.start()].count(chr(10)) + 1}")


@pytest.mark.parametrize("piece", [*pieces()])
def test_documents(piece):
    (needs, before, after), = (row for word, row in PIECES.items() if word in piece)
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"no {needs}")
    if needs == "jax":
        need_xla()
    names = {}
    for part in before, piece, after:
        exec(part, names)


def test_every_piece_is_in_the_documents():
    printed = [piece.values[0] for piece in pieces()]
    assert all(any(word in piece for piece in printed) for word in PIECES)
