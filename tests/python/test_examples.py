# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/python: each checks itself, or its last loss is checked here."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "examples", "python")


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


def test_jax_arrays():
    from fattn import _c
    import ctypes
    try:
        ctypes.CDLL(_c.find("libfattn_xla.so"))
    except OSError as error:
        pytest.skip(str(error))
    run("jax_arrays.py", needs=["jax"])
