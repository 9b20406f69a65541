# SPDX-License-Identifier: Apache-2.0
"""The operators of fattn.torch._schemas: kernels, shapes, gradients and batching rules, written once for both pairs.

`bhsd` says whether axes are (batch, head, sequence, channel); packed sequences have no batch axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction
from torch.utils.flop_counter import register_flop_formula

from fattn import _c
from fattn._errors import InvalidArgument
from fattn._plans import also_cleared
from fattn.torch._calls import (LIMIT, Call, RecordedWithLse, call_of, check_gradients, differentiate, even, make_known,
                                refuse, refuse_tangents)
from fattn.torch._schemas import ALL, COMMON, COMMON_NUMBERS, TENSORS, Numbers, Schema, schema_for

_N = len(TENSORS)
_GRADIENTS = sum(_c.OUT_DQ << i for i in range(5))
_library = torch.library.Library("fattn", "FRAGMENT")


def _call(tensors: tuple[Any, ...], numbers: Any, lse: bool = True) -> tuple[Call, list[torch.Tensor]]:
    """The Call, and the tensors that are given; those of the factors of k and v with equal strides."""
    if tensors[-2] is not None and tensors[-1] is not None:
        tensors = *tensors[:-2], *even(*tensors[-2:])
    if numbers.positions is not None:
        numbers = numbers._replace(positions=tuple(numbers.positions))
    given = tuple([i for i in range(3, _N) if tensors[i] is not None])
    return call_of(numbers, given, lse), [t for t in tensors if t is not None]


def eager(key: Any, tensors: tuple[Any, ...], numbers: tuple[Any, ...], lse: bool, record: bool) -> tuple[Any, Any]:
    """fattn::forward if nothing but autograd needs to see an operator. key: find_known()'s. lse: whether it is wanted
    as well."""
    call, given = _call(tensors, Numbers(*numbers), lse or record)
    if record:
        check_gradients(tensors)
    known = make_known(key, call, record, *given)
    return RecordedWithLse.apply(known, *given) if record else known.forward(*given)


def dispatched(*every: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward by an operator, from all arguments."""
    schema = schema_for(every)
    return schema.operators()[0](*schema.select(every))  # type: ignore[no-any-return]


# The Calls of the common pair, by their numbers and by which of the tensors after v are None.
_common_calls: dict[Any, Call] = {}
also_cleared.append(_common_calls)


def _common_call(arguments: tuple[Any, ...]) -> tuple[Call, tuple[torch.Tensor, ...]]:
    """_call() of the common pair, without looking at all arguments."""
    key, tensors = arguments[COMMON_NUMBERS], arguments[:3]
    if len(arguments) > COMMON_NUMBERS.stop:
        more = arguments[COMMON_NUMBERS.stop:]
        key = key, *[t is None for t in more]
        tensors = *tensors, *[t for t in more if t is not None]
    call = _common_calls.get(key)
    if call is None:
        call = _call(*COMMON.split(arguments))[0]
        if len(_common_calls) >= LIMIT:
            _common_calls.clear()
        _common_calls[key] = call
    return call, tensors


def _register_kernels(schema: Schema) -> tuple[Any, Any]:
    """The two kernels."""
    def run_forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        call, tensors = _common_call(arguments) if schema is COMMON else _call(*schema.split(arguments))
        return call.forward(*tensors)

    def run_backward(dout: torch.Tensor, dlse: torch.Tensor | None, o: torch.Tensor, lse: torch.Tensor,
                     outputs: int, *arguments: Any) -> tuple[torch.Tensor, ...]:
        call, tensors = _common_call(arguments) if schema is COMMON else _call(*schema.split(arguments))
        if outputs <= 0 or outputs & ~_GRADIENTS:
            raise InvalidArgument(f"outputs is {outputs:#x}, not some of {_GRADIENTS:#x}, the bits of gradients")
        made = call.backward(outputs, dout, dlse, o, lse, *tensors)[:schema.gradients]
        return tuple([tensors[0].new_empty(0) if a is None else a for a in made])

    for key in ("CPU", "CUDA"):
        torch.library.impl(schema.forward, key, run_forward)
        torch.library.impl(schema.backward, key, run_backward)
    return run_forward, run_backward


# --- Shapes ---------------------------------------------------------------------------------------


def _new(like: torch.Tensor, shape: tuple[Any, ...], bhsd: bool, dtype: torch.dtype) -> torch.Tensor:
    """An output with the strides that Description.make() of fattn._problem gives it."""
    if bhsd and len(shape) == 4:
        return like.new_empty((shape[0], shape[2], shape[1], shape[3]), dtype=dtype).transpose(1, 2)
    return like.new_empty(shape, dtype=dtype)


def _statistics(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _check_devices(tensors: tuple[Any, ...]) -> None:
    """Kernels check this too, but for tensors without memory this is all that runs."""
    for t, name in zip(tensors, TENSORS):
        if t is not None and t.device != tensors[0].device:
            raise InvalidArgument(f"{name} is on device {t.device}, q on {tensors[0].device}")


def _register_shapes(schema: Schema) -> None:
    def fake_forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tensors, numbers = schema.split(arguments)
        _check_devices(tensors)
        q, _, v, *_ = tensors
        bhsd = numbers.bhsd
        dtype = _statistics(q) if numbers.out_f32 else q.dtype
        rows = tuple(q.shape[:-1])
        if q.dim() == 3:
            lse = rows if bhsd else (rows[1], rows[0])
        else:
            lse = rows if bhsd else (rows[0], rows[2], rows[1])
        return _new(q, (*rows, v.shape[-1]), bhsd, dtype), q.new_empty(lse, dtype=_statistics(q))

    def fake_backward(dout: torch.Tensor, dlse: torch.Tensor | None, o: torch.Tensor, lse: torch.Tensor,
                      outputs: int, *arguments: Any) -> tuple[torch.Tensor, ...]:
        tensors, numbers = schema.split(arguments)
        _check_devices(tensors)
        q, k, v, bias, _, _, _, sink, *_ = tensors
        bhsd = numbers.bhsd
        results = []
        for i, like in enumerate((q, k, v, bias, sink)[:schema.gradients]):
            if not outputs & _c.OUT_DQ << i or like is None:
                results.append(q.new_empty(0))
            elif i < 3:
                results.append(_new(q, tuple(like.shape), bhsd, like.dtype))
            else:
                results.append(q.new_empty(like.shape, dtype=_statistics(q)))
        return tuple(results)

    torch.library.register_fake(schema.forward, fake_forward)
    torch.library.register_fake(schema.backward, fake_backward)


# --- Gradients ------------------------------------------------------------------------------------


# Kernels of the dispatcher's key Autograd, as operators written in C++ have them. register_autograd() would make
# some that torch.func's transforms do not accept.

_after_autograd = torch._C._after_autograd_keyset
_kernels = torch._C._after_ADInplaceOrView_keyset
_devices = torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA
_functorch_active = torch._C._are_functorch_transforms_active


def _below(op: Any, keyset: Any, arguments: tuple[Any, ...]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & _after_autograd, *arguments)


def _register_kernel_of_autograd(op: Any, function: Any, run: Any) -> None:
    """run: the operator's kernel for tensors of every device."""
    def forward_of_level(*arguments: Any) -> Any:
        with torch.enable_grad(), _set_fwd_grad_enabled(True):  # of the other levels
            return function.forward(*arguments)

    # Of one level of transforms, since the dispatcher comes to each of them.
    of_level: Any = type(function.__name__, (_SingleLevelFunction,),
                    {"forward": staticmethod(forward_of_level), "backward": staticmethod(function.backward)})
    defaults = tuple(a.default_value if a.has_default_value() else None for a in op._schema.arguments)

    def kernel(keyset: Any, *arguments: Any) -> Any:
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        refuse_tangents(tensors)
        if not torch.is_grad_enabled() or not any([t.requires_grad for t in tensors]):
            if (keyset & _kernels).highestPriorityTypeId() in _devices:  # what the dispatcher would do, in 7 us less
                return run(*arguments)
            return _below(op, keyset, arguments)
        arguments += defaults[len(arguments):]
        if not _functorch_active():
            return function.apply(keyset, *arguments)
        with enable_single_level_autograd_function():
            return of_level.apply(keyset, *arguments)

    _library.impl(op, kernel, "Autograd", with_keyset=True)


def _register_gradients(schema: Schema, run_forward: Any, run_backward: Any) -> None:
    forward_op, backward_op = schema.operators()

    class Forward(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, keyset: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            tensors, ctx.numbers = schema.split(arguments)
            check_gradients(tensors)
            o, lse = _below(forward_op, keyset, arguments)
            ctx.save_for_backward(*tensors, o, lse)
            ctx.set_materialize_grads(False)
            return o, lse

        @staticmethod
        def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
            *tensors, o, lse = ctx.saved_tensors
            needed = [False] * _N
            for place, need in zip(schema.places, ctx.needs_input_grad[1:]):
                if need:
                    needed[place] = need
            return None, *schema.select(differentiate(needed, dout, dlse, o, lse, tensors, ctx.numbers))

    class Backward(torch.autograd.Function):  # type: ignore[misc]
        backward = staticmethod(refuse)

        @staticmethod
        def forward(ctx: Any, keyset: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
            return tuple(_below(backward_op, keyset, arguments))

    _register_kernel_of_autograd(forward_op, Forward, run_forward)
    _register_kernel_of_autograd(backward_op, Backward, run_backward)


# --- Batching -------------------------------------------------------------------------------------


def _batched(op: Any, folds: int) -> Any:
    """vmap's rule of an operator whose first `folds` arguments have a batch axis that can take one more.

    If only those are batched, and no other argument has a batch axis, the new axis is folded into theirs, in one run.
    Otherwise there is a run for each element of the new axis.
    """
    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        n = info.batch_size
        tensors = [i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor)]
        statistics = (1, 3) if folds > 3 else ()  # dlse and lse, which the library wants contiguous
        batched = {i for i in tensors if in_dims[i] is not None}

        def parts(i: int) -> torch.Tensor:
            a: torch.Tensor = arguments[i]
            return a.movedim(in_dims[i], 0) if i in batched else a.expand(n, *a.shape)

        def folded(i: int) -> torch.Tensor:
            a = parts(i).flatten(0, 1)
            return a.contiguous() if i in statistics else a

        sink = TENSORS.index("sink") + folds - 3  # of the pair with all options; the other has no tensor there
        if (all(i < folds or i == sink and i not in batched for i in tensors) and
                all(parts(i).dim() >= 4 for i in tensors if i < folds)):
            whole = list(arguments)
            for i in tensors:
                if i < folds:
                    whole[i] = folded(i)
            results = op(*whole)
            if len(results) == 5 and results[4].numel():  # dsink would be summed over runs
                return _each(op, n, arguments, batched, parts)
            size = parts(0).shape[1]
            return tuple(r if r.dim() == 1 else r.unflatten(0, (n, size))
                         for r in results), tuple(None if r.dim() == 1 else 0 for r in results)
        return _each(op, n, arguments, batched, parts)

    return rule


def _each(op: Any, n: int, arguments: tuple[Any, ...], batched: set[int], parts: Any) -> tuple[Any, Any]:
    if n == 0:  # sums over no elements, which record gradients, for the shapes of results
        one = op(*(parts(i).sum(0).to(a.dtype) if i in batched else a for i, a in enumerate(arguments)))
        return tuple(r[None][:0] for r in one), (0,) * len(one)
    runs = [op(*(parts(i)[x] if i in batched else a for i, a in enumerate(arguments)))
            for x in range(n)]
    return tuple(torch.stack(r) for r in zip(*runs)), (0,) * len(runs[0])


def _register_batches(schema: Schema) -> None:
    forward_op, backward_op = schema.operators()
    torch.library.register_vmap(schema.forward, _batched(forward_op, 3))
    # dout, dlse, o, lse and outputs come before the tensors of forward.
    torch.library.register_vmap(schema.backward, _batched(backward_op, 8))


# --- Counting -------------------------------------------------------------------------------------


def _pairs(tensors: tuple[Any, ...], numbers: Any) -> int:
    """Pairs of a query and a key, over all heads. As in PyTorch's counts, masks leave none out."""
    given = dict(zip(TENSORS, tensors))
    q, k, cu_q, cu_k = given["q"], given["k"], given["cu_seqlens_q"], given["cu_seqlens_k"]
    bhsd, longest_k = numbers.bhsd, numbers.max_seqlen_k
    heads: int = q.shape[-3 if bhsd else -2]
    if cu_q is not None and cu_k is not None and type(cu_q) is type(cu_k) is torch.Tensor:
        return int((cu_q.diff().long() * cu_k.diff()).sum()) * heads
    rows: int = q.shape[-2 if bhsd else -3] * (q.shape[0] if q.dim() == 4 else 1)
    keys: int = k.shape[-2 if bhsd else -3] if longest_k is None else longest_k
    return rows * heads * keys


def _channels(tensors: tuple[Any, ...]) -> tuple[int, int]:
    """Of q and k, and of v."""
    return tensors[0].shape[-1], tensors[2].shape[-1]


def _register_counts(schema: Schema) -> None:
    def count_forward(*arguments: Any, **_: Any) -> int:
        tensors, numbers = schema.split(arguments)
        d, d_v = _channels(tensors)
        return 2 * _pairs(tensors, numbers) * (d + d_v)

    def count_backward(*arguments: Any, **_: Any) -> int:
        """Of five products: scores again, dP, dQ, dK and dV."""
        tensors, numbers = schema.split(arguments[5:])
        d, d_v = _channels(tensors)
        return 2 * _pairs(tensors, numbers) * (3 * d + 2 * d_v)

    forward_op, backward_op = schema.operators()
    register_flop_formula(forward_op.overloadpacket, get_raw=True)(count_forward)
    register_flop_formula(backward_op.overloadpacket, get_raw=True)(count_backward)


for _schema in (ALL, COMMON):
    for _name, _results in ((_schema.forward, 2), (_schema.backward, _schema.gradients)):
        _given = "Tensor dout, Tensor? dlse, Tensor o, Tensor lse, int outputs, " if _name == _schema.backward else ""
        torch.library.define(_name, f"({_given}{_schema.text}) -> ({', '.join(['Tensor'] * _results)})",
                             tags=(torch.Tag.pt2_compliant_tag,))
    _register_gradients(_schema, *_register_kernels(_schema))
    _register_shapes(_schema)
    _register_batches(_schema)
    _register_counts(_schema)
