# SPDX-License-Identifier: Apache-2.0
"""The arguments of the operators.

There are two pairs of operators. fattn::forward and fattn::backward have every option. PyTorch converts all arguments of an
operator whenever a compiled graph calls it, which takes as long as the rest of the call. So calls with nothing else take
fattn::forward_common and fattn::backward_common, which have the common options alone. The rules of both pairs are written
in terms of all arguments: tensors in the order of TENSORS, then Numbers.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, Sequence

import torch

# q, k, v, and those of EXTRAS of fattn._problem except arrays of positions, which an operator does not take.
TENSORS = ("q", "k", "v", "bias", "mask", "block_mask", "alibi_slopes", "sink", "cu_seqlens_q",
           "cu_seqlens_k", "seqused_q", "seqused_k", "block_table", "seqstart_k", "seed", "k_descale", "v_descale")
_N = len(TENSORS)
_NUMBERS: dict[str, tuple[str, Any]] = {
    "causal": ("bool", False), "window_left": ("SymInt", -1), "window_right": ("SymInt", -1),
    "scale": ("float?", None), "softcap": ("float?", None), "dropout_p": ("float", 0.0),
    "top_left": ("bool", False), "bhsd": ("bool", False), "out_f32": ("bool", False),
    "max_seqlen_q": ("SymInt?", None), "max_seqlen_k": ("SymInt?", None),
    "block_m": ("SymInt", 0), "block_n": ("SymInt", 0), "positions": ("SymInt[]?", None),
    "batch_invariant": ("bool", False), "checked": ("bool", False), "deterministic": ("bool", False),
    "device": ("str?", None), "chunk": ("SymInt?", None), "alibi_bias": ("bool", False)}
Numbers: Any = namedtuple("Numbers", list(_NUMBERS))  # type: ignore[misc]
_NAMES = (*TENSORS, *_NUMBERS)
_DEFAULTS = (*[None] * _N, *[default for _, default in _NUMBERS.values()])


class Schema:
    """The arguments of a pair of operators, which are some of all arguments, and begin with q, k and v."""

    def __init__(self, suffix: str, names: Sequence[str], gradients: int) -> None:
        """gradients: how many results backward has: the first of GRADIENTS."""
        self.forward, self.backward = "fattn::forward" + suffix, "fattn::backward" + suffix
        self.gradients = gradients
        self.places = tuple([_NAMES.index(name) for name in names])
        self._others = tuple([place for place in range(len(_NAMES)) if place not in self.places])
        parts = []
        for place in self.places:
            name = _NAMES[place]
            kind, default = _NUMBERS[name] if place >= _N else ("Tensor" if place < 3 else "Tensor?", None)
            parts.append(f"{kind} {name}" + (f"={default}" if place >= 3 else ""))
        self.text = ", ".join(parts)

    def operators(self) -> tuple[Any, Any]:
        """Those of forward and of backward."""
        return (getattr(torch.ops.fattn, self.forward.split("::")[1]).default,
                getattr(torch.ops.fattn, self.backward.split("::")[1]).default)

    def split(self, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
        """All tensors and Numbers of an operator's arguments, of which the dispatcher leaves out the last defaults."""
        every = list(_DEFAULTS)
        for place, a in zip(self.places, arguments):
            every[place] = a
        return tuple(every[:_N]), Numbers(*every[_N:])

    def suits(self, every: Sequence[Any]) -> bool:
        """Whether a call with all these arguments can take these operators: the arguments that they lack are defaults."""
        return all([every[place] is None if place < _N else every[place] == _DEFAULTS[place]
                    for place in self._others])

    def select(self, every: Sequence[Any]) -> list[Any]:
        """The operators' own of all arguments. every may end with the tensors; then there is None for each number."""
        return [every[place] if place < len(every) else None for place in self.places]


ALL = Schema("", _NAMES, 5)
# What is rarely given comes last: the dispatcher converts no argument behind the last one that is not a default.
COMMON = Schema("_common", ("q", "k", "v", "causal", "bhsd", "top_left", "scale", "window_left", "window_right",
                            "deterministic", "mask", "seqused_k", "block_table"), 3)
COMMON_NUMBERS = slice(3, 10)  # the numbers among them


def schema_for(every: Sequence[Any]) -> Schema:
    """The pair of operators for a call with all these arguments."""
    return COMMON if COMMON.suits(every) else ALL
