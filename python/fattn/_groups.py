# SPDX-License-Identifier: Apache-2.0
"""fattn/distributed.h for ctypes: shares, groups of ranks, and plans that are divided over them."""

from __future__ import annotations

import ctypes
from ctypes import (CFUNCTYPE, POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t,
                    c_void_p)
from typing import Any

from fattn import _c
from fattn._errors import InvalidArgument

SPLITS = {"contiguous": 1, "zigzag": 2, "striped": 3}
SCHEMES = {"auto": 0, "ring": 1, "heads": 2, "both": 3, "reduce": 4}


class Run(ctypes.Structure):
    _fields_ = [("first", c_int64), ("count", c_int64), ("stride", c_int64)]


class Message(ctypes.Structure):
    _fields_ = [("peer", c_int32), ("tag", c_int32), ("receive", c_int32), ("span_count", c_int32),
                ("data", c_void_p), ("bytes", c_int64), ("spans", c_void_p)]


START = CFUNCTYPE(c_int, c_void_p, POINTER(Message), c_int)
WAIT = CFUNCTYPE(c_int, c_void_p, POINTER(Message), c_int, c_double)
ABORT = CFUNCTYPE(None, c_void_p, c_char_p)


class Transport(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("rank", c_int32), ("ranks", c_int32), ("user", c_void_p),
                ("start", START), ("wait", WAIT), ("abort", ABORT), ("device_memory", c_int32),
                ("spans", c_int32), ("stream", c_void_p)]


class Group(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("transport", POINTER(Transport)), ("device", c_void_p),
                ("split", c_int), ("scheme", c_int), ("timeout", c_double), ("memory", c_int64),
                ("turns", c_int64), ("rate", c_double), ("bandwidth", c_double), ("latency", c_double),
                ("saves", c_int32)]


for _name, _result, _parameters in (
        ("fattn_split_runs", c_int, [c_int]),
        ("fattn_split_get_run", c_int, [c_int, c_int64, c_int64, c_int64, c_int, POINTER(Run)]),
        ("fattn_transport_fail", c_int, [c_int, c_char_p]),
        ("fattn_group_init", None, [c_void_p]),
        ("fattn_group_plan_create", c_int,
         [c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_void_p)]),
        ("fattn_group_plan_destroy", None, [c_void_p]),
        ("fattn_group_plan_bytes", c_int64, [c_void_p]),
        ("fattn_group_plan_saved_bytes", c_int64, [c_void_p]),
        ("fattn_group_execute_saved", c_int, [c_void_p, c_void_p, c_void_p])):
    _function = getattr(_c.lib, _name)
    _function.restype, _function.argtypes = _result, _parameters


def number_of(words: dict[str, int], what: str, word: str) -> int:
    if word not in words:
        raise InvalidArgument(f"{what} is {word!r}, none of {', '.join(words)}")
    return words[word]


def runs_of(split: int, length: int, ranks: int, rank: int) -> list[range]:
    """A rank's rows of a sequence: runs, one after another."""
    runs = []
    for which in range(_c.lib.fattn_split_runs(split)):
        run = Run()
        _c.check(_c.lib.fattn_split_get_run(split, length, ranks, rank, which, ctypes.byref(run)))
        runs.append(range(run.first, run.first + run.count * run.stride, run.stride))
    return runs


class GroupPlan:
    """A fattn_group_plan; all ranks make it at the same time."""

    def __init__(self, transport: Transport, device: int, split: int, scheme: int, timeout: float,
                 problem: int | None, cu_seqlens: tuple[tuple[int, ...], ...] | None = None,
                 saves: bool = False, bandwidth: float = 0.0, latency: float = 0.0) -> None:
        self.address = 0
        group, memory = _c.new_struct(Group, _c.lib.fattn_group_init)
        group.transport, group.device = ctypes.pointer(transport), device
        group.split, group.scheme, group.timeout, group.saves = split, scheme, timeout, saves
        group.bandwidth, group.latency = bandwidth, latency
        plan = ctypes.c_void_p()
        lengths = [(c_int32 * len(cu))(*cu) for cu in cu_seqlens] if cu_seqlens else [None, None]
        _c.check(_c.lib.fattn_group_plan_create(ctypes.addressof(group), problem, *lengths,
                                                ctypes.byref(plan)))
        assert memory and plan.value is not None
        self.address = plan.value
        self.saved_bytes: int = _c.lib.fattn_group_plan_saved_bytes(plan)

    def execute(self, buffers: Any, saved: int = 0) -> None:
        """saved: the address of saved_bytes bytes, which forward writes and backward reads."""
        _c.check(_c.lib.fattn_group_execute_saved(self.address, ctypes.addressof(buffers), saved))

    def destroy(self) -> None:
        if self.address:
            _c.lib.fattn_group_plan_destroy(self.address)
            self.address = 0
