# SPDX-License-Identifier: Apache-2.0
"""What mypy makes of the types of calls. Results are one array or two, as return_lse says."""

import importlib.util
import os
import site

import fattn
import pytest

api = pytest.importorskip("mypy.api")

ARRAYS = """
import fattn
from typing_extensions import assert_type

class Array: ...

def calls(a: Array, flag: bool) -> None:
    assert_type(fattn.attention(a, a, a, causal=True, bias=a), Array)
    assert_type(fattn.attention(a, a, a, positions=(0, 0, -1, -1)), Array)
    assert_type(fattn.attention(a, a, a, k_descale=a, v_descale=2.0), Array)
    assert_type(fattn.attention(a, a, a, return_lse=True), tuple[Array, Array])
    assert_type(fattn.attention(a, a, a, return_lse=flag), Array | tuple[Array, Array])
"""
TENSORS = """
from fattn.torch import attention, attention_varlen, attention_with_kvcache
from torch import Tensor
from typing_extensions import assert_type

def calls(t: Tensor, flag: bool) -> None:
    assert_type(attention(t, t, t, causal=True, positions=(0, 0, -1, -1)), Tensor)
    assert_type(attention(t, t, t, return_lse=True), tuple[Tensor, Tensor])
    assert_type(attention(t, t, t, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    assert_type(attention_varlen(t, t, t, cu_seqlens_q=t, cu_seqlens_k=t, max_seqlen_q=1, max_seqlen_k=1), Tensor)
    assert_type(attention_with_kvcache(t, t, t, cache_seqlens=t, k_descale=t, v_descale=2.0), Tensor)
    assert_type(attention_with_kvcache(t, t, t, return_lse=True), tuple[Tensor, Tensor])
"""


def errors(program, tmp_path, monkeypatch):
    """The lines of mypy's errors. mypy finds an installed fattn by itself, and refuses to be pointed there."""
    folder = os.path.dirname(os.path.dirname(fattn.__file__))
    if folder not in site.getsitepackages():
        monkeypatch.setenv("MYPYPATH", folder)
    said, complaint, status = api.run(["--config-file=", "--strict", "--follow-imports=silent",
                                       "--no-error-summary", f"--cache-dir={tmp_path}", "-c", program])
    lines = [line for line in said.splitlines() if "error:" in line]
    assert not complaint and status == (1 if lines else 0)
    return lines


@pytest.mark.parametrize("program", [ARRAYS, pytest.param(TENSORS, marks=pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"))], ids=["arrays", "tensors"])
def test_results(program, tmp_path, monkeypatch):
    assert errors(program, tmp_path, monkeypatch) == []
    assert errors(program.replace("causal=True", "caual=True"), tmp_path, monkeypatch) != []
