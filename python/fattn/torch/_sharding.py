# SPDX-License-Identifier: Apache-2.0
"""How the operators divide DTensors (torch.distributed.tensor).

A mesh may divide the batch and the heads. Each process then computes its own part, and nothing is sent except sums of
gradients of tensors that all processes have. Tensors that are divided otherwise are gathered first, as PyTorch does for
its own operators.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Sequence

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from fattn import _c
from fattn.torch._calls import GRADIENTS
from fattn.torch._schemas import ALL, COMMON, TENSORS, Schema

_Rule = tuple[list[Any], list[Any]]  # placements along one axis of a mesh: of results, of tensors


def _axis_of(name: str, shape: Sequence[int], part: str, bhsd: bool, paged: bool) -> int | None:
    """The axis of a tensor that is divided with "batch" or "heads"; None if it has none."""
    rank = len(shape)
    if name in ("q", "k", "v", "o", "dout"):
        axes = {"batch": -1 if paged and name in ("k", "v") else rank - 4, "heads": rank - 3 if bhsd else rank - 2}
    elif name in ("lse", "dlse"):
        axes = {"batch": rank - 3, "heads": rank - 2}
    elif name in ("bias", "mask", "block_mask"):
        axes = {"batch": rank - 4, "heads": rank - 3}
    elif name in ("alibi_slopes", "sink", "k_descale", "v_descale"):
        axes = {"batch": rank - 2, "heads": rank - 1}
    elif name in ("seqused_q", "seqused_k", "seqstart_k", "block_table"):
        axes = {"batch": 0}
    else:
        axes = {}
    axis = axes.get(part, -1)
    return axis if axis >= 0 and shape[axis] > 1 else None


def _parts(given: dict[str, Any], bhsd: bool) -> list[str]:
    """What may be divided."""
    q, k = given["q"].shape, given["k"].shape
    if "seed" in given:  # the pattern of dropout depends on positions in the whole tensors
        return []
    parts = ["batch"] if len(q) == 4 and q[0] > 1 else []
    heads_q, heads_k = (shape[-3 if bhsd else -2] for shape in (q, k))
    mesh = given["q"].mesh.shape
    # Heads of q must stay with their heads of k, whichever axes of the mesh divide them.
    counts = [math.prod(axes) for n in range(len(mesh)) for axes in itertools.combinations(mesh, n + 1)]
    if heads_q > 1 and (heads_k in (1, heads_q) or all([heads_k < n or heads_k % n == 0 for n in counts])):
        parts.append("heads")
    return parts


def _rules(given: dict[str, Any], results: Sequence[tuple[str, Any] | None], numbers: Any) -> list[_Rule]:
    """given: tensors by their names. results: None, or a name in _axis_of() and the shape of what is placed like it."""
    rules: list[_Rule] = [([Replicate()] * len(results), [Replicate()] * len(given))]
    for part in _parts(given, numbers.bhsd):
        def place(name: str, shape: Sequence[int], absent: Any, part: str = part) -> Any:
            axis = _axis_of(name, shape, part, numbers.bhsd, "block_table" in given)
            return absent if axis is None else Shard(axis)

        rules.append(([Replicate() if result is None else place(*result, Partial()) for result in results],
                      [place(name, tensor.shape, Replicate()) for name, tensor in given.items()]))
    return rules


def _register(schema: Schema) -> None:
    def divide_forward(*arguments: Any) -> list[_Rule]:
        tensors, numbers = schema.split(arguments)
        given = {name: t for name, t in zip(TENSORS, tensors) if t is not None}
        q = given["q"].shape
        heads = q[-3 if numbers.bhsd else -2]
        return _rules(given, [("o", q), ("lse", (*q[:-3], heads, 0))], numbers)

    def divide_backward(dout: Any, dlse: Any, o: Any, lse: Any, outputs: int, *arguments: Any) -> list[_Rule]:
        tensors, numbers = schema.split(arguments)
        given = {name: t for name, t in zip(("dout", "dlse", "o", "lse", *TENSORS), (dout, dlse, o, lse, *tensors))
                 if t is not None}
        results = [(name[1:], given[name[1:]].shape) if outputs & _c.OUT_DQ << i and name[1:] in given else None
                   for i, name in enumerate(GRADIENTS[:schema.gradients])]
        return _rules(given, results, numbers)

    forward, backward = schema.operators()
    register_sharding(forward)(divide_forward)
    register_sharding(backward)(divide_backward)


_register(ALL)
_register(COMMON)
