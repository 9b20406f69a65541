# SPDX-License-Identifier: Apache-2.0
"""Plans and their runs.

A problem is described once for each combination of shapes, strides, dtypes and options, and found again by
them; a run fills pointers into a fattn_buffers and calls fattn_execute().
"""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any, Callable, Sequence

from fattn import _c, _devices
from fattn._arrays import Kind, View, contiguous_strides, kind_of
from fattn._errors import InvalidArgument, InvalidShape, Unsupported
from fattn._problem import EXTRAS, Description, Options

_OFFSET = {name: getattr(_c.Buffers, name).offset for name, *_ in _c.Buffers._fields_}

pack_forward = struct.Struct("@5Q").pack_into   # q k v o lse, from _OFFSET["q"] on
pack_backward = struct.Struct("@12Q").pack_into  # q k v o lse dout dlse dq dk dv dbias dsink
_pack_one = struct.Struct("@Q").pack_into
_pack_positions = struct.Struct("@4q").pack_into
_pack_seed = struct.Struct("@2Q").pack_into
_AT_Q, _AT_POSITIONS, _AT_SEED = _OFFSET["q"], _OFFSET["q_offset"], _OFFSET["seed"]

_execute = _c.execute


class PlanHandle:
    """A fattn_plan, destroyed with the last reference."""

    def __init__(self, device: int, problem: int) -> None:
        self.address = 0
        self.room: Callable[[], Any] | None = None  # allocates a run's workspace and 255 bytes, to align it
        plan = ctypes.c_void_p()
        try:
            _c.check(_c.lib.fattn_plan_create(device, problem, ctypes.byref(plan)))
        except Unsupported as error:
            if _c.Problem.from_address(problem).dtype != _c.F64 or "f64" not in f"{error}":
                raise
            raise Unsupported('float64 is computed by device "reference" alone, slowly: convert q, k and v to float32, or '
                              f'call attention(..., device="reference") ({error})') from None
        assert plan.value is not None
        self.address = plan.value
        self.workspace = self.info().workspace_bytes

    # When the interpreter ends, names of this module may be gone before its objects.
    def __del__(self, destroy: Any = _c.lib.fattn_plan_destroy) -> None:
        if self.address:
            destroy(self.address)

    def __reduce__(self) -> Any:  # of copies and pickles: each would destroy the one plan
        raise TypeError("a plan cannot be copied or pickled: make it again from its arrays and options")

    def info(self) -> Any:
        info = _c.PlanInfo()
        info.struct_size = ctypes.sizeof(info)
        _c.check(_c.lib.fattn_plan_get_info(self.address, ctypes.byref(info)))
        return info

    def describe(self) -> str:
        size = _c.lib.fattn_plan_describe(self.address, None, 0) + 1
        text = ctypes.create_string_buffer(size)
        _c.lib.fattn_plan_describe(self.address, text, size)
        return text.value.decode("utf-8", "replace")


class _Workspace:
    """Host memory for runs, one run at a time."""

    def __init__(self, device: int, size: int) -> None:
        self.device, self.size, self.address = device, size, 0
        address = ctypes.c_void_p()
        _c.check(_c.lib.fattn_device_malloc(device, size, ctypes.byref(address)))
        self.address = address.value or 0

    def __del__(self, free: Any = _c.lib.fattn_device_free) -> None:
        if self.address:
            free(self.device, self.address)


# Idle workspaces, as many as there have been concurrent runs. Large ones are not kept.
_workspaces: list[_Workspace] = []
_KEPT_BYTES = 128 << 20


class Prepared:
    """A described problem, its plans (one for each alignment of pointers), and fattn_buffers to fill."""

    def __init__(self, options: Options, kind: Kind, views: dict[str, View]) -> None:
        description = Description(options, views, kind.immediate)
        self.request = options, kind, views
        self.lse_shape = description.lse_shape
        self.made = [made._replace(new=kind.maker(made, views["q"].device)) for made in
                     (description.forward() if options.op == _c.FORWARD else description.backward())]
        self.new: list[Any] = [made.new for made in self.made]
        self.reaches = [view.reach(name) for name, view in views.items()]
        self.reaches_of_extras = self.reaches[3:]  # of a forward without `out`
        self.reach_of_qkv = tuple([number for needed, size, _ in self.reaches[:3] for number in (needed, size)])
        # Of a backward: whether it makes dq, dk and dv alone.
        self.makes_three = [made.name for made in self.made] == ["dq", "dk", "dv"]
        self.problem, self.memory = description.problem, description.memory
        self.extras = [_OFFSET[name] for name, *_ in EXTRAS if name in views]
        self.seed_place = self.extras.index(_OFFSET["seed_ptr"]) if "seed_ptr" in views else -1
        self.device = device_of(options.device, views["q"].device)
        info = _devices.info_of(self.device)
        self.host_memory = info.host_memory
        # Arrays in host memory and a device that does not read it: the one-shot call copies.
        self.staged = not info.host_memory and views["q"].device == "cpu"
        self.takes_workspace = kind.allocates and not info.host_memory and not self.staged
        self.stream = None if self.host_memory else kind.streams_of(views["q"].device)
        self.plans: dict[int, PlanHandle] = {}
        self.frames: list[tuple[bytearray, int]] = []
        self.features: int = self.problem.features
        self.again = False  # whether it was looked up before; set by the caller
        self.differentiable: set[int] = set()  # sets of gradients known to be supported; filled by the caller
        self.aligned = self.plan(16)

    def backward(self, of: Options | None = None) -> Prepared:
        """The backward of a described forward; `of` has its options, by default with gradients of all inputs."""
        options, kind, views = self.request
        q, o = views["q"], next(made for made in self.made if made.name == "o")
        dense = View(o.final, o.strides, o.dtype, q.device)
        rows = self.lse_shape
        statistics = "float64" if q.dtype == "float64" else "float32"
        outputs = _c.OUT_DQ | _c.OUT_DK | _c.OUT_DV
        outputs |= _c.OUT_DBIAS if "bias" in views else 0
        outputs |= _c.OUT_DSINK if "sink" in views else 0
        return Prepared(
            of or options._replace(op=_c.BACKWARD, outputs=outputs, return_lse=False, out_dtype=None), kind,
            views | {"o": dense, "dout": dense,
                     "lse": View(rows, contiguous_strides(rows), statistics, q.device)})

    def plan(self, alignment: int) -> PlanHandle:
        """The plan for pointers that are multiples of alignment."""
        plan = self.plans.get(alignment)
        if plan is None:
            problem = self.problem
            if problem.pointer_alignment != alignment:
                problem, _memory = _c.new_struct(_c.Problem)
                ctypes.memmove(ctypes.addressof(problem), ctypes.addressof(self.problem),
                               ctypes.sizeof(problem))
                problem.pointer_alignment = alignment
            plan = PlanHandle(self.device, ctypes.addressof(problem))
            if self.takes_workspace:
                kind, views = self.request[1:]
                plan.room = kind.maker_of_bytes(plan.workspace + 255, views["q"].device)
            plan = self.plans.setdefault(alignment, plan)
        return plan

    def frame(self) -> tuple[bytearray, int]:
        buffers, memory = _c.new_struct(_c.Buffers, _c.lib.fattn_buffers_init)
        return memory, ctypes.addressof(buffers)

    def run(self, kind: Kind, like: Any, pack: Callable[..., None], pointers: Sequence[int],
            aligned: int, extras: Sequence[int], positions: tuple[int, int, int, int] | None,
            seed: tuple[int, int] | None) -> None:
        """Executes. `aligned` has the bits of all tensors' addresses, `like` tells device and stream."""
        plan = self.aligned if not aligned & 15 else self.plan(aligned & -aligned)
        try:
            frame = self.frames.pop()
        except IndexError:
            frame = self.frame()
        memory, address = frame
        pack(memory, _AT_Q, *pointers)
        if extras:
            for offset, pointer in zip(self.extras, extras):
                _pack_one(memory, offset, pointer)
            if self.seed_place >= 0:
                _pack_one(memory, _OFFSET["offset_ptr"], extras[self.seed_place] + 8)
        if positions is not None:
            _pack_positions(memory, _AT_POSITIONS, *positions)
        if seed is not None:
            _pack_seed(memory, _AT_SEED, *seed)
        size = plan.workspace
        if self.host_memory:
            if size == 0:
                status = _execute(plan.address, address, None, None)
            else:
                try:
                    workspace = _workspaces.pop()
                except IndexError:
                    workspace = _Workspace(self.device, size)
                if workspace.size < size:
                    workspace = _Workspace(self.device, size)
                status = _execute(plan.address, address, workspace.address, None)
                if workspace.size <= _KEPT_BYTES:
                    _workspaces.append(workspace)
        elif self.staged:
            status = _c.lib.fattn_attention(self.device, ctypes.addressof(self.problem), address, None)
        else:
            stream = kind.stream(like) if self.stream is None else self.stream()
            if self.takes_workspace and size > 0:
                block = kind.empty((size + 255,), "uint8", like) if plan.room is None else plan.room()
                status = _execute(plan.address, address, (kind.pointer(block) + 255) & -256, stream)
            else:
                status = _execute(plan.address, address, None, stream)
        if status:
            raise _c.fail(status)
        self.frames.append(frame)


def device_of(wanted: str | None, where: str) -> int:
    """The device for arrays in memory of `where`; wanted is the caller's choice."""
    if wanted is None:
        wanted = _devices.host_spec() if where == "cpu" else where
    elif where != "cpu":
        if wanted not in (where, where.partition(":")[0]):
            raise InvalidArgument(f"device is {wanted!r}, but the arrays are on {where}")
        wanted = where
    return _devices.handle(wanted)


# --- Finding prepared problems again --------------------------------------------------------------

_LIMIT = 512
_cache: dict[Any, Prepared] = {}
_lock = threading.Lock()
also_cleared: list[dict[Any, Any]] = []  # other caches of plans


def cache_clear() -> None:
    """Forgets all cached plans and frees idle workspaces. Calls that are running keep theirs."""
    with _lock:
        _cache.clear()
    for other in also_cleared:
        other.clear()
    _workspaces.clear()
    _c.lib.fattn_cache_clear()


def remember(key: Any, prepared: Prepared) -> None:
    """Adds an entry and removes the oldest: dictionaries keep their order, and look-ups need no lock."""
    with _lock:
        while len(_cache) >= _LIMIT:
            _cache.pop(next(iter(_cache)))
        _cache[key] = prepared


def _hint(layout: str, views: dict[str, View]) -> str:
    """What the caller of a function of fattn or fattn.torch may have meant by shapes that are refused."""
    q, k = views["q"].shape, views["k"].shape
    for name in ("q", "k"):
        if len(views[name].shape) == 3 and f"cu_seqlens_{name}" not in views:
            return f"; for packed sequences attention_varlen() with cu_seqlens_{name}"
    if layout == "bshd" and len(q) == len(k) == 4 and q[2] % max(k[2], 1) and k[1] and q[1] % k[1] == 0:
        return (f": shapes {q} and {k} are read as (batch, sequence, head, channel); for (batch, head, sequence, channel) "
                'pass layout="bhsd"')
    return ""


def prepare(kind: Kind, options: tuple[Any, ...], arrays: dict[str, Any], key: Any = None) -> Prepared:
    """Describes a problem. arrays has q, k, v, those of EXTRAS and those outputs that were given, by name."""
    views: dict[str, View] = {}
    for name, array in arrays.items():
        if kind_of(array, name) is not kind:
            raise InvalidArgument(f"{name} is a {kind_of(array).name} array, q a {kind.name} array")
        views[name] = kind.view_for_planning(array, name)
    described = Options(*options)
    try:
        prepared = Prepared(described, kind, views)
    except InvalidShape as error:
        raise InvalidShape(f"{error}{_hint(described.layout, views)}") from None
    if key is not None:
        remember(key, prepared)
    return prepared
