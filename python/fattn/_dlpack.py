# SPDX-License-Identifier: Apache-2.0
"""DLPack by ctypes: reads the tensor in another library's capsule, and exports our memory in one. For libraries without
a faster interface (fattn._arrays)."""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p, py_object
from typing import Any, Callable, NamedTuple

from fattn import _c
from fattn._errors import InvalidArgument, NullPointer, Unsupported


class _Tensor(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32),
                ("ndim", c_int32), ("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16),
                ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)),
                ("byte_offset", c_uint64)]


class _Managed(ctypes.Structure):
    pass


_DELETER = ctypes.CFUNCTYPE(None, POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", c_void_p), ("deleter", _DELETER)]

_CPU, _CUDA, _CUDA_HOST, _ROCM, _ROCM_HOST = 1, 2, 3, 10, 11
_BACKENDS = {_CPU: "cpu", _CUDA_HOST: "cpu", _ROCM_HOST: "cpu", _CUDA: "cuda", _ROCM: "hip"}
_TYPES = {(0, 32): "int32", (0, 64): "int64", (0, 8): "int8", (1, 8): "uint8", (1, 64): "uint64",
          (2, 16): "float16", (2, 32): "float32", (2, 64): "float64", (4, 16): "bfloat16",
          (6, 8): "bool", (10, 8): "float8_e4m3fn"}
# Those that are refused by their names.
_TYPES |= {(7, 8): "float8_e3m4", (8, 8): "float8_e4m3", (9, 8): "float8_e4m3b11fnuz", (11, 8): "float8_e4m3fnuz",
           (12, 8): "float8_e5m2", (13, 8): "float8_e5m2fnuz", (14, 8): "float8_e8m0fnu"}
_CODES = {name: code for code, name in _TYPES.items()}

_api = ctypes.pythonapi
_pointer_of = ctypes.PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", _api))
_new_capsule = ctypes.PYFUNCTYPE(py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", _api))
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, c_void_p, c_char_p)(("PyCapsule_IsValid", _api))
_raw_pointer_of = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(("PyCapsule_GetPointer", _api))


class Description(NamedTuple):
    """A tensor of another library. Strides are in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    address: int
    writable: bool


def _capsule_of(a: Any) -> Any:
    device_type, _ = a.__dlpack_device__()
    if device_type not in _BACKENDS:
        raise Unsupported(f"a {type(a).__name__} is on DLPack device {device_type}, neither a CPU nor a "
                          "GPU that fattn knows")
    # On a GPU: as the default stream finds it, 1 in CUDA's numbering and 0 in ROCm's.
    stream = {_CUDA: 1, _ROCM: 0}.get(device_type)
    return a.__dlpack__() if stream is None else a.__dlpack__(stream=stream)


def describe(a: Any) -> Description:
    """Describes a's capsule. The capsule is released at once: `a` itself keeps its memory alive."""
    try:
        capsule = _capsule_of(a)
    except Exception as error:
        if hasattr(a, "is_deleted") and a.is_deleted():  # of JAX
            raise NullPointer(f"a {type(a).__name__} has no memory: it was deleted, or donated to a program") from None
        if isinstance(error, BufferError):
            instead = "; fattn.jax takes sharded arrays" if type(a).__module__.startswith("jax") else ""
            raise Unsupported(f"a {type(a).__name__} cannot be read in place: {error}{instead}") from None
        raise
    t = ctypes.cast(_pointer_of(capsule, b"dltensor"), POINTER(_Tensor)).contents
    shape = tuple(t.shape[i] for i in range(t.ndim))
    if t.strides:
        strides = tuple(t.strides[i] for i in range(t.ndim))
    else:
        strides = contiguous_strides(shape)
    dtype = _TYPES.get((t.code, t.bits))
    if dtype is None or t.lanes != 1:
        raise InvalidArgument(f"a {type(a).__name__} has DLPack type {t.code}, {t.bits} bits, {t.lanes} "
                              "lanes, which attention does not take")
    backend = _BACKENDS[t.device_type]
    device = backend if backend == "cpu" else f"{backend}:{t.device_id}"
    # Arrays of libraries that never change them, such as JAX, are no outputs; our own memory is.
    writable = isinstance(a, Memory) or hasattr(a, "__setitem__") and not type(a).__module__.startswith("jax")
    return Description(shape, strides, dtype, device, (t.data or 0) + t.byte_offset, writable)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def importer(like: Any) -> Callable[[Any], Any]:
    """from_dlpack of the library that `like` is of."""
    if type(like).__module__.startswith(("jax", "jaxlib")):
        function: Callable[[Any], Any] = sys.modules["jax"].dlpack.from_dlpack
        return function
    for module in (getattr(like, "__array_namespace__", lambda: None)(),
                   sys.modules.get(type(like).__module__.split(".")[0])):
        if hasattr(module, "from_dlpack"):
            function = module.from_dlpack  # type: ignore[union-attr]
            return function
    raise Unsupported(f"the library of {type(like).__module__}.{type(like).__qualname__} has no "
                      "from_dlpack, so its arrays cannot be results")


# Memory that another library holds: address of its _Managed, and what keeps it alive.
_lent: dict[int, tuple[Any, ...]] = {}


def _give_back(managed: Any) -> None:
    _lent.pop(ctypes.addressof(managed.contents), None)


_give_back_c = _DELETER(_give_back)


def _drop_capsule(capsule: int) -> None:
    """Releases an unused capsule and its contents."""
    if _is_valid(capsule, b"dltensor"):
        _lent.pop(_raw_pointer_of(capsule, b"dltensor"), None)


_drop_capsule_c = ctypes.PYFUNCTYPE(None, c_void_p)(_drop_capsule)


class _Block:
    """Device memory, freed with the last reference."""

    def __init__(self, device: int, bytes_: int) -> None:
        self.device = device
        address = c_void_p()
        _c.check(_c.lib.fattn_device_malloc(device, bytes_, ctypes.byref(address)))
        self.address = address.value or 0

    def __del__(self, free: Any = _c.lib.fattn_device_free) -> None:  # as in fattn._plans
        if getattr(self, "address", 0):
            free(self.device, self.address)


class Memory:
    """An array in C order that other libraries take over by from_dlpack."""

    def __init__(self, shape: tuple[int, ...], dtype: str, device: str) -> None:
        from fattn._devices import handle
        backend, _, ordinal = device.partition(":")
        count = 1
        for n in shape:
            count *= n
        code, bits = _CODES[dtype]
        self.shape, self.code, self.bits = shape, code, bits
        self.device = ({"cpu": _CPU, "cuda": _CUDA, "hip": _ROCM}[backend], int(ordinal or 0))
        self.block = _Block(handle(device), count * bits // 8)
        self.address = self.block.address

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **_: Any) -> Any:
        """The work on it is done, so that any stream may read it."""
        n = len(self.shape)
        shape, strides = (c_int64 * n)(*self.shape), (c_int64 * n)(*contiguous_strides(self.shape))
        managed = _Managed(
            _Tensor(self.address, *self.device, n, self.code, self.bits, 1,
                    ctypes.cast(shape, POINTER(c_int64)), ctypes.cast(strides, POINTER(c_int64)), 0),
            None, _give_back_c)
        address = ctypes.addressof(managed)
        _lent[address] = (managed, shape, strides, self.block)
        return _new_capsule(address, b"dltensor", ctypes.cast(_drop_capsule_c, c_void_p))
