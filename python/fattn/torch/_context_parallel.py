# SPDX-License-Identifier: Apache-2.0
"""Attention whose sequences are divided over the ranks of a process group (fattn/distributed.h)."""

from __future__ import annotations

import contextlib
import ctypes
from functools import partial
from typing import Any, Callable, Iterator, Literal, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fattn import _c, _groups
from fattn._arrays import View, contiguous_strides, kind_of
from fattn._calls import window_of
from fattn._errors import InvalidArgument, InvalidShape, RanksDisagree, Unsupported
from fattn._plans import device_of
from fattn._problem import Description, Options, check_layout
from fattn.torch._calls import check_readable, refuse
from fattn.torch._functions import Window, autocast, check_types, new_seed, number
from fattn.torch._process_group import ProcessGroup
from fattn.torch._sdpa import _broadcast, is_lower_right, mask_for, switch

_TENSORS = ("q", "k", "v", "bias", "mask", "alibi_slopes", "sink", "seed_ptr")
_GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink")
_BEFORE = 5  # arguments of _Attend before the tensors
_ALIGNED = 64  # saved rows
_SAVED = ("q", "k", "v", "o", "lse")  # what backward may have from the rows that forward saved
_REFUSED = 0  # no split
_PLANS = 16  # kept for a group, each with the memory that it computes in


_Lengths = tuple[tuple[int, ...], tuple[int, ...]]  # cu_seqlens of queries and of keys, undivided


class _Share(Description):
    """A rank's share of a problem. Its tensors have the rows of the share, biases and masks all keys."""

    def __init__(self, options: Options, views: dict[str, View], whole_q: int, whole_k: int,
                 lengths: _Lengths | None) -> None:
        self.whole_k = whole_k
        self.device = device_of(None, views["q"].device)
        if lengths:
            options = options._replace(max_seqlen_q=_longest(lengths[0]), max_seqlen_k=_longest(lengths[1]))
            views |= {name: View((len(cu),), (1,), "int32", views["q"].device)
                      for name, cu in zip(("cu_seqlens_q", "cu_seqlens_k"), lengths)}
        self.packed = lengths is not None
        super().__init__(options, views, False)
        self.made = self.forward() if options.op == _c.FORWARD else self.backward()
        if self.packed:
            self.problem.total_q, self.problem.total_k = whole_q, whole_k
        else:
            self.problem.seqlen_q = whole_q
            self.fill_rows()

    def fill_rows(self) -> None:
        """What is broadcast is so on all ranks, however few rows they have. A bias or mask that has the rows of
        the share is not, also on a rank that has a single row, or none."""
        p = self.problem
        for name, strides, used in (("bias", p.bias_stride, True), ("mask", p.mask_stride, True),
                                    ("bias", p.dbias_stride, self.o.outputs & _c.OUT_DBIAS)):
            shape = self.views[name].shape if used and name in self.views else ()
            full = contiguous_strides(tuple(max(n, 1) for n in shape))
            for axis, n in enumerate(shape, 4 - len(shape)):
                rows = axis == 2 and n == self.q.seq
                strides[axis] = full[axis - 4] if n != 1 or rows else 0

    def fill_sizes(self) -> None:
        super().fill_sizes()
        if not self.packed:
            self.problem.seqlen_k = self.whole_k


class _Final(torch.autograd.Function):  # type: ignore[misc]
    """function(*tensors), gradients that have none themselves: differentiating them raises Unsupported."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Any, ...]], *tensors: Tensor | None) -> tuple[Any, ...]:
        return function(*tensors)

    backward = staticmethod(refuse)


class _Attend(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, ranks: context_parallel, options: Options, lengths: _Lengths | None, draws: bool, saves: bool,
                *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        arrays = dict(zip(_TENSORS, tensors))
        made = ranks._run(options._replace(op=_c.FORWARD, return_lse=True, features=0), lengths, arrays, draws, saves)
        kept: dict[str, Any] = arrays | made
        shapes = {}
        if "saved" in made:  # instead of these tensors, of which backward needs only shapes and types
            gone = {name: kept.pop(name) for name in _SAVED}
            shapes = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in gone.items()}
        ctx.save_for_backward(*kept.values())
        ctx.step = ranks, options, lengths, saves, shapes, tuple(kept)
        ctx.set_materialize_grads(False)
        return made["o"], made["lse"]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        function = partial(_differentiate, ctx.step, ctx.needs_input_grad)
        if torch.is_grad_enabled():
            # An input that requires gradients, which saved rows do not.
            last = torch.empty(0, requires_grad=True)
            return _Final.apply(function, dout, dlse, *ctx.saved_tensors, last)  # type: ignore[no-any-return]
        return function(dout, dlse, *ctx.saved_tensors)


def _differentiate(step: Any, needed: tuple[bool, ...], dout: Tensor | None, dlse: Tensor | None,
                   *saved: Any) -> tuple[Any, ...]:
    """Gradients of _Attend's arguments. step: what its forward left, with the names of the saved tensors."""
    ranks, options, lengths, saves, shapes, names = step
    arrays = shapes | dict(zip(names, saved))
    results: list[Any] = [None] * (_BEFORE + len(_TENSORS))
    places = [_TENSORS.index(name[1:]) for name in _GRADIENTS]
    wanted = [i for i, place in enumerate(places) if needed[_BEFORE + place]]
    if not wanted:
        return tuple(results)
    if dout is None:
        if dlse is None:
            return tuple(results)
        dout = torch.zeros(arrays["o"].shape, dtype=arrays["o"].dtype, device=dlse.device)
    arrays |= {"dout": dout, "dlse": dlse}
    made = ranks._run(options._replace(op=_c.BACKWARD, outputs=sum(_c.OUT_DQ << i for i in wanted)), lengths, arrays,
                      saves=saves)
    for i in wanted:
        results[_BEFORE + places[i]] = made[_GRADIENTS[i]].to(arrays[_TENSORS[places[i]]].dtype)
    return tuple(results)


def _is_recorded(*tensors: Tensor | None) -> bool:
    """Whether a backward may follow."""
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


class context_parallel:
    """Attention whose sequences are divided over the ranks of a process group: each holds a share of the rows.

        ranks = fattn.torch.context_parallel(group)
        q, k, v = (ranks.shard(x, 1) for x in (q, k, v))     # unless a rank has only its rows already
        o = ranks.attention(q, k, v, causal=True)            # rows of the same share, with gradients

        with fattn.torch.context_parallel(group, buffers=(ids, positions, targets), seq_dims=(1, 1, 1)):
            loss = model(ids, positions, targets)            # its scaled_dot_product_attention is divided
            loss.backward()

    Within the context F.scaled_dot_product_attention takes and returns the rows of this rank's share, forward and
    backward, and `buffers` hold only this rank's share. What a model computes row by row needs no change. All ranks
    must make the same calls in the same order. A rank's gradients of parameters come from its own rows: add them
    over the ranks, as data parallelism does.

    Args:
        group: a process group of torch.distributed; None for all ranks. Gloo and MPI carry tensors on the
            CPU, NCCL those on GPUs. After RankLost or RankTimeout it can no longer be used: make another.
        split: which rows each rank holds: "zigzag" (equal work under causal masks), "contiguous", "striped".
        scheme: "ring", "heads" (all to all), "both", or "reduce", for forward with all queries on every rank;
            "auto": the fastest of the first three by a model. Under causal masks on CPUs that is a ring over
            "zigzag" shares, and mostly "heads" over "contiguous" ones. Over NCCL the model takes 0.2 ms for a
            group of messages, so short sequences get a ring.
        length: the number of rows of every undivided sequence, needed if ranks hold different numbers of rows;
            by default that of buffers, if they agree. None: all ranks hold equally many.
        saves: with scheme "heads", backward exchanges half as many bytes. Autograd then keeps q, k, v, o and lse of
            this rank's heads, with the rows of all ranks, in place of q, k, v and lse of its rows. So it needs as
            many bytes more as o has. Gradients must then be recorded on all ranks, or on none.
        timeout: seconds that a step may wait for other ranks; over NCCL, whose messages the host waits for one step
            late, seconds that two steps may take.
        buffers: tensors without gradients that are divided while the context lasts, each along its axis in
            seq_dims. Backward must run within the context, too.
    """

    def __init__(self, group: Any = None, *,
                 split: Literal["zigzag", "contiguous", "striped"] = "zigzag",
                 scheme: Literal["auto", "ring", "heads", "both", "reduce"] = "auto",
                 length: int | None = None, saves: bool = True, timeout: float = 60.0,
                 buffers: Sequence[Tensor] = (), seq_dims: Sequence[int] = ()) -> None:
        self.group, self.saves, self.timeout = group, saves, timeout
        self.length: int | None = length
        self.split = _groups.number_of(_groups.SPLITS, "split", split)
        self.scheme = _groups.number_of(_groups.SCHEMES, "scheme", scheme)
        if len(buffers) != len(seq_dims):
            raise InvalidArgument(f"{len(buffers)} buffers and {len(seq_dims)} seq_dims")
        if any(b.requires_grad for b in buffers):
            raise InvalidArgument("a buffer requires a gradient: divide it by shard(), which is differentiable")
        self.rank: int = dist.get_rank(group)
        self.ranks: int = dist.get_world_size(group)
        self._buffers = list(zip(buffers, seq_dims))
        lengths = {b.shape[dim] for b, dim in self._buffers}
        if len(lengths) == 1 and length is None:
            self.length = lengths.pop()
        elif any(n % self.ranks for n in lengths if n != length):
            raise InvalidArgument(f"buffers have lengths {sorted(lengths)}: if lengths differ, each must be a "
                                  f"multiple of the number of ranks, {self.ranks}")
        self._entered: list[Any] = []
        self._transports: dict[Any, ProcessGroup] = {}
        self._plans: dict[Any, tuple[_groups.GroupPlan, _Share]] = {}

    # --- Shares -----------------------------------------------------------------------------------

    def rows(self, length: int | None = None, *, cu_seqlens: Tensor | Sequence[int] | None = None) -> Tensor:
        """Positions of this rank's rows in a sequence of this length, in the order of the share: int64, on the CPU.
        With cu_seqlens, those in packed sequences, of which number b has rows cu_seqlens[b] to cu_seqlens[b + 1]."""
        if (length is None) == (cu_seqlens is None):
            raise InvalidArgument("rows() takes either a length or cu_seqlens")
        cu = (0, length) if length is not None else _numbers(cu_seqlens, "cu_seqlens")
        return self._rows(cu, self.rank)

    def _rows(self, cu: Sequence[int], rank: int) -> Tensor:
        parts = [torch.arange(first + run.start, first + run.stop, run.step)
                 for first, past in zip(cu, cu[1:])
                 for run in _groups.runs_of(self.split, past - first, self.ranks, rank)]
        return torch.cat(parts) if parts else torch.arange(0)

    def shard(self, x: Tensor, dim: int, *, cu_seqlens: Tensor | Sequence[int] | None = None) -> Tensor:
        """This rank's share of a tensor that has all rows along `dim`, of one sequence or of packed ones. A copy;
        differentiable."""
        cu = (0, x.shape[dim]) if cu_seqlens is None else _numbers(cu_seqlens, "cu_seqlens")
        return x.index_select(dim, self._rows(cu, self.rank).to(x.device))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def unshard(self, x: Tensor, dim: int, *, cu_seqlens: Tensor | Sequence[int] | None = None) -> Tensor:
        """All rows of a tensor that has this rank's share along `dim`. Every rank calls it and gets them. No gradients
        are recorded."""
        if cu_seqlens is None:
            cu: tuple[int, ...] = (0, self._whole("x", x.shape[dim]))
        else:
            cu = _numbers(cu_seqlens, "cu_seqlens")
        length = cu[-1]
        rows = [self._rows(cu, r).to(x.device) for r in range(self.ranks)]
        if x.shape[dim] != len(rows[self.rank]):
            raise InvalidShape(f"x has {x.shape[dim]} rows: rank {self.rank} has {len(rows[self.rank])}")
        most = max(len(r) for r in rows)
        padded = x.detach().movedim(dim, 0).contiguous()
        padded = torch.cat([padded, padded.new_zeros(most - len(padded), *padded.shape[1:])])
        parts = [torch.empty_like(padded) for _ in rows]
        transport = self._transport(x.device)
        with transport.lost("a rank"):
            work = dist.all_gather(parts, padded, group=self.group, async_op=True)
        transport.finish([(work, "a rank")], self.timeout)
        whole = x.new_empty(length, *padded.shape[1:])
        for r, part in zip(rows, parts):
            whole[r] = part[:len(r)]
        return whole.movedim(0, dim)

    def _whole(self, name: str, rows: int) -> int:
        """The length that a share is of."""
        if self.length is None:
            return rows * self.ranks
        own = sum(map(len, _groups.runs_of(self.split, self.length, self.ranks, self.rank)))
        if rows != own:
            raise InvalidShape(f"{name} has {rows} rows: rank {self.rank} has {own} of {self.length}")
        return self.length

    # --- Attention --------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Window = None,
                  scale: float | None = None, softcap: float | None = None, bias: Tensor | None = None,
                  mask: Tensor | None = None, alibi_slopes: Tensor | None = None,
                  sink: Tensor | None = None, dropout_p: float = 0.0, seed: Tensor | None = None,
                  anchor: Literal["bottom_right", "top_left"] = "bottom_right",
                  layout: Literal["bshd", "bhsd"] = "bshd", return_lse: bool = False,
                  deterministic: bool | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """fattn.torch.attention() over the ranks' shares, with the options of the undivided problem.

        Args:
            q: this rank's rows (B, rows, Hq, D); likewise k, v and the result.
            bias: broadcast to (B, Hq, rows, all keys); likewise mask.
            seed: int64 (2), the same on all ranks. If None, the first rank draws it and sends it to the others.

        Returns the result or, with return_lse, (result, lse), lse float32 (B, Hq, rows); both are differentiable in
        q, k, v, bias and sink. Raises RankLost, RankTimeout or RanksDisagree, besides the errors of
        fattn.torch.attention().
        """
        with self._telling(q):
            check_layout(layout)
            q, k, v, bias = autocast(q, k, v, bias)
            check_types((q, k, v, bias, mask, None, alibi_slopes, sink))
            _check_axes((q, k, v), 4)
            options = _options(causal, window, scale, softcap, dropout_p, anchor, deterministic)
            seed, draws = _seed(q, seed, options)
            saves = self.saves and _is_recorded(q, k, v, bias, sink)
            if layout == "bhsd":
                q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o, lse = _Attend.apply(self, options, None, draws, saves, q, k, v, bias, mask, alibi_slopes, sink, seed)
        o = o.transpose(1, 2) if layout == "bhsd" else o
        return (o, lse) if return_lse else o

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attention_varlen(
            self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor | Sequence[int],
            cu_seqlens_k: Tensor | Sequence[int], causal: bool = False, window: Window = None,
            scale: float | None = None, softcap: float | None = None, alibi_slopes: Tensor | None = None,
            sink: Tensor | None = None, dropout_p: float = 0.0, seed: Tensor | None = None,
            anchor: Literal["bottom_right", "top_left"] = "bottom_right", return_lse: bool = False,
            deterministic: bool | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """attention() of packed sequences, each of which is divided separately. On GPUs, windows, dropout, ALiBi, and a
        causal mask where queries and keys differ in length, need scheme "heads".

        Args:
            q: this rank's rows (rows, Hq, D): its share of the first sequence, then of the second, and so
                on, which is shard(whole_q, 0, cu_seqlens=cu_seqlens_q); likewise k, v and the result.
            cu_seqlens_q: of the undivided sequences, the same on all ranks: number b has rows
                cu_seqlens_q[b] to cu_seqlens_q[b + 1]. Likewise cu_seqlens_k.
        """
        with self._telling(q):
            lengths = _numbers(cu_seqlens_q, "cu_seqlens_q"), _numbers(cu_seqlens_k, "cu_seqlens_k")
            q, k, v, _ = autocast(q, k, v, None)
            check_types((q, k, v, None, None, None, alibi_slopes, sink))
            _check_axes((q, k, v), 3)
            options = _options(causal, window, scale, softcap, dropout_p, anchor, deterministic)
            seed, draws = _seed(q, seed, options)
            saves = self.saves and _is_recorded(q, k, v, sink)
        o, lse = _Attend.apply(self, options, lengths, draws, saves, q, k, v, None, None, alibi_slopes, sink, seed)
        return (o, lse) if return_lse else o

    def scaled_dot_product_attention(
            self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
            dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
            enable_gqa: bool = False) -> Tensor:
        """PyTorch's function over the ranks' shares. attn_mask has this rank's rows, and all keys."""
        with self._telling(query):
            if is_causal and attn_mask is not None:
                raise RuntimeError("scaled_dot_product_attention: attn_mask and is_causal cannot be given together")
            if query.is_nested:
                raise Unsupported("nested tensors are not divided over ranks")
            lower_right = is_lower_right(attn_mask)
            if lower_right is not None:
                attn_mask, is_causal = None, True
            if attn_mask is not None:
                attn_mask = mask_for(autocast(query)[0], attn_mask)
            tensors, leading = [query, key, value], tuple(query.shape[:2])
            rank = max(t.dim() for t in tensors)
            if not (query.dim() == key.dim() == value.dim() == 4 and query.shape[0] == key.shape[0] and
                    (enable_gqa or query.shape[1] == key.shape[1])):
                tensors, leading = _broadcast(tensors, rank, enable_gqa)
            if len(leading) > 2 and attn_mask is not None and attn_mask.dim() > 3:
                attn_mask = attn_mask.expand(*leading[:-1], *attn_mask.shape[-3:]).flatten(0, -4)
            is_mask = attn_mask is not None and attn_mask.dtype == torch.bool
        o = self.attention(*tensors, causal=is_causal, scale=scale, dropout_p=dropout_p,
                           mask=attn_mask if is_mask else None, bias=None if is_mask else attn_mask,
                           anchor="bottom_right" if lower_right else "top_left", layout="bhsd")
        assert isinstance(o, Tensor)
        if rank < 4:
            return o[(0,) * (4 - rank)]
        return o if rank == 4 else o.unflatten(0, leading[:-1])

    # --- Running ----------------------------------------------------------------------------------

    def _transport(self, device: torch.device) -> ProcessGroup:
        """The transport for tensors of a device on its current stream."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
        transport = self._transports.get((device, stream))
        if transport is None:
            transport = self._transports[device, stream] = ProcessGroup(self.group, device, stream)
        return transport

    @contextlib.contextmanager
    def _telling(self, q: Any) -> Iterator[None]:
        """If this rank alone has an error, tells the other ranks, which are about to make a plan: it makes one that
        the library refuses, and they get RankLost."""
        try:
            yield
        except Exception:
            with contextlib.suppress(Exception):
                device = q.device if isinstance(q, Tensor) else next((d for d, _ in self._transports), torch.device("cpu"))
                transport, where = self._transport(device), torch.empty(0, device=device)
                _groups.GroupPlan(transport.table, device_of(None, kind_of(where).view(where, "q").device), _REFUSED,
                                  self.scheme, self.timeout, None)
            raise

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run(self, options: Options, lengths: _Lengths | None, arrays: dict[str, Any], draws: bool = False,
             saves: bool = False) -> dict[str, Any]:
        """Runs a forward or a backward; the tensors that it makes, by name. saves: forward may save rows for backward:
        then it also makes "saved". A backward that gets it has tensors without memory in place of _SAVED."""
        where = arrays.get("dout", arrays["q"])
        with self._telling(where):
            saved = arrays.pop("saved", None)
            if saved is not None and saved.data_ptr() % _ALIGNED:  # as hooks of autograd may return it
                saved = saved.clone()
            gone = _SAVED if saved is not None else ()
            given = {name: t if name in gone else _plain(t, name) for name, t in arrays.items() if t is not None}
            q, transport = given["q"], self._transport(where.device)
            wholes = (lengths[0][-1], lengths[1][-1]) if lengths else self._wholes(q, given["k"])
            # Shares of different ranks differ, but two problems that are one for a rank are one for all: so
            # all make a plan, or none.
            key = (options, lengths, wholes, id(transport), saves,
                   tuple([(name, t.shape, t.dtype) for name, t in given.items()]))
            keeps = self._keeps(given, wholes[0])
            found = self._plans.pop(key, None) if keeps else None
            share = found[1] if found else _share_of(options, given, gone, where, wholes, lengths)
        if found is None:
            try:
                found = self._make_plan(transport, share, lengths, saves), share
            finally:
                transport.check()
        if keeps:
            self._plans[key] = found
        if draws:
            with transport.lost("rank 0"):
                work = dist.broadcast(given["seed_ptr"], group=self.group, group_src=0, async_op=True)
            transport.finish([(work, "rank 0")], self.timeout)
        kind = kind_of(q)
        try:
            made = {m.name: kind.make(m, where)[0] for m in share.made}
            if options.op == _c.FORWARD and found[0].saved_bytes:
                saved = torch.empty(found[0].saved_bytes, dtype=torch.uint8, device=where.device)
        except Exception as error:  # no memory
            transport.give_up(f"{error}".encode())
            raise
        buffers, memory = _c.new_struct(_c.Buffers, _c.lib.fattn_buffers_init)
        for name, t in (given | made).items():
            setattr(buffers, name, t.data_ptr())
        if "seed_ptr" in given:
            buffers.offset_ptr = given["seed_ptr"].data_ptr() + 8
        try:
            with transport.running_ahead():
                found[0].execute(buffers, 0 if saved is None else saved.data_ptr())
        finally:
            transport.check()
        if not keeps:
            transport.catch_up(self.timeout)
            found[0].destroy()
        assert memory
        return made | {"saved": saved} if options.op == _c.FORWARD and saved is not None else made

    def _keeps(self, given: dict[str, Tensor], whole_q: int) -> bool:
        """Whether all ranks keep their plan. Where one has a single row, a bias of one row may have the ranks' own
        rows or be broadcast: to that rank both are one problem, and to the others two."""
        return not ("bias" in given or "mask" in given) or 1 not in (
            sum(map(len, _groups.runs_of(self.split, whole_q, self.ranks, r))) for r in range(self.ranks))

    def _wholes(self, q: Tensor, k: Tensor) -> tuple[int, int]:
        """Rows of undivided queries and keys."""
        reduces = self.scheme == _groups.SCHEMES["reduce"]
        return q.shape[1] if reduces else self._whole("q", q.shape[1]), self._whole("k", k.shape[1])

    def _make_plan(self, transport: ProcessGroup, share: _Share, lengths: _Lengths | None,
                   saves: bool) -> _groups.GroupPlan:
        for each in self._transports.values():  # a plan is destroyed when its messages have arrived
            each.catch_up(self.timeout)
        while len(self._plans) >= _PLANS:
            self._plans.pop(next(iter(self._plans)))[0].destroy()
        try:
            return _groups.GroupPlan(transport.table, share.device, self.split, self.scheme, self.timeout,
                                     ctypes.addressof(share.problem), lengths, saves, transport.bandwidth,
                                     transport.latency)
        except RanksDisagree as error:
            if self.length is None and lengths is None and "seqlen" in str(error):
                raise RanksDisagree(f"{error}; where ranks have different numbers of rows, "
                                    "context_parallel takes length=") from None
            raise

    def __del__(self) -> None:
        # Messages of a transport that has failed may still be under way: then the memory stays.
        transports = getattr(self, "_transports", {}).values()
        for transport in transports:
            with contextlib.suppress(Exception):
                transport.catch_up(self.timeout)
        if not any(transport.broken for transport in transports):
            for plan, _ in getattr(self, "_plans", {}).values():
                plan.destroy()

    # --- The context ------------------------------------------------------------------------------

    def __enter__(self) -> context_parallel:
        wholes = []
        for buffer, dim in self._buffers:
            wholes.append((buffer, buffer.data))
            buffer.data = self.shard(buffer.data, dim)
        self._entered.append((switch.enter(self.scaled_dot_product_attention), wholes))
        return self

    def __exit__(self, *_: Any) -> None:
        context, wholes = self._entered.pop()
        switch.leave(context)
        for buffer, whole in wholes:
            buffer.data = whole


def _share_of(options: Options, given: dict[str, Tensor], gone: tuple[str, ...], where: Tensor,
              wholes: tuple[int, int], lengths: _Lengths | None) -> _Share:
    """gone: tensors without memory; they were on the device of `where`."""
    kind = kind_of(where)
    device = kind.view(where, "q").device
    views = {name: View(tuple(t.shape), contiguous_strides(t.shape), str(t.dtype).removeprefix("torch."), device)
             if name in gone else kind.view(t, name) for name, t in given.items()}
    views = {name: view._replace(strides=contiguous_strides(view.shape)) if 0 in view.shape
             else view for name, view in views.items()}
    return _Share(options, views, *wholes, lengths)


def _check_axes(tensors: Sequence[Tensor], axes: int) -> None:
    for t, name in zip(tensors, _TENSORS):
        if t.dim() != axes:
            raise InvalidShape(f"{name} has shape {tuple(t.shape)}, {t.dim()} axes: {axes} are needed")


def _seed(q: Tensor, seed: Tensor | None, options: Options) -> tuple[Tensor | None, bool]:
    """The seed, where one is needed, and whether it is yet to come from the first rank."""
    if options.dropout_p == 0:
        return None, False
    return (new_seed(q), True) if seed is None else (seed, False)


def _options(causal: bool, window: Window, scale: float | None, softcap: float | None, dropout_p: float,
             anchor: str, deterministic: bool | None) -> Options:
    scale, softcap, dropout_p = number(scale, "scale"), number(softcap, "softcap"), number(dropout_p, "dropout_p")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return Options(causal=causal, window=None if window is None else window_of(window), scale=scale,
                   softcap=softcap, dropout_p=dropout_p, anchor=anchor,
                   features=_c.DETERMINISTIC if deterministic else 0)


def _numbers(cu_seqlens: Any, name: str) -> tuple[int, ...]:
    """cu_seqlens on the host. A GPU's are waited for."""
    cu = tuple(cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)
    if not cu or cu[0] != 0 or any(b < a for a, b in zip(cu, cu[1:])):
        raise InvalidArgument(f"{name} is {list(cu)}: it must begin with 0 and never decrease")
    return cu


def _longest(cu: Sequence[int]) -> int:
    return max((b - a for a, b in zip(cu, cu[1:])), default=0)


def _plain(t: Tensor, name: str) -> Tensor:
    """Contiguous, and aligned as allocations are, so that all ranks describe the same layout."""
    t = t.detach()
    check_readable(t, name)
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()
