# SPDX-License-Identifier: Apache-2.0
"""Calls on tensors when nothing but autograd needs to see an operator: none is dispatched, and a call like an earlier
one finds its problem and plan by a single look-up.

A training step spends as long in these lines as a GPU in a small attention, so they are few. In a step they take four
times as long as in a loop of nothing else, because the rest of the step has filled the caches.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from fattn import _c
from fattn._arrays import kind_of
from fattn._calls import split_positions, unhashable
from fattn._errors import InvalidArgument, Unsupported
from fattn._plans import Prepared, also_cleared, pack_backward, pack_forward, prepare, remember
from fattn._plans import _cache as prepared_calls
from fattn._problem import EXTRAS, Options
from fattn.torch._schemas import TENSORS, schema_for

_FIELDS = ("q", "k", "v", *(name for name, feature, _ in EXTRAS if feature != _c.POSITIONS))
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink")
E4M3 = getattr(torch, "float8_e4m3fn", None)
_BIAS, _SINK = TENSORS.index("bias"), TENSORS.index("sink")

_kind = kind_of(torch.empty(0))
_check_memory = _kind.check_memory
check_readable = _kind.check_readable  # type: ignore[attr-defined]
_grads = torch.is_grad_enabled
_functorch_active = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_is_legacy_batch = torch._C._functorch.is_legacy_batchedtensor  # of is_grads_batched=True
_any_autocast = torch._C._is_any_autocast_enabled
_autocast_dtype = torch.get_autocast_dtype


def options_of(op: int, numbers: tuple[Any, ...], outputs: int = 0, lse: bool = False,
               equal_heads: bool = False) -> tuple[tuple[Any, ...], Any]:
    """fattn._problem's Options, and positions, from the arguments of an operator that are not tensors."""
    (causal, left, right, scale, softcap, dropout_p, top_left, bhsd, out_f32, longest_q, longest_k,
     block_m, block_n, positions, batch_invariant, checked, deterministic, device, chunk,
     alibi_bias) = numbers
    features = 0
    if positions is not None:
        features |= _c.POSITIONS
    if checked:
        features |= _c.CHECKED
    if alibi_bias:
        features |= _c.ALIBI_BIAS
    if op == _c.FORWARD:
        features |= _c.BATCH_INVARIANT if batch_invariant else 0
    else:
        features |= _c.DETERMINISTIC if deterministic else 0
    return ((op, causal, None if left == -1 and right == -1 else (left, right), scale, softcap,
             dropout_p, "top_left" if top_left else "bottom_right", "bhsd" if bhsd else "bshd",
             "float32" if out_f32 and op == _c.FORWARD else None, lse, outputs, features,
             longest_q, longest_k, (block_m, block_n) if block_m or block_n else None, 0, 0, device,
             equal_heads, chunk), split_positions(positions)[0])


class Call:
    """The options of a call, and which tensors are given. As part of a key it is compared by identity."""

    def __init__(self, numbers: tuple[Any, ...], given: tuple[int, ...], lse: bool,
                 equal_heads: bool) -> None:
        """given: places in TENSORS of the tensors after v. lse: whether forward returns it."""
        self.key = numbers, given, lse, equal_heads
        self.numbers, self.lse, self.equal_heads = numbers, lse, equal_heads
        self.places = 0, 1, 2, *given
        self.given = tuple(_FIELDS[i] for i in given)
        self.bias = 3 + given.index(_BIAS) if _BIAS in given else -1
        self.sink = 3 + given.index(_SINK) if _SINK in given else -1
        self.positions = options_of(_c.FORWARD, numbers)[1]
        # Whether rows of q, or any rows, may belong to no sequence: the library does not write theirs.
        self.pads_q = "cu_seqlens_q" in self.given or "seqused_q" in self.given
        self.pads = self.pads_q or "cu_seqlens_k" in self.given or "seqused_k" in self.given
        self._outputs: dict[tuple[bool, ...], int] = {}

    def outputs_of(self, needed: tuple[bool, ...]) -> int:
        """Bits of FATTN_OUT_DQ and so on, where needed says which of Recorded's arguments need a gradient."""
        outputs = self._outputs.get(needed)
        if outputs is None:
            places = (1, 2, 3, 1 + self.bias, 1 + self.sink)
            self._outputs[needed] = outputs = sum(_c.OUT_DQ << i for i, place in enumerate(places)
                                                  if place > 0 and needed[place])
        return outputs

    def check_gradients(self, prepared: Prepared, tensors: tuple[Tensor, ...]) -> None:
        """Raises Unsupported if a forward can be computed but its gradients cannot. This is checked before the forward
        is recorded, since backward() runs only after the whole model."""
        outputs = self.outputs_of((False, *[t.requires_grad for t in tensors]))
        if outputs in prepared.differentiable:
            return
        try:
            prepared.backward(Options(*options_of(_c.BACKWARD, self.numbers, outputs)[0]))
        except Unsupported as error:
            raise Unsupported(f"{error}; without gradients (torch.no_grad()) the forward is supported") from None
        prepared.differentiable.add(outputs)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *extras: Tensor) -> tuple[Tensor, Any]:
        """(o, lse or None)."""
        return self.run_forward(self.find_forward(q, k, v, *extras), q, k, v, *extras)

    def find_forward(self, q: Tensor, k: Tensor, v: Tensor, *extras: Tensor) -> Prepared:
        device = q.device
        key: Any = (self, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype,
                    v.dtype, device, k.device, v.device)
        if extras:
            key += tuple([(e.shape, e.stride(), e.dtype, e.device) for e in extras])
        return prepared_calls.get(key) or self._prepare_forward(key, q, k, v, extras)

    def run_forward(self, prepared: Prepared, q: Tensor, k: Tensor, v: Tensor,
                    *extras: Tensor) -> tuple[Tensor, Any]:
        # As _kind.check_memory() has it.
        q_bytes, q_size, k_bytes, k_size, v_bytes, v_size = prepared.reach_of_qkv
        if (q.untyped_storage().nbytes() < q_bytes + q_size * q.storage_offset() or
                k.untyped_storage().nbytes() < k_bytes + k_size * k.storage_offset() or
                v.untyped_storage().nbytes() < v_bytes + v_size * v.storage_offset()):
            _check_memory((q, k, v), prepared.reaches)
        if extras:
            for e, reach in zip(extras, prepared.reaches_of_extras):
                if e.untyped_storage().nbytes() < reach[0] + reach[1] * e.storage_offset():
                    _check_memory((e,), (reach,))
        o = prepared.new[0]()
        qp, kp, vp, op = q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr()
        lse, at_lse = None, 0
        if self.lse:
            lse = prepared.new[1]()
            at_lse = lse.data_ptr()
        prepared.run(_kind, q, pack_forward, (qp, kp, vp, op, at_lse), qp | kp | vp | op,
                     [e.data_ptr() for e in extras] if extras else (), self.positions, None)
        return o, lse

    def backward(self, outputs: int, dout: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, q: Tensor,
                 k: Tensor, v: Tensor, *extras: Tensor) -> list[Tensor | None]:
        """GRADIENTS; None for those that outputs, bits of FATTN_OUT_DQ and so on, do not name."""
        prepared = self.find_backward(outputs, dout, dlse, o, lse, q, k, v, *extras)
        return self.run_backward(prepared, dout, dlse, o, lse, q, k, v, *extras)

    def find_backward(self, outputs: int, dout: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, q: Tensor,
                      k: Tensor, v: Tensor, *extras: Tensor) -> Prepared:
        device = q.device
        # Hooks that unpack saved tensors may have changed their strides.
        key: Any = (self, outputs, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), o.shape,
                    o.stride(), dout.shape, dout.stride(), lse.shape, lse.stride(), q.dtype, k.dtype,
                    v.dtype, o.dtype, dout.dtype, device, k.device, v.device, o.device, dout.device,
                    lse.device, None if dlse is None else (dlse.shape, dlse.stride(), dlse.dtype))
        if extras:
            key += tuple([(e.shape, e.stride(), e.dtype, e.device) for e in extras])
        return (prepared_calls.get(key) or
                self._prepare_backward(key, outputs, dout, dlse, o, lse, q, k, v, extras))

    def run_backward(self, prepared: Prepared, dout: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor,
                     q: Tensor, k: Tensor, v: Tensor, *extras: Tensor) -> list[Tensor | None]:
        _check_memory((q, k, v, o, dout, lse) if dlse is None and not extras else
                      (q, k, v, *extras, o, dout, lse, *(() if dlse is None else (dlse,))),
                      prepared.reaches)
        qp, kp, vp, op, dop = q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), dout.data_ptr()
        at_dlse = 0 if dlse is None else dlse.data_ptr()
        if prepared.makes_three:  # as nearly always
            new_dq, new_dk, new_dv = prepared.new
            dq, dk, dv = new_dq(), new_dk(), new_dv()
            dqp, dkp, dvp = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
            prepared.run(_kind, q, pack_backward,
                         (qp, kp, vp, op, lse.data_ptr(), dop, at_dlse, dqp, dkp, dvp, 0, 0),
                         qp | kp | vp | op | dop | dqp | dkp | dvp,
                         [e.data_ptr() for e in extras] if extras else (), self.positions, None)
            return [dq, dk, dv, None, None]
        results: list[Tensor | None] = [None] * 5
        pointers = [qp, kp, vp, op, lse.data_ptr(), dop, at_dlse, 0, 0, 0, 0, 0]
        bits = qp | kp | vp | op | dop
        for made, new in zip(prepared.made, prepared.new):
            i = _PLACES[made.name]
            a = results[i] = new()
            pointer = pointers[7 + i] = a.data_ptr()
            if i < 3:
                bits |= pointer
        prepared.run(_kind, q, pack_backward, pointers, bits,
                     [e.data_ptr() for e in extras] if extras else (), self.positions, None)
        return results

    def dispatch_backward(self, needed: tuple[bool, ...], dout: Tensor | None, dlse: Tensor | None,
                          *saved: Tensor) -> list[Tensor | None]:
        """The same by the operator. saved: the tensors of the call, o and lse; needed: which of the former need a
        gradient."""
        *tensors, o, lse = saved
        all_needed, all_tensors = [False] * len(TENSORS), [None] * len(TENSORS)
        for place, need, tensor in zip(self.places, needed, tensors):
            all_needed[place], all_tensors[place] = need, tensor
        made = differentiate(all_needed, dout, dlse, o, lse, all_tensors, self.numbers)
        return [made[place] for place in self.places]

    def _arrays(self, q: Tensor, k: Tensor, v: Tensor, extras: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {"q": q, "k": k, "v": v, **dict(zip(self.given, extras))}

    def _prepare_forward(self, key: Any, q: Tensor, k: Tensor, v: Tensor,
                         extras: tuple[Tensor, ...]) -> Prepared:
        options = options_of(_c.FORWARD, self.numbers, 0, self.lse, self.equal_heads)[0]
        prepared = prepare(_kind, options, self._arrays(q, k, v, extras))
        if self.pads_q:  # rows that do not exist are like rows without keys
            prepared.new = [filled(new, value) for new, value in zip(prepared.new, (0.0, -math.inf))]
        self._remember(key, prepared)
        return prepared

    def _prepare_backward(self, key: Any, outputs: int, dout: Tensor, dlse: Tensor | None, o: Tensor,
                          lse: Tensor, q: Tensor, k: Tensor, v: Tensor,
                          extras: tuple[Tensor, ...]) -> Prepared:
        arrays = self._arrays(q, k, v, extras) | {"o": o, "dout": dout, "lse": lse}
        if dlse is not None:
            arrays["dlse"] = dlse
        prepared = prepare(_kind, options_of(_c.BACKWARD, self.numbers, outputs)[0], arrays)
        if self.pads:
            prepared.new = [filled(new, 0.0) for new in prepared.new]
        self._remember(key, prepared)
        return prepared

    def _remember(self, key: Any, prepared: Prepared) -> None:
        """Stores a prepared problem and, for call_of(), this Call. Only now, because its numbers have described a valid
        problem: invalid numbers may equal valid ones, as 5.0 equals 5."""
        remember(key, prepared)
        if len(_calls) >= LIMIT:
            _calls.clear()
        _calls.setdefault(self.key, self)


def filled(new: Callable[[], Tensor], value: float) -> Callable[[], Tensor]:
    """new, but with the tensors filled with this value."""
    return lambda: new().fill_(value)


_PLACES = {name: i for i, name in enumerate(GRADIENTS)}

LIMIT = 512
_calls: dict[Any, Call] = {}
also_cleared.append(_calls)


def call_of(numbers: tuple[Any, ...], given: tuple[int, ...] = (), lse: bool = True,
            equal_heads: bool = False) -> Call:
    """The Call of these arguments: always the same object, unless too many others have been used since."""
    key = numbers, given, lse, equal_heads
    try:
        return _calls.get(key) or Call(*key)
    except TypeError:
        raise unhashable(["an option"] * len(numbers), numbers) from None


def even(k_descale: Tensor, v_descale: Tensor) -> tuple[Tensor, Tensor]:
    """The two with equal strides, as the library wants them; copies of one shape where they differ."""
    if k_descale.shape == v_descale.shape and k_descale.stride() == v_descale.stride():
        return k_descale, v_descale
    if not all([m == n or 1 in (m, n) for m, n in zip(k_descale.shape[::-1], v_descale.shape[::-1])]):
        return k_descale, v_descale  # of which one does not broadcast to (batch, heads of k): an error later
    k_descale, v_descale = _kind.spread(k_descale, v_descale)
    return k_descale, v_descale


# --- Calls known by their tensors -----------------------------------------------------------------


def _find_guards() -> Any:
    """PyTorch's TensorGuards, with which Dynamo recognises tensors: type, dtype, device, shape, strides and whether a
    gradient is recorded, and the active modes and transforms, all in one call. None if this PyTorch has none, or they
    do not behave as expected."""
    try:
        guards = torch._C._dynamo.guards.TensorGuards
        with torch.inference_mode(False), torch.no_grad():
            t = torch.empty(1, 2, 3, 4)
            check = guards(t, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            others = (t.double(), torch.empty(1, 2, 4, 3), torch.empty(1, 3, 2, 4).transpose(1, 2),
                      torch._neg_view(t), torch.empty(1, 2, 3, 4, requires_grad=True), torch.nn.Parameter(t))
            return guards if check(torch.empty(1, 2, 3, 4)) and not any(check(other) for other in others) else None
    except Exception:
        return None


_Guards = _find_guards()
_FEW = 4


def guard_of(*tensors: Tensor) -> Callable[..., bool] | None:
    """A function that says whether tensors are like these, under the same modes and transforms."""
    if _Guards is None:
        return None
    places = {id(t): place for place, t in reversed([*enumerate(tensors)])}  # of a tensor's first appearance
    firsts = sorted(places.values())
    check: Callable[..., bool] = _Guards(*[tensors[place] for place in firsts], dynamic_dims_sizes=None,
                                         dynamic_dims_strides=None).check
    if len(firsts) == len(tensors):
        return check
    # TensorGuards takes no tensor twice, but q, k and v may be one, and so may cu_seqlens_q and cu_seqlens_k.
    again = [(place, places[id(t)]) for place, t in enumerate(tensors) if places[id(t)] != place]
    return lambda *others: (all([others[place] is others[first] for place, first in again]) and
                            check(*[others[place] for place in firsts]))


class Known:
    """A Call with its prepared problem. check(q, k, v, ...) says whether other tensors have the same problem; it is
    None if the Known is not remembered."""

    def __init__(self, call: Call, prepared: Prepared, records: bool) -> None:
        """records: whether gradients are recorded. A call of q, k and v alone records those of o only."""
        self.call, self.prepared, self.records = call, prepared, records
        self.check: Any = None
        # The tensors' kind of device and, if autocast is on, its dtype there, which the tensors have already.
        self.kind, self.dtype = "", None
        # For each set of needed gradients: checks of (q, k, v, o, lse, dout), and the problem of each.
        self.backwards: dict[tuple[bool, ...], list[tuple[Callable[..., bool], Prepared]]] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *extras: Tensor) -> tuple[Tensor, Any]:
        return self.call.run_forward(self.prepared, q, k, v, *extras)

    def differentiate(self, needed: tuple[bool, ...], dout: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor,
                      lse: Tensor) -> list[Tensor | None]:
        """dq, dk and dv of a call without extras; needed: which of Recorded's arguments need a gradient."""
        call = self.call
        if self.check is None:
            return (call.dispatch_backward(needed[1:], dout, None, q, k, v, o, lse) if is_transformed(dout) else
                    call.backward(call.outputs_of(needed), rows_together(dout), None, o, lse, q, k, v)[:3])
        few = self.backwards.setdefault(needed, [])
        for check, prepared in few:
            if check(q, k, v, o, lse, dout):
                return call.run_backward(prepared, dout, None, o, lse, q, k, v)[:3]
        if is_transformed(dout):
            return call.dispatch_backward(needed[1:], dout, None, q, k, v, o, lse)
        together = rows_together(dout)
        prepared = call.find_backward(call.outputs_of(needed), together, None, o, lse, q, k, v)
        if together is dout and (guard := guard_of(q, k, v, o, lse, dout)) is not None:
            few.insert(0, (guard, prepared))
            del few[_FEW:]
        return call.run_backward(prepared, together, None, o, lse, q, k, v)[:3]


# The latest calls that were repeated, by their arguments that are not tensors and by q's shape.
_known: dict[Any, list[Known]] = {}
also_cleared.append(_known)


def find_known(key: Any, *tensors: Tensor) -> Known | None:
    """A Known that was remembered for this key, which contains whether autocast is on, and for tensors like these. Not
    for use while compiling."""
    try:
        few = _known.get((key, tensors[0].shape), ())
    except (AttributeError, RuntimeError, TypeError):  # not a tensor; a nested one without a shape; symbolic lengths
        return None
    if few and _modes():  # guards do not notice all modes: not those of selective checkpointing
        return None
    for known in few:
        if (known.check(*tensors) and (known.dtype is None or _autocast_dtype(known.kind) is known.dtype) and
                forward_ad._current_level < 0 and not profiler._is_profiler_enabled):
            return known
    return None


def make_known(key: Any, call: Call, record: bool, *tensors: Tensor) -> Known:
    """A Known of tensors as they are after autocast. It is remembered if its problem has been used before and key is
    not None; key is None if autocast has cast the tensors. record: whether gradients are recorded."""
    prepared = call.find_forward(*tensors)
    if record:
        call.check_gradients(prepared, tensors)
    known = Known(call, prepared, record)
    if prepared.again and key is not None:
        if _any_autocast():
            known.kind = tensors[0].device.type
            known.dtype = _autocast_dtype(known.kind)
        known.check = guard_of(*tensors)
        if known.check is not None and known.check(*tensors):
            if len(_known) >= LIMIT:
                _known.clear()
            place = key, tensors[0].shape
            _known[place] = [known, *_known.get(place, ())][:_FEW]
    prepared.again = True
    return known


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether tensors may have no memory of their own: under torch.func's transforms, or in a batch of gradients."""
    return _functorch_active() or any([t is not None and _is_legacy_batch(t) for t in tensors])


def rows_together(dout: Tensor) -> Tensor:
    """dout with contiguous channels and resolved. Gradients may have any strides: that of a sum is one number,
    broadcast with strides of 0. They may also be views that negate."""
    if dout.stride(-1) != 1:
        if not is_transformed(dout):
            check_readable(dout, "dout")
        dout = dout.contiguous()
    return dout.resolve_neg() if dout.is_neg() else dout


# --- Gradients ------------------------------------------------------------------------------------


def refuse(ctx: Any, *_: Any) -> Any:
    raise Unsupported("attention has no second derivatives (in a compiled gradient of single samples, detach the parameters)")


def refuse_tangents(tensors: Iterable[Tensor]) -> None:
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise Unsupported("attention has no derivatives in forward mode")


def differentiate(needed: Sequence[bool], dout: Tensor | None, dlse: Tensor | None, o: Tensor, lse: Tensor,
                  tensors: Sequence[Tensor | None], numbers: tuple[Any, ...]) -> list[Tensor | None]:
    """Gradients by an operator. needed, tensors and results are in the order of TENSORS."""
    results: list[Tensor | None] = [None] * len(TENSORS)
    places = [TENSORS.index(name[1:]) for name in GRADIENTS]
    wanted = [i for i, place in enumerate(places) if needed[place]]
    if not wanted or dout is None and dlse is None:
        return results
    outputs = sum(_c.OUT_DQ << i for i in wanted)
    dout = torch.zeros_like(o) if dout is None else dout
    dlse = None if dlse is None else dlse.contiguous()
    every = *tensors, *numbers
    schema = schema_for(every)
    made = schema.operators()[1](rows_together(dout), dlse, o, lse, outputs, *schema.select(every))
    for i in wanted:
        results[places[i]] = made[i].to(tensors[places[i]].dtype)  # type: ignore[union-attr]
    return results


def _differentiate(call: Call, needed: tuple[bool, ...], dout: Tensor | None, dlse: Tensor | None,
                   *saved: Tensor) -> tuple[Any, ...]:
    """Gradients of all arguments of Recorded or RecordedWithLse."""
    *tensors, o, lse = saved
    outputs = call.outputs_of(needed)
    if dout is None:
        if dlse is None or not outputs:
            return (None,) * (1 + len(tensors))
        dout = torch.zeros_like(o)
    if dlse is not None:
        dlse = dlse.contiguous().resolve_neg()
    dq, dk, dv, dbias, dsink = call.backward(outputs, rows_together(dout), dlse, o, lse, *tensors)
    if len(tensors) == 3:
        return None, dq, dk, dv
    more: list[Any] = [None] * (len(tensors) - 3)
    if dbias is not None:
        more[call.bias - 3] = dbias.to(tensors[call.bias].dtype)
    if dsink is not None:
        more[call.sink - 3] = dsink
    return None, dq, dk, dv, *more


class Recorded(torch.autograd.Function):  # type: ignore[misc]
    """o of a Known that has q, k and v alone, with gradients."""

    @staticmethod
    def forward(ctx: Any, known: Known, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, lse = known.forward(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.known = known
        return o

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        if _grads():  # create_graph: the operator raises an error if its results are differentiated
            return None, *ctx.known.call.dispatch_backward(ctx.needs_input_grad[1:], dout, None, *ctx.saved_tensors)
        return None, *ctx.known.differentiate(ctx.needs_input_grad, dout, *ctx.saved_tensors)


# Recorded.apply() without its search for active transforms. While one is active, find_known() finds no call.
recorded: Callable[..., Tensor] = super(torch.autograd.Function, Recorded).apply


class RecordedWithLse(torch.autograd.Function):  # type: ignore[misc]
    """o and lse of a Known, with gradients of both. The arguments are the Known and its tensors."""

    @staticmethod
    def forward(ctx: Any, known: Known, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = known.forward(*tensors)
        ctx.save_for_backward(*tensors, o, lse)
        ctx.known = known
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        if _grads() or is_transformed(dout, dlse):
            return None, *ctx.known.call.dispatch_backward(ctx.needs_input_grad[1:], dout, dlse, *ctx.saved_tensors)
        return _differentiate(ctx.known.call, ctx.needs_input_grad, dout, dlse, *ctx.saved_tensors)


recorded_with_lse: Callable[..., tuple[Tensor, Tensor]] = super(torch.autograd.Function, RecordedWithLse).apply


def check_gradients(tensors: tuple[Any, ...]) -> None:
    """Raises InvalidArgument if a gradient is required that does not exist, and Unsupported if there are none at all;
    tensors as in TENSORS."""
    for name in ("alibi_slopes", "seed", "k_descale", "v_descale"):
        tensor = tensors[TENSORS.index(name)]
        if tensor is not None and tensor.requires_grad:
            raise InvalidArgument(f"{name} requires a gradient, but has none")
    for tensor, name in zip(tensors[1:3], ("k", "v")):
        if tensor.dtype == E4M3:
            raise Unsupported(f"{name} has dtype {tensor.dtype}, with which there are no gradients; without gradients "
                              "(torch.no_grad()) the forward is supported")
    if tensors[TENSORS.index("k_descale")] is not None:
        raise Unsupported("k_descale and v_descale are for a forward without gradients (torch.no_grad())")
