#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""bench/pytorch.py fails if a result is wrong, as a TAP program. NumPy stands in for PyTorch and fattn: the test is
about what the script does with two sets of results.

    bench_pytorch.py FOLDER   that of pytorch.py
"""

import contextlib
import io
import os
import sys
import types

import checks
from checks import ok

try:
    import numpy as np
except ImportError:
    sys.exit(checks.skip_all("NumPy is not installed"))


class Tensor:
    """As much of a tensor as the script looks at."""

    def __init__(self, array):
        self.array, self.shape = np.asarray(array, np.float32), np.shape(array)

    def float(self):
        return self

    def __sub__(self, other):
        return Tensor(self.array - other.array)

    def abs(self):
        return Tensor(abs(self.array))

    def max(self):
        return Tensor(self.array.max())

    def item(self):
        return float(self.array)


def pretend_torch():
    """A torch that can be imported and draws zeros."""
    torch = types.ModuleType("torch")
    torch.float32, torch.float16, torch.bfloat16 = "f32", "f16", "bf16"
    torch.randn = lambda *shape, **_: Tensor(np.zeros(shape))
    torch.randn_like = lambda tensor: tensor
    attention = types.ModuleType("torch.nn.attention")
    attention.SDPBackend = types.SimpleNamespace(FLASH_ATTENTION=1, CUDNN_ATTENTION=2, EFFICIENT_ATTENTION=3, MATH=4)
    attention.sdpa_kernel = None
    sys.modules.update({"torch": torch, "torch.nn": types.ModuleType("torch.nn"), "torch.nn.attention": attention})


def bench(script, ours, theirs, *words):
    """The exit status and output of the script for these o of fattn and of the peer."""
    plan = types.SimpleNamespace(kernel=b"pretended")
    script.Feature = lambda name, q, k: types.SimpleNamespace(name=name, gradient=None)
    script.Fattn = lambda *_: types.SimpleNamespace(
        plan=lambda _: plan, run=lambda _: None, close=lambda: None, tensors={"o": Tensor(ours)},
        feature=types.SimpleNamespace(gradient=None))
    script.load = lambda *_: None
    script.contenders = lambda *_: {"fattn": None, "flash": lambda: Tensor(theirs)}
    script.measure = lambda *_: {"fattn": 1e-3, "flash": 1e-3}
    sys.argv = ["pytorch.py", *"--device cpu --dim 8 --mask full --length 16 --heads 1 --tokens 0".split(), *words]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        status = script.main()
    return status, said.getvalue()


def main():
    sys.path.insert(0, os.path.abspath(sys.argv[1]))
    sys.dont_write_bytecode = True
    pretend_torch()
    import pytorch  # pylint: disable=import-outside-toplevel,import-error
    for name, ours, theirs, words, expected in (
            ("equal results", [1, 2], [1, 2], "--dtype bf16", 0),
            ("rounding of bf16", [1, 2.01], [1, 2], "--dtype bf16", 0),
            ("a wrong result in bf16", [1, 2.2], [1, 2], "--dtype bf16", 1),
            ("the same distance in f32", [1, 2.01], [1, 2], "--dtype f32", 1),
            ("a NaN of ours, in front", [np.nan, 2], [1, 2], "--dtype bf16", 1),
            ("a NaN of theirs, at the end", [1, 2], [1, np.nan], "--dtype bf16", 1),
            ("dropout, whose patterns differ", [1, 2], [7, 7], "--dtype bf16 --feature dropout", 0)):
        status, said = bench(pytorch, ours, theirs, *words.split())
        last = said.splitlines()[1].split("\t")[-1]
        if status != expected:
            print("#", status, said)
        ok(status == expected and last.endswith("!") == bool(expected), f"{name}: {last}")
    return checks.done()


if __name__ == "__main__":
    sys.exit(main())
