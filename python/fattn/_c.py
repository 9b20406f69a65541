# SPDX-License-Identifier: Apache-2.0
"""The C interface for ctypes: the constants, structs and functions of fattn.h.

Structs are written as in the header, field by field; tests/python/test_abi.py compares them with what a
C compiler makes of it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import (POINTER, c_char, c_char_p, c_double, c_int, c_int64, c_size_t, c_uint32,
                    c_uint64, c_void_p)
from typing import Any

from fattn._errors import BY_STATUS, Error

VERSION = "0.1.0"

FORWARD, BACKWARD = 1, 2
F32, F16, BF16, F64, E4M3 = 1, 2, 3, 4, 5
STRIDED = 3
BOTTOM_RIGHT, TOP_LEFT = 1, 2

CAUSAL, WINDOW, SCALE, SOFTCAP, BIAS, ALIBI, MASK, BLOCK_MASK = (1 << i for i in range(8))
(SINK, DROPOUT, CU_SEQLENS_Q, CU_SEQLENS_K, SEQUSED_Q, SEQUSED_K, PAGED, POSITIONS, DLSE, ACCUMULATE,
 DETERMINISTIC, BATCH_INVARIANT, CHECKED, SEQSTART_K, ALIBI_BIAS, CHUNK, DESCALE) = (
     1 << i for i in range(8, 25))
OUT_O, OUT_LSE, OUT_DQ, OUT_DK, OUT_DV, OUT_DBIAS, OUT_DSINK = (1 << i for i in range(7))
SCORES, PROBABILITIES = 1, 2


class Strides(ctypes.Structure):
    _fields_ = [("batch", c_int64), ("seq", c_int64), ("head", c_int64)]


class Problem(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("op", c_int), ("dtype", c_int), ("dtype_o", c_int), ("dtype_bias", c_int),
        ("layout", c_int), ("anchor", c_int),
        ("features", c_uint64), ("outputs", c_uint32), ("reserved", c_uint32),
        ("batch", c_int64), ("heads_q", c_int64), ("heads_k", c_int64),
        ("seqlen_q", c_int64), ("seqlen_k", c_int64), ("dim", c_int64), ("dim_v", c_int64),
        ("total_q", c_int64), ("total_k", c_int64),
        ("page_size", c_int64), ("num_pages", c_int64), ("max_pages", c_int64),
        ("block_table_stride", c_int64),
        ("q", Strides), ("k", Strides), ("v", Strides), ("o", Strides),
        ("dout", Strides), ("dq", Strides), ("dk", Strides), ("dv", Strides),
        ("scale", c_double), ("softcap", c_double), ("dropout_p", c_double),
        ("window_left", c_int64), ("window_right", c_int64),
        ("bias_stride", c_int64 * 4), ("mask_stride", c_int64 * 4),
        ("block_mask_stride", c_int64 * 4), ("dbias_stride", c_int64 * 4),
        ("block_m", c_int64), ("block_n", c_int64), ("alibi_batch_stride", c_int64),
        ("batch_offset", c_int64), ("head_offset", c_int64),
        ("pointer_alignment", c_int64),
        ("dtype_kv", c_int), ("dtype_v", c_int), ("chunk", c_int64),
        ("descale_stride", c_int64 * 2),
    ]


class Buffers(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("q", c_void_p), ("k", c_void_p), ("v", c_void_p), ("o", c_void_p), ("lse", c_void_p),
        ("dout", c_void_p), ("dlse", c_void_p), ("dq", c_void_p), ("dk", c_void_p), ("dv", c_void_p),
        ("dbias", c_void_p), ("dsink", c_void_p),
        ("bias", c_void_p), ("mask", c_void_p), ("block_mask", c_void_p), ("alibi_slopes", c_void_p),
        ("sink", c_void_p),
        ("cu_seqlens_q", c_void_p), ("cu_seqlens_k", c_void_p), ("seqused_q", c_void_p),
        ("seqused_k", c_void_p), ("block_table", c_void_p),
        ("q_offset", c_int64), ("k_offset", c_int64), ("whole_q", c_int64), ("whole_k", c_int64),
        ("q_offsets", c_void_p), ("k_offsets", c_void_p), ("wholes_q", c_void_p),
        ("wholes_k", c_void_p),
        ("seed", c_uint64), ("offset", c_uint64), ("seed_ptr", c_void_p), ("offset_ptr", c_void_p),
        ("seqstart_k", c_void_p), ("k_descale", c_void_p), ("v_descale", c_void_p)]


class DeviceInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("backend", c_char * 16), ("name", c_char * 96),
        ("isa", c_char * 32), ("ordinal", c_int), ("host_memory", c_int), ("units", c_int),
        ("fast_memory", c_int64), ("total_memory", c_int64)]


class DeviceOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("threads", c_int64), ("isa", c_char_p), ("cpus", c_char_p),
        ("engine", c_int), ("reserved", c_uint32), ("parallel_for", c_void_p),
        ("parallel_user", c_void_p), ("allocate", c_void_p), ("release", c_void_p),
        ("allocator_user", c_void_p)]


class PlanInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("kernel", c_char * 64), ("br", c_int64), ("bc", c_int64),
        ("splits", c_int64), ("work_items", c_int64), ("workspace_bytes", c_int64),
        ("predicted_bytes", c_double), ("standard_bytes", c_double),
        ("lower_bound_bytes", c_double), ("flops", c_double), ("effective_dropout", c_double)]


class MergeArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("batch", c_int64), ("heads", c_int64), ("seqlen", c_int64), ("dim_v", c_int64),
        ("o1", c_void_p), ("lse1", c_void_p), ("o2", c_void_p), ("lse2", c_void_p),
        ("o", c_void_p), ("lse", c_void_p),
        ("o1_stride", Strides), ("o2_stride", Strides), ("o_stride", Strides)]


class InspectArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("what", c_int), ("reserved", c_uint32), ("to", c_void_p),
        ("stride", c_int64 * 4)]


class DropoutArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("batch", c_int64), ("heads", c_int64), ("seqlen_q", c_int64), ("seqlen_k", c_int64),
        ("batch_offset", c_int64), ("head_offset", c_int64), ("q_offset", c_int64),
        ("k_offset", c_int64),
        ("p", c_double), ("seed", c_uint64), ("offset", c_uint64), ("keep", c_void_p)]


# Name, result, parameters. Streams, devices and plans are addresses.
_FUNCTIONS: list[tuple[str, Any, list[Any]]] = [
    ("fattn_last_reason", c_char_p, []),
    ("fattn_version", c_char_p, []),
    ("fattn_problem_init", None, [c_void_p]),
    ("fattn_buffers_init", None, [c_void_p]),
    ("fattn_device_open", c_int, [c_char_p, POINTER(c_void_p)]),
    ("fattn_device_open_with", c_int, [c_char_p, c_void_p, POINTER(c_void_p)]),
    ("fattn_device_options_init", None, [c_void_p]),
    ("fattn_device_close", None, [c_void_p]),
    ("fattn_device_count", c_int, [c_char_p]),
    ("fattn_backend_name", c_char_p, [c_int]),
    ("fattn_device_get_info", c_int, [c_void_p, POINTER(DeviceInfo)]),
    ("fattn_device_malloc", c_int, [c_void_p, c_size_t, POINTER(c_void_p)]),
    ("fattn_device_free", c_int, [c_void_p, c_void_p]),
    ("fattn_stream_synchronize", c_int, [c_void_p, c_void_p]),
    ("fattn_plan_create", c_int, [c_void_p, c_void_p, POINTER(c_void_p)]),
    ("fattn_plan_destroy", None, [c_void_p]),
    ("fattn_plan_get_info", c_int, [c_void_p, POINTER(PlanInfo)]),
    ("fattn_plan_describe", c_size_t, [c_void_p, c_char_p, c_size_t]),
    ("fattn_execute", c_int, [c_void_p, c_void_p, c_void_p, c_void_p]),
    ("fattn_attention", c_int, [c_void_p, c_void_p, c_void_p, c_void_p]),
    ("fattn_inspect_args_init", None, [c_void_p]),
    ("fattn_inspect", c_int, [c_void_p, c_void_p, c_void_p, c_void_p]),
    ("fattn_merge", c_int, [c_void_p, POINTER(MergeArgs), c_void_p]),
    ("fattn_cache_clear", None, []),
    ("fattn_dropout_mask", c_int, [c_void_p, POINTER(DropoutArgs), c_void_p]),
]


def find(name: str) -> str:
    """The wheel's library, next to the package or, on systems with a separate folder for binaries (lib64),
    elsewhere on Python's path; otherwise the one that the system's loader finds."""
    site = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for place in (site, *sys.path):
        folder = os.path.join(place, ".fattn.mesonpy.libs")
        if os.path.isdir(folder):
            for file in sorted(os.listdir(folder)):
                if file.startswith(name):
                    return os.path.join(folder, file)
    return name


def _load() -> ctypes.CDLL:
    path = find("libfattn.so.0")
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"fattn: cannot load its library: {error}. `pip install .` in a checkout builds it into the "
                          "package; without, LD_LIBRARY_PATH must have its folder") from error
    for name, result, parameters in _FUNCTIONS:
        function = getattr(library, name)
        function.restype, function.argtypes = result, parameters
    version = library.fattn_version().decode()
    if version != VERSION:
        raise ImportError(f"fattn: {path} is version {version}, this package is of {VERSION}")
    return library


lib = _load()
execute = lib.fattn_execute


def fail(status: int) -> Error:
    """The exception of a status, with this thread's reason."""
    text = lib.fattn_last_reason().decode("utf-8", "replace")
    return BY_STATUS.get(status, Error)(text)


def check(status: int) -> None:
    """Raises unless the status is FATTN_OK."""
    if status:
        raise fail(status)


# A later library of the same version's series may know longer structs and fills all that it knows.
_ROOM = 4096


def new_struct(kind: Any, init: Any = None) -> tuple[Any, bytearray]:
    """A zeroed struct, or one with the library's defaults, and its memory."""
    memory = bytearray(_ROOM)
    struct = kind.from_buffer(memory)
    if init is not None:
        init(ctypes.addressof(struct))
    struct.struct_size = ctypes.sizeof(kind)
    return struct, memory
