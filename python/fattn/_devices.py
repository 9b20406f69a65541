# SPDX-License-Identifier: Apache-2.0
"""Devices: open handles, one per name, and their descriptions."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from typing import NamedTuple

from fattn import _c
from fattn._errors import InvalidArgument

_DEFAULT, _OPENMP = 0, 2  # fattn_engine

_lock = threading.Lock()
_handles: dict[str, int] = {}
_infos: dict[int, DeviceInfo] = {}


class DeviceInfo(NamedTuple):
    """The description of a device; see fattn_device_info in fattn.h."""

    backend: str
    """"cpu", "cuda", "hip", "reference"."""
    name: str
    """Such as "AMD EPYC ..."."""
    isa: str
    """Such as "avx512", "sm_90"."""
    ordinal: int
    """0 for the first device of the backend."""
    host_memory: bool
    """Whether kernels read the memory of NumPy arrays directly."""
    units: int
    """Worker threads, or multiprocessors."""
    fast_memory: int
    """Bytes of cache or shared memory that a unit may plan with."""
    total_memory: int
    """Bytes, 0 when unknown."""

    def __str__(self) -> str:
        return f"{self.backend}:{self.ordinal} {self.name}, {self.isa}, {self.units} units"


def handle(spec: str) -> int:
    """An open device, which stays open. `spec` is that of fattn_device_open(). Once PyTorch is imported, a CPU is
    opened again, to work on PyTorch's threads, except in the child of a fork."""
    if not isinstance(spec, str):
        raise InvalidArgument(f'device is {spec!r}, not a name such as "cpu"')
    key = spec + "+" if "torch" in sys.modules else spec
    opened = _handles.get(key)
    if opened is None:
        with _lock:
            opened = _handles.get(key)
            if opened is None:
                opened = _handles.get(spec)
                if opened is None or info_of(opened).backend == "cpu":
                    opened = _open(spec)
                _handles[key] = opened
    return opened


def _open(spec: str) -> int:
    device = ctypes.c_void_p()
    _c.check(_c.lib.fattn_device_open(spec.encode(), ctypes.byref(device)))
    assert device.value is not None
    about, threads = info_of(device.value), _threads()
    if about.backend != "cpu" or not threads or "FATTN_NUM_THREADS" in os.environ:
        return device.value
    try:
        return _open_with(spec, min(threads, about.units))
    finally:
        _infos.pop(device.value)
        _c.lib.fattn_device_close(device)


def _open_with(spec: str, threads: int) -> int:
    """A CPU with this many threads: PyTorch's own, if they are found."""
    options, memory = _c.new_struct(_c.DeviceOptions, _c.lib.fattn_device_options_init)
    options.threads = threads
    device, status = ctypes.c_void_p(), 0
    # PyTorch's threads spin for milliseconds after their work, and other threads would wait for the processors.
    # The library does not find every OpenMP runtime that PyTorch may have; then its own threads have to do.
    for engine in (_OPENMP, _DEFAULT) if "torch" in sys.modules and not _is_forked() else (_DEFAULT,):
        options.engine = engine
        status = _c.lib.fattn_device_open_with(spec.encode(), ctypes.addressof(options), ctypes.byref(device))
        if not status:
            break
    _c.check(status)
    assert memory and device.value is not None
    return device.value


_forks: list[int] = []  # processes, of which this one is the last


def _is_forked() -> bool:
    """Whether this process is the child of a fork. If its parent has worked with OpenMP, OpenMP's threads are missing
    here, and it would wait for them for ever. A fork before this module was imported is only seen if multiprocessing
    made it."""
    process = sys.modules.get("multiprocessing.process")
    return bool(_forks) or (process is not None and process.parent_process() is not None and
                            "multiprocessing.popen_fork" in sys.modules)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _forks.append(os.getpid()))


def _threads() -> int:
    """The number of threads that OpenMP would use in this process, or 0. The library may not see OpenMP's
    runtime if only PyTorch's wheel brings one."""
    torch = sys.modules.get("torch")
    if torch is not None:
        number: int = torch.get_num_threads()
        return number
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


@functools.cache
def host_spec() -> str:
    """The device for arrays in host memory if the caller names none. The environment is read once."""
    return os.environ.get("FATTN_BACKEND", "cpu")


def info_of(device: int) -> DeviceInfo:
    found = _infos.get(device)
    if found is None:
        struct = _c.DeviceInfo()
        struct.struct_size = ctypes.sizeof(struct)
        _c.check(_c.lib.fattn_device_get_info(device, ctypes.byref(struct)))
        found = _infos[device] = DeviceInfo(
            struct.backend.decode(), struct.name.decode("utf-8", "replace"), struct.isa.decode(),
            struct.ordinal, bool(struct.host_memory), struct.units, struct.fast_memory,
            struct.total_memory)
    return found


def info(device: str | None = None) -> DeviceInfo:
    """Describes a device: "cpu", "cuda", "cuda:1", "hip", "reference" or "auto"; None: the device that computes for
    arrays in host memory. Opens it if it is not open yet.

    Raises UnknownDevice, NoDevice or DeviceError.
    """
    return info_of(handle(host_spec() if device is None else device))


def devices() -> list[DeviceInfo]:
    """All devices that are present, in the order in which "auto" tries them."""
    found = []
    i = 0
    while (name := _c.lib.fattn_backend_name(i)) is not None:
        for ordinal in range(_c.lib.fattn_device_count(name)):
            found.append(info(f"{name.decode()}:{ordinal}"))
        i += 1
    return found
