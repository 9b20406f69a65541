# SPDX-License-Identifier: Apache-2.0
"""One exception class for each fattn_status; the text is the library's own sentence."""

from __future__ import annotations

from typing import Any


class Error(Exception):
    """Base of all errors of fattn. `status` is the number of the `fattn_status` behind it."""

    status = 0


class InvalidArgument(Error, ValueError):
    """An option, a dtype or a number is wrong, or arrays do not fit together."""

    status = 10


class InvalidStruct(Error):
    """The library and this package disagree about a struct: they are of different versions."""

    status = 11


class InvalidShape(Error, ValueError):
    """A rank or a size is wrong, or sizes contradict each other."""

    status = 12


class InvalidStride(Error, ValueError):
    """An array has a memory layout that attention cannot read or write."""

    status = 13


class NullPointer(Error, ValueError):
    """Something that the problem requires is missing."""

    status = 14


class Misaligned(Error, ValueError):
    """The address of an array is not aligned for its elements."""

    status = 15


class Overlap(Error, ValueError):
    """An output shares memory with itself or with another array."""

    status = 16


class Overflow(Error, OverflowError):
    """A size in bytes does not fit in 63 bits."""

    status = 17


class InvalidData(Error, ValueError):
    """Lengths, cu_seqlens or a block table contradict the shapes."""

    status = 18


class Unsupported(Error, NotImplementedError):
    """The request is legal, but this device or build cannot honour it."""

    status = 20


class NoDevice(Error, RuntimeError):
    """The backend is known, but no such device is present."""

    status = 30


class UnknownDevice(Error, ValueError):
    """The name is not a backend's."""

    status = 31


class DeviceError(Error, RuntimeError):
    """A device's driver reported an error."""

    status = 32


class OutOfMemory(Error, MemoryError):
    """Memory ran out."""

    status = 40


class BadEnvironment(Error, RuntimeError):
    """An environment variable of fattn has an invalid value."""

    status = 50


class RankLost(Error, RuntimeError):
    """A rank of a divided problem has given up or is gone; the text says which, and why."""

    status = 60


class RankTimeout(Error, TimeoutError):
    """A rank of a divided problem did not answer in time."""

    status = 61


class RanksDisagree(Error, RuntimeError):
    """Ranks describe different problems."""

    status = 62


BY_STATUS: dict[int, type[Error]] = {kind.status: kind for kind in (
    InvalidArgument, InvalidStruct, InvalidShape, InvalidStride, NullPointer, Misaligned, Overlap,
    Overflow, InvalidData, Unsupported, NoDevice, UnknownDevice, DeviceError, OutOfMemory,
    BadEnvironment, RankLost, RankTimeout, RanksDisagree)}


class _Renaming:
    """Gives errors that leave its `with` another name of an argument in their sentences."""

    def __init__(self, name: str, to: str) -> None:
        self.name, self.to = name, to

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, (Error, TypeError)) and self.name in str(error):
            raise type(error)(str(error).replace(self.name, self.to)) from None


naming_cache_seqlens = _Renaming("seqused_k", "cache_seqlens")
"""For functions that have a cache."""
