# SPDX-License-Identifier: Apache-2.0
"""From arrays and options to a fattn_problem.

The library validates problems. This module only checks what a fattn_problem cannot express: that arrays fit
together.
"""

from __future__ import annotations

from operator import index
from typing import Any, NamedTuple

from fattn import _c
from fattn._arrays import CACHED, FLOATS, Made, View, contiguous_strides
from fattn._errors import InvalidArgument, InvalidShape, InvalidStride

ANCHORS = {"bottom_right": _c.BOTTOM_RIGHT, "top_left": _c.TOP_LEFT}


class Options(NamedTuple):
    """What a plan depends on besides its arrays. The public functions build it as a plain tuple."""

    op: int = _c.FORWARD
    causal: bool = False
    window: tuple[int, int] | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    anchor: str = "bottom_right"
    layout: str = "bshd"
    out_dtype: Any = None            # forward without `out`; dtype_name() has its name
    return_lse: bool = False         # forward: lse is an output
    outputs: int = 0                 # backward: FATTN_OUT_*
    features: int = 0                # bits without a value: DETERMINISTIC, POSITIONS ...
    max_seqlen_q: int | None = None  # packed sequences
    max_seqlen_k: int | None = None  # packed or paged keys
    block_size: tuple[int, int] | None = None
    batch_offset: int = 0
    head_offset: int = 0
    device: str | None = None
    equal_heads: bool = False        # refuse groups of heads
    chunk: int | None = None


# Arrays of a call besides q k v o lse and gradients, in the order in which runs take them: the field of
# fattn_buffers, its feature, its dtype (None: checked where it is described).
EXTRAS: list[tuple[str, int, str | None]] = [
    ("bias", _c.BIAS, None),
    ("mask", _c.MASK, None),
    ("block_mask", _c.BLOCK_MASK, None),
    ("alibi_slopes", _c.ALIBI, None),
    ("sink", _c.SINK, None),
    ("cu_seqlens_q", _c.CU_SEQLENS_Q, "int32"),
    ("cu_seqlens_k", _c.CU_SEQLENS_K, "int32"),
    ("seqused_q", _c.SEQUSED_Q, "int32"),
    ("seqused_k", _c.SEQUSED_K, "int32"),
    ("block_table", _c.PAGED, "int32"),
    ("seqstart_k", _c.SEQSTART_K, "int32"),
    ("q_offsets", _c.POSITIONS, "int64"),
    ("k_offsets", _c.POSITIONS, "int64"),
    ("wholes_q", _c.POSITIONS, "int64"),
    ("wholes_k", _c.POSITIONS, "int64"),
    ("seed_ptr", 0, None),
    ("k_descale", _c.DESCALE, None),
    ("v_descale", _c.DESCALE, None),
]
EXTRA_FEATURE = {name: feature for name, feature, _ in EXTRAS}
_EXTRA_DTYPE = {name: dtype for name, _, dtype in EXTRAS}


def descale_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides along (batch, head) of a k_descale or v_descale that is broadcast there."""
    return (0, 0, *[0 if n == 1 else s for n, s in zip(shape, strides)])[-2:]


class Box(NamedTuple):
    """An array as attention sees it: sizes and strides of (batch or page, sequence, head, channel)."""

    batch: int
    seq: int
    heads: int
    dim: int
    strides: tuple[int, int, int]


def box_of(name: str, view: View, layout: str, packed: bool) -> Box:
    rank = 3 if packed else 4
    if len(view.shape) != rank:
        axes = {"bshd": "batch, sequence, head, channel", "bhsd": "batch, head, sequence, channel"}
        wanted = axes[layout].replace("batch, ", "") if packed else axes[layout]
        raise InvalidShape(f"{name} has shape {view.shape}, rank {len(view.shape)}: "
                           f"rank {rank} is needed, ({wanted})")
    shape, strides = view.shape, view.strides
    if packed:
        shape, strides = (1, *shape), (0, *strides)
    if layout == "bhsd":
        shape = (shape[0], shape[2], shape[1], shape[3])
        strides = (strides[0], strides[2], strides[1], strides[3])
    if strides[3] != 1 and shape[3] > 1:
        raise InvalidStride(f"{name} has channels {strides[3]} elements apart: its last axis must be "
                            "contiguous")
    return Box(shape[0], shape[1], shape[2], shape[3], (strides[0], strides[1], strides[2]))


def integer(x: Any, name: str, unsigned: bool = False) -> int:
    """x as an int that fits a field of the library. ctypes would take larger numbers modulo 2^64."""
    try:
        value = index(x)
    except TypeError:
        raise InvalidArgument(f"{name} is {x!r}, not an integer") from None
    least, past, bounds = (0, 1 << 64, "0..2^64-1") if unsigned else (-1 << 63, 1 << 63, "-2^63..2^63-1")
    if not least <= value < past:
        raise InvalidArgument(f"{name} is {value}, not in {bounds}")
    return value


def real(x: Any, name: str) -> float:
    """x as a float."""
    try:
        if isinstance(x, str):  # which float() would read
            raise TypeError
        return float(x)
    except (TypeError, ValueError):
        raise InvalidArgument(f"{name} is {x!r}, not a number") from None
    except OverflowError:
        raise InvalidArgument(f"{name} is an integer too large for a float") from None


def _same(name: str, what: str, got: Any, other: str, wanted: Any) -> None:
    if got != wanted:
        raise InvalidShape(f"{name} has {what} {got}, {other} {wanted}")


def _broadcast(name: str, view: View, extents: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of an array that is broadcast to extents, aligned at its last axis."""
    if len(view.shape) > len(extents):
        raise InvalidShape(f"{name} has shape {view.shape}, rank {len(view.shape)}: "
                           f"at most {len(extents)} axes are read")
    missing = len(extents) - len(view.shape)
    strides = [0] * missing
    for axis, (n, s) in enumerate(zip(view.shape, view.strides), missing):
        if n != 1 and n != extents[axis]:
            raise InvalidShape(f"{name} has shape {view.shape}, which does not broadcast to {extents}")
        strides.append(0 if n == 1 else s)
    return tuple(strides)


def _contiguous_vector(name: str, view: View, extent: int) -> None:
    if view.shape != (extent,):
        raise InvalidShape(f"{name} has shape {view.shape}, not ({extent},)")
    if extent > 1 and view.strides != (1,):
        raise InvalidStride(f"{name} has elements {view.strides[0]} apart: it must be contiguous")


def _check_dtype(name: str, view: View, *allowed: str) -> None:
    if view.dtype not in allowed:
        raise InvalidArgument(f"{name} has dtype {view.dtype}, not {' or '.join(allowed)}")


def check_layout(layout: str) -> str:
    """layout; raises InvalidArgument if it is unknown."""
    if layout not in ("bshd", "bhsd"):
        raise InvalidArgument(f'layout is {layout!r}, neither "bshd" nor "bhsd"')
    return layout


def check_anchor(anchor: str) -> str:
    """anchor; raises InvalidArgument if it is unknown."""
    if anchor not in ANCHORS:
        raise InvalidArgument(f'anchor is {anchor!r}, neither "bottom_right" nor "top_left"')
    return anchor


class Description:
    """A problem under construction."""

    def __init__(self, options: Options, views: dict[str, View], swaps: bool) -> None:
        self.o, self.swaps = options, swaps
        self.views = views
        self.problem, self.memory = _c.new_struct(_c.Problem, _c.lib.fattn_problem_init)
        q = views["q"]
        if q.dtype not in FLOATS:
            raise InvalidArgument(f"q has dtype {q.dtype}, not one of {', '.join(FLOATS)}")
        for name, view in views.items():
            if view.device != q.device:
                raise InvalidArgument(f"{name} is on device {view.device}, q on {q.device}")
        self.dtype = q.dtype
        self.statistics = "float64" if q.dtype == "float64" else "float32"
        check_layout(options.layout)
        check_anchor(options.anchor)
        self.fill_sizes()
        self.fill_options()
        self.fill_extras()

    def fill_sizes(self) -> None:
        p, o, views = self.problem, self.o, self.views
        packed_q = "cu_seqlens_q" in views
        paged = "block_table" in views
        packed_k = "cu_seqlens_k" in views and not paged
        q = self.q = box_of("q", views["q"], o.layout, packed_q)
        k = self.k = box_of("k", views["k"], o.layout, packed_k)
        v = self.v = box_of("v", views["v"], o.layout, packed_k)
        for name in ("k", "v"):
            dtype = views[name].dtype
            if dtype in CACHED and (dtype == "float64") != (self.dtype == "float64"):
                raise InvalidArgument(f"{name} has dtype {dtype}, q {self.dtype}: float64 does not mix with other types")
            _check_dtype(name, views[name], *[n for n in CACHED if (n == "float64") == (self.dtype == "float64")])
        _same("k", "channels", k.dim, "q", q.dim)
        _same("v", "batch size" if not paged else "pages", v.batch, "k", k.batch)
        _same("v", "length", v.seq, "k", k.seq)
        _same("v", "heads", v.heads, "k", k.heads)
        if o.equal_heads:
            _same("k", "heads", k.heads, "q", q.heads)
        batch = q.batch
        if packed_q:
            batch = len_of(views["cu_seqlens_q"], "cu_seqlens_q")
        if "cu_seqlens_k" in views:
            keys = len_of(views["cu_seqlens_k"], "cu_seqlens_k")
            if packed_q or paged:
                _same("cu_seqlens_k", "sequences", keys, "cu_seqlens_q" if packed_q else "q", batch)
            batch = keys
            if not packed_q:
                _same("cu_seqlens_k", "sequences", keys, "q", q.batch)
        elif not paged:
            _same("k", "batch size", k.batch, "q", batch)
        p.op, p.dtype = o.op, FLOATS[self.dtype][0]
        p.dtype_kv, p.dtype_v = CACHED[views["k"].dtype][0], CACHED[views["v"].dtype][0]
        p.layout, p.anchor = _c.STRIDED, ANCHORS[o.anchor]
        p.batch, p.heads_q, p.heads_k = batch, q.heads, k.heads
        p.dim, p.dim_v = q.dim, v.dim
        p.seqlen_q, p.seqlen_k = q.seq, k.seq
        if packed_q:
            if o.max_seqlen_q is None:
                raise InvalidArgument("max_seqlen_q is needed with cu_seqlens_q")
            self.set("seqlen_q", o.max_seqlen_q, "max_seqlen_q")
            p.total_q = q.seq
        if packed_k:
            if o.max_seqlen_k is None:
                raise InvalidArgument("max_seqlen_k is needed with cu_seqlens_k")
            self.set("seqlen_k", o.max_seqlen_k, "max_seqlen_k")
            p.total_k = k.seq
        if paged:
            table = views["block_table"]
            if len(table.shape) != 2 or table.shape[0] != batch:
                raise InvalidShape(f"block_table has shape {table.shape}, not ({batch}, pages)")
            if table.shape[1] > 1 and table.strides[1] != 1:
                raise InvalidStride("block_table must be contiguous in its last axis")
            p.page_size, p.num_pages, p.max_pages = k.seq, k.batch, table.shape[1]
            if batch > 1 and table.shape[1] > 0:
                p.block_table_stride = table.strides[0]
            self.set("seqlen_k", p.max_pages * k.seq if o.max_seqlen_k is None else o.max_seqlen_k, "max_seqlen_k")
        if not packed_q and o.max_seqlen_q is not None:
            raise InvalidArgument("max_seqlen_q is given without cu_seqlens_q")
        if not packed_k and not paged and o.max_seqlen_k is not None:
            raise InvalidArgument("max_seqlen_k is given without cu_seqlens_k or block_table")
        for name, box in (("q", q), ("k", k), ("v", v)):
            self.set_strides(name, box.strides)
        self.batch, self.packed_q = batch, packed_q
        rows = ((q.seq,) if packed_q else (q.batch, q.seq))
        self.o_shape = (*rows, q.heads, v.dim) if o.layout == "bshd" else (
            (q.heads, q.seq, v.dim) if packed_q else (q.batch, q.heads, q.seq, v.dim))
        self.lse_shape = (q.heads, q.seq) if packed_q else (q.batch, q.heads, q.seq)

    def set(self, field: str, value: Any, name: str = "") -> None:
        """Sets a field of the problem that is a number; `name` is the option's, if it differs from the field's."""
        read = integer if isinstance(getattr(self.problem, field), int) else real
        setattr(self.problem, field, read(value, name or field))

    def set_strides(self, name: str, strides: tuple[int, int, int]) -> None:
        field = getattr(self.problem, name)
        field.batch, field.seq, field.head = strides

    def fill_options(self) -> None:
        p, o = self.problem, self.o
        features = o.features
        if o.causal not in (True, False):
            raise InvalidArgument(f"causal is {o.causal!r}, neither True nor False")
        if o.causal:
            features |= _c.CAUSAL
        if o.window is not None:
            features |= _c.WINDOW
            self.set("window_left", o.window[0])
            self.set("window_right", o.window[1])
        if o.scale is not None:
            features |= _c.SCALE
            self.set("scale", o.scale)
        if o.softcap is not None:
            features |= _c.SOFTCAP
            self.set("softcap", o.softcap)
        if o.dropout_p != 0:
            features |= _c.DROPOUT
            self.set("dropout_p", o.dropout_p)
            self.set("batch_offset", o.batch_offset)
            self.set("head_offset", o.head_offset)
        if o.block_size is not None and "block_mask" not in self.views:
            raise InvalidArgument("block_size is given without block_mask")
        if o.chunk is not None:
            features |= _c.CHUNK
            self.set("chunk", o.chunk)
        p.features = features

    def fill_extras(self) -> None:
        p, views, q = self.problem, self.views, self.q
        scores = (self.batch, q.heads, p.seqlen_q, p.seqlen_k)
        for name, view in views.items():
            feature = EXTRA_FEATURE.get(name)
            if feature is None:
                continue
            p.features |= feature
            dtype = _EXTRA_DTYPE[name]
            if dtype is not None:
                _check_dtype(name, view, dtype)
            if name == "bias":
                narrow = {} if self.dtype == "float64" else {"float16": 0, "bfloat16": 0}
                _check_dtype(name, view, *({self.statistics: 0} | narrow))
                p.dtype_bias = FLOATS[view.dtype][0]
                p.bias_stride[:] = _broadcast(name, view, scores)
            elif name == "mask":
                _check_dtype(name, view, "bool", "uint8", "int8")
                p.mask_stride[:] = _broadcast(name, view, scores)
            elif name == "block_mask":
                _check_dtype(name, view, "bool", "uint8", "int8")
                if self.o.block_size is None:
                    raise InvalidArgument("block_size is needed with block_mask")
                self.set("block_m", self.o.block_size[0])
                self.set("block_n", self.o.block_size[1])
                m, n = max(p.block_m, 1), max(p.block_n, 1)
                p.block_mask_stride[:] = _broadcast(
                    name, view, (*scores[:2], -(-scores[2] // m), -(-scores[3] // n)))
            elif name == "alibi_slopes":
                _check_dtype(name, view, self.statistics)
                self.fill_alibi(view)
            elif name == "sink":
                _check_dtype(name, view, self.statistics)
                _contiguous_vector(name, view, q.heads)
            elif name in ("k_descale", "v_descale"):
                _check_dtype(name, view, self.statistics)
                self.fill_descale(name, view)
            elif name == "seed_ptr":
                _check_dtype("seed", view, "int64", "uint64")
                _contiguous_vector("seed", view, 2)
            elif name in ("cu_seqlens_q", "cu_seqlens_k"):
                _contiguous_vector(name, view, self.batch + 1)
            elif name != "block_table":
                _contiguous_vector(name, view, self.batch)

    def fill_alibi(self, view: View) -> None:
        heads = self.q.heads
        if view.shape == (heads,):
            _contiguous_vector("alibi_slopes", view, heads)
        elif view.shape == (self.batch, heads):
            if heads > 1 and view.strides[1] != 1:
                raise InvalidStride("alibi_slopes must be contiguous in its last axis")
            self.problem.alibi_batch_stride = view.strides[0] if self.batch > 1 else 0
        else:
            raise InvalidShape(f"alibi_slopes has shape {view.shape}, neither ({heads},) nor "
                               f"({self.batch}, {heads})")

    def fill_descale(self, name: str, view: View) -> None:
        # A number was given the shape of the other factor.
        strides = _broadcast("k_descale or v_descale", view, (self.batch, self.k.heads))
        if name == "v_descale" and strides != tuple(self.problem.descale_stride):
            raise InvalidStride(f"v_descale has strides {strides} along (batch, head), k_descale "
                                f"{tuple(self.problem.descale_stride)}: they must be equal")
        self.problem.descale_stride[:] = strides

    def check_result(self, what: str, dtype: str) -> None:
        allowed = dict.fromkeys((self.dtype, self.statistics))
        if dtype not in allowed:
            raise InvalidArgument(f"{what} dtype {dtype}, not {' or '.join(allowed)}")

    def operand(self, name: str, shape: tuple[int, ...], dtype: str, output: bool) -> None:
        """An array with a required shape: the caller's output, or an input of backward."""
        view = self.views[name]
        if view.shape != shape:
            raise InvalidShape(f"{name} has shape {view.shape}, not {shape}")
        _check_dtype(name, view, dtype)
        if output and not view.writable:
            raise InvalidArgument(f"{name} is read-only")

    def tensor(self, name: str, shape: tuple[int, ...], dtype: str, output: bool) -> None:
        """The same for a tensor with strides."""
        self.operand(name, shape, dtype, output)
        self.set_strides(name, box_of(name, self.views[name], self.o.layout, len(shape) == 3).strides)

    def statistic(self, name: str, shape: tuple[int, ...], output: bool) -> None:
        """The same for lse, dlse or dsink, which must be contiguous."""
        self.operand(name, shape, self.statistics, output)
        if not _is_contiguous(self.views[name]):
            raise InvalidStride(f"{name} has strides {self.views[name].strides}: it must be contiguous")

    def make(self, name: str, shape: tuple[int, ...], dtype: str) -> Made:
        """An output that the caller did not give, contiguous as (batch, sequence, head, channel) in any layout: models
        next join the heads of a row, which then copies nothing."""
        swapped = self.swaps and self.o.layout == "bhsd" and len(shape) == 4
        final = shape
        if swapped:
            shape = (shape[0], shape[2], shape[1], shape[3])
        strides = contiguous_strides(shape)
        if swapped:
            strides = (strides[0], strides[2], strides[1], strides[3])
        box = box_of(name, View(final, strides, dtype, ""), self.o.layout, len(shape) == 3)
        self.set_strides(name, box.strides)
        return Made(name, dtype, shape, final, strides, swapped)

    def make_statistic(self, name: str, shape: tuple[int, ...]) -> Made:
        return Made(name, self.statistics, shape, shape, contiguous_strides(shape))

    def forward(self) -> list[Made]:
        """Fills in the fields of a forward; returns the outputs to allocate."""
        p, o, made = self.problem, self.o, []
        p.outputs = _c.OUT_O | (_c.OUT_LSE if o.return_lse else 0)
        if o.out_dtype is not None:
            dtype = dtype_name(o.out_dtype)
        else:
            dtype = self.views["o"].dtype if "o" in self.views else self.dtype
        self.check_result("o would have", dtype)
        p.dtype_o = FLOATS[dtype][0]
        if "o" in self.views:
            self.tensor("o", self.o_shape, dtype, True)
        else:
            made.append(self.make("o", self.o_shape, dtype))
        if "lse" in self.views:
            self.statistic("lse", self.lse_shape, True)
        elif o.return_lse:
            made.append(self.make_statistic("lse", self.lse_shape))
        return made

    def backward(self) -> list[Made]:
        """Fills in the fields of a backward; returns the gradients to allocate."""
        p, o, views, made = self.problem, self.o, self.views, []
        p.outputs = o.outputs
        dtype = views["o"].dtype
        self.check_result("o has", dtype)
        p.dtype_o = FLOATS[dtype][0]
        self.tensor("o", self.o_shape, dtype, False)
        self.tensor("dout", self.o_shape, dtype, False)
        self.statistic("lse", self.lse_shape, False)
        if "dlse" in views:
            p.features |= _c.DLSE
            self.statistic("dlse", self.lse_shape, False)
        for bit, name, like in ((_c.OUT_DQ, "dq", "q"), (_c.OUT_DK, "dk", "k"), (_c.OUT_DV, "dv", "v")):
            if not o.outputs & bit:
                continue
            gradient = self.statistics if o.features & _c.ACCUMULATE else views[like].dtype
            if name in views:
                self.tensor(name, views[like].shape, gradient, True)
            else:
                made.append(self.make(name, views[like].shape, gradient))
        if o.outputs & _c.OUT_DBIAS:
            if "bias" not in views:
                raise InvalidArgument("dbias is wanted, but there is no bias")
            shape = views["bias"].shape
            scores = (self.batch, self.q.heads, p.seqlen_q, p.seqlen_k)
            if "dbias" in views:
                self.operand("dbias", shape, self.statistics, True)
                strides = views["dbias"].strides
            else:
                made.append(self.make_statistic("dbias", shape))
                strides = contiguous_strides(shape)
            p.dbias_stride[:] = _broadcast("dbias", View(shape, strides, self.statistics, ""), scores)
        if o.outputs & _c.OUT_DSINK:
            if "sink" not in views:
                raise InvalidArgument("dsink is wanted, but there is no sink")
            if "dsink" in views:
                self.statistic("dsink", (self.q.heads,), True)
            else:
                made.append(self.make_statistic("dsink", (self.q.heads,)))
        return made


def _is_contiguous(view: View) -> bool:
    return all(n == 1 or s == wanted for n, s, wanted in
               zip(view.shape, view.strides, contiguous_strides(view.shape)))


def dtype_name(dtype: Any) -> str:
    """The name of a dtype, given as a name or as a library's object."""
    if isinstance(dtype, str):
        return dtype
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype).rpartition(".")[2]
    return str(name)


def len_of(cu: View, name: str) -> int:
    if len(cu.shape) != 1 or cu.shape[0] < 1:
        raise InvalidShape(f"{name} has shape {cu.shape}, not (sequences + 1,)")
    return cu.shape[0] - 1
