# SPDX-License-Identifier: Apache-2.0
"""The steps of a call: find the plan by the layout of the arrays, allocate outputs, run the plan."""

from __future__ import annotations

from operator import index
from typing import Any, NamedTuple, Sequence

from fattn._arrays import Kind, kind_of, kinds
from fattn._errors import InvalidArgument
from fattn._plans import _cache, pack_backward, pack_forward, prepare
from fattn._problem import EXTRAS, Options, descale_strides, integer, real

_NAMES = tuple(name for name, *_ in EXTRAS)
# The same by the names of the public options.
_PUBLIC = {"q_offsets": "q_offset", "k_offsets": "k_offset", "wholes_q": "whole_q", "wholes_k": "whole_k",
           "seed_ptr": "seed"}
_OPTIONS = tuple(_PUBLIC.get(name, name) for name in _NAMES)
_OF_FORWARD, _OF_BACKWARD = ("k", "v", "out", "lse", *_OPTIONS), ("k", "v", "dout", "o", "lse", "dlse", *_OPTIONS)
NO_EXTRAS: tuple[None, ...] = (None,) * _NAMES.index("k_descale")  # without descales


class Positions(NamedTuple):
    """Where the rows and keys of a call lie in a longer sequence, for shards of sequences.

    The first row has position `q_offset` and the first key `k_offset`. `whole_q` and `whole_k` are the lengths of the
    whole sequence; -1: those of the call. Each is a number, or an int64 array (B) on the arrays' device.
    """

    q_offset: Any = 0
    k_offset: Any = 0
    whole_q: Any = -1
    whole_k: Any = -1


class Gradients(NamedTuple):
    """The result of attention_backward(); None for gradients that were not requested."""

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dsink: Any = None


def _is_number(value: Any) -> bool:
    """Whether it is an integer, also NumPy's or an array without axes."""
    return isinstance(value, int) or (hasattr(value, "__index__") and not getattr(value, "shape", ()))


def window_of(window: Sequence[int | None] | int | None, index: Any = index) -> tuple[int, int] | None:
    """(left, right), -1 for all; an integer stands for both. index: what makes integers of them."""
    if window is None:
        return None
    both: Any = (window, window) if _is_number(window) else window
    try:
        left, right = both
        return -1 if left is None else index(left), -1 if right is None else index(right)
    except (TypeError, ValueError):
        raise InvalidArgument(f"window is {window!r}, neither (left, right), integers or None, nor one integer for "
                              "both") from None


def block_of(block_size: Sequence[int] | None) -> tuple[int, int] | None:
    """(queries, keys)."""
    if block_size is None:
        return None
    try:
        queries, keys = block_size
        return index(queries), index(keys)
    except (TypeError, ValueError):
        raise InvalidArgument(f"block_size is {block_size!r}, not (queries, keys)") from None


def number(x: Any) -> Any:
    """x, or the number in an array without axes: plans are found by the values of options, and arrays may change."""
    return x.item() if getattr(x, "shape", None) == () else x


def integers(**options: Any) -> tuple[Any, ...]:
    """Options that are integers or None. Plans are looked up by value, and 5.0 equals 5: so anything but an integer
    is refused before that."""
    return tuple([None if x is None else integer(x, name) for name, x in options.items()])


def split_positions(positions: Sequence[Any] | None) -> tuple[tuple[int, ...] | None, tuple[Any, ...]]:
    """positions as four numbers, and as four arrays or None; the default stands in for the number of an array."""
    if positions is None:
        return None, (None, None, None, None)
    if not hasattr(positions, "__len__") or len(positions) != len(Positions._fields):
        shown = tuple(positions) if hasattr(positions, "__iter__") else repr(positions)
        raise InvalidArgument(f"positions is {shown}, not ({', '.join(Positions._fields)})")
    numbers, arrays = [], []
    for value, default, name in zip(positions, (0, 0, -1, -1), Positions._fields):
        is_number = _is_number(value)
        numbers.append(integer(value, name) if is_number else default)
        arrays.append(None if is_number else value)
    return tuple(numbers), tuple(arrays)


def split_seed(seed: Any, offset: int) -> tuple[tuple[int, int], Any]:
    """(seed, offset) as numbers, and an array of both or None."""
    if seed is None:
        raise InvalidArgument("seed is None: dropout needs an integer or an array of (seed, offset)")
    if not _is_number(seed):
        return (0, 0), seed
    return (integer(seed, "seed", unsigned=True), integer(offset, "offset", unsigned=True)), None


def descales_of(k_descale: Any, v_descale: Any, q: Any) -> tuple[Any, ...]:
    """Both factors as arrays of q's library that have equal strides where they are broadcast, as the library wants
    them; none if neither is given."""
    if k_descale is None and v_descale is None:
        return ()
    kind = kind_of(q, "q")
    given: list[Any] = [1.0 if a is None else a for a in (k_descale, v_descale)]
    names = "k_descale", "v_descale"
    for i, name in enumerate(names):
        a = given[i]
        if hasattr(a, "__float__") and not hasattr(a, "__dlpack__"):
            given[i] = real(a, name)
        elif kind_of(a, name) is not kind:
            raise InvalidArgument(f"{name} is a {kind_of(a).name} array, q a {kind.name} array")
    if float in (type(given[0]), type(given[1])):
        shape = next((kind.view(a, name).shape for a, name in zip(given, names) if not isinstance(a, float)), ())
        dtype = "float64" if kind.view(q, "q").dtype == "float64" else "float32"
        given = [kind.full(shape, a, dtype, q) if isinstance(a, float) else a for a in given]
    k, v = given
    if kind.key(k) != kind.key(v):
        one, other = kind.view(k, names[0]), kind.view(v, names[1])
        if (descale_strides(one.shape, one.strides) != descale_strides(other.shape, other.strides) and
                all([m == n or 1 in (m, n) for m, n in zip(one.shape[::-1], other.shape[::-1])])):
            k, v = kind.spread(k, v)
    return k, v


def forward(q: Any, k: Any, v: Any, options: tuple[Any, ...], extras: tuple[Any, ...] = NO_EXTRAS,
            numbers: Any = None, seed: Any = None, out: Any = None, lse: Any = None) -> tuple[Any, Any]:
    """Runs a forward; (o, lse or None). options is an Options as a plain tuple, extras in their order."""
    kind = kinds.get(type(q)) or kind_of(q, "q")
    of = kind.key
    if extras is NO_EXTRAS and out is None and lse is None:
        if type(k) is not type(q) or type(v) is not type(q):
            _same_kind(kind, _OF_FORWARD, (k, v), 2)
        key: Any = (of(q), of(k), of(v), options)
    else:
        _same_kind(kind, _OF_FORWARD, (k, v, out, lse, *extras), 2)
        key = (of(q), of(k), of(v), options, tuple([None if e is None else of(e) for e in extras]),
               None if out is None else kind.output_key(out), None if lse is None else kind.output_key(lse))
    try:
        prepared = _cache.get(key)
    except TypeError:
        raise unhashable(Options._fields, options) from None
    if prepared is None:
        arrays = {"q": q, "k": k, "v": v}
        arrays.update((name, e) for name, e in zip(_NAMES, extras) if e is not None)
        if out is not None:
            arrays["o"] = out
        if lse is not None:
            arrays["lse"] = lse
        prepared = prepare(kind, options, arrays, key)
    elif kind.shrinks:
        kind.check_memory((q, k, v, *[a for a in (*extras, out, lse) if a is not None])
                          if len(key) > 4 else (q, k, v), prepared.reaches)
    o = written_o = out
    for made in prepared.made:
        if made.name == "o":
            written_o, o = kind.make(made, q)
        else:
            lse = kind.make(made, q)[0]
    at = kind.pointer
    qp, kp, vp, op = at(q), at(k), at(v), at(written_o)
    prepared.run(kind, q, pack_forward, (qp, kp, vp, op, 0 if lse is None else at(lse)),
                 qp | kp | vp | op, () if extras is NO_EXTRAS else
                 tuple([at(e) for e in extras if e is not None]), numbers, seed)
    if not kind.immediate:
        o = kind.finish(o, q, prepared.device)
        lse = None if lse is None else kind.finish(lse, q, prepared.device)
    return o, lse


def _same_kind(kind: Kind, names: tuple[str, ...], arrays: tuple[Any, ...], needed: int) -> None:
    """Checks that arrays are of q's library. All but the first `needed` may be None."""
    for i, a in enumerate(arrays):
        if a is None and i >= needed:
            continue
        if kinds.get(type(a)) is not kind and kind_of(a, names[i]) is not kind:
            raise InvalidArgument(f"{names[i]} is a {kind_of(a).name} array, q a {kind.name} array")


def unhashable(names: Sequence[str], options: tuple[Any, ...]) -> InvalidArgument:
    """The error for options that cannot be hashed, by which no plan can be found."""
    wrong = [f"{name} is {value!r}, of type {type(value).__name__}" for name, value in zip(names, options)
             if value.__hash__ is None]
    return InvalidArgument(f"{', '.join(wrong)}: one value is needed")


def backward(dout: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, options: tuple[Any, ...],
             extras: tuple[Any, ...] = NO_EXTRAS, numbers: Any = None, seed: Any = None,
             given: dict[str, Any] | None = None) -> Gradients:
    """Runs a backward. given holds the caller's gradient arrays, by name."""
    kind = kind_of(q, "q")
    of = kind.key
    given = given or {}
    _same_kind(kind, (*_OF_BACKWARD, *given), (k, v, dout, o, lse, dlse, *extras, *given.values()), 5)
    key = (of(q), of(k), of(v), of(o), of(dout), of(lse), None if dlse is None else of(dlse), options,
           tuple([None if e is None else of(e) for e in extras]),
           tuple([(name, kind.output_key(a)) for name, a in given.items()]))
    try:
        prepared = _cache.get(key)
    except TypeError:
        raise unhashable(Options._fields, options) from None
    if prepared is None:
        arrays = {"q": q, "k": k, "v": v, "o": o, "dout": dout, "lse": lse}
        if dlse is not None:
            arrays["dlse"] = dlse
        arrays.update((name, e) for name, e in zip(_NAMES, extras) if e is not None)
        prepared = prepare(kind, options, arrays | given, key)
    elif kind.shrinks:
        kind.check_memory([a for a in (q, k, v, o, dout, lse, dlse, *extras, *given.values()) if a is not None],
                          prepared.reaches)
    written, results = dict(given), dict(given)
    for made in prepared.made:
        written[made.name], results[made.name] = kind.make(made, o)
    at = kind.pointer
    inputs = tuple([at(a) for a in (q, k, v, o)])
    dout_p = at(dout)
    outputs = [at(written[name]) if name in written else 0 for name in Gradients._fields]
    bits = dout_p | outputs[0] | outputs[1] | outputs[2]
    for pointer in inputs:
        bits |= pointer
    prepared.run(kind, q, pack_backward,
                 (*inputs, at(lse), dout_p, 0 if dlse is None else at(dlse), *outputs), bits,
                 tuple([at(e) for e in extras if e is not None]), numbers, seed)
    return Gradients(**{name: kind.finish(a, q, prepared.device) for name, a in results.items()})
