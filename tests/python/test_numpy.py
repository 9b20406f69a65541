# SPDX-License-Identifier: Apache-2.0
"""The functions on NumPy arrays, against the formula in double precision."""

import copy
import os
import pickle
import subprocess
import sys
import threading
import weakref

import fattn
import numpy as np
import pytest

import oracle


def draw(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def problem(rng, b=2, sq=37, sk=53, hq=4, hk=2, d=24, dv=16, dtype=np.float32):
    return (draw(rng, b, sq, hq, d, dtype=dtype), draw(rng, b, sk, hk, d, dtype=dtype),
            draw(rng, b, sk, hk, dv, dtype=dtype))


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def close(got, wanted, tolerance=2e-6):
    assert got.shape == wanted.shape
    finite = np.isfinite(wanted)
    assert (np.isfinite(got) == finite).all()
    error = np.abs(got[finite].astype(np.float64) - wanted[finite]).max(initial=0)
    assert error <= tolerance * max(1, np.abs(wanted[finite]).max(initial=0)), error


OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "anchor": "top_left"},
    {"window": (5, 3)},
    {"window": (None, 4)},
    {"scale": -0.3},
    {"softcap": 1.5},
    {"bias": (2, 4, 37, 53)},
    {"bias": (4, 1, 53)},
    {"bias": (37, 53), "causal": True},
    {"mask": (2, 1, 37, 53)},
    {"mask": (53,)},
    {"alibi_slopes": (4,)},
    {"alibi_slopes": (2, 4), "causal": True},
    {"sink": (4,)},
    {"dropout_p": 0.3},
    {"seqused_k": [20, 53], "causal": True},
    {"seqstart_k": [9, 0], "causal": True},
    {"chunk": 16},
    {"chunk": 20, "causal": True, "anchor": "top_left"},
    {"alibi_slopes": (2, 4), "bias": (37, 53), "alibi_bias": True},
]


def expand(rng, options):
    """Shapes in options become arrays."""
    options = dict(options)
    for name in ("bias", "alibi_slopes", "sink"):
        if name in options:
            options[name] = draw(rng, *options[name])
    if "mask" in options:
        options["mask"] = rng.random(options["mask"]) < 0.7
    for name in ("seqused_k", "seqstart_k"):
        if name in options:
            options[name] = np.array(options[name], np.int32)
    return options


def wanted(q, k, v, options, seed=0, offset=0):
    options = dict(options)
    options["top_left"] = options.pop("anchor", "") == "top_left"
    if "seqused_k" in options:
        options["lengths_k"] = options.pop("seqused_k")
    if "seqstart_k" in options:
        options["starts_k"] = options.pop("seqstart_k")
    if options.pop("alibi_bias", False):
        options["slopes_of_bias"] = options.pop("alibi_slopes")
    if "dropout_p" in options:
        options["keep"] = fattn.dropout_mask(q.shape[0], q.shape[2], q.shape[1], k.shape[1],
                                             dropout_p=options["dropout_p"], seed=seed, offset=offset)
    if options.get("window") and options["window"][0] is None:
        options["window"] = (-1, options["window"][1])
    return oracle.attention(q, k, v, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forward(rng, options):
    q, k, v = problem(rng)
    options = expand(rng, options)
    seed = {"seed": 11, "offset": 3} if "dropout_p" in options else {}
    o, lse = fattn.attention(q, k, v, return_lse=True, **options, **seed)
    o_wanted, lse_wanted = wanted(q, k, v, options, **seed)
    close(o, o_wanted)
    close(lse, lse_wanted)
    assert o.dtype == np.float32 and lse.dtype == np.float32
    assert (fattn.attention(q, k, v, **options, **seed) == o).all()
    # Once more, by the plan that is remembered, of other numbers.
    q2 = q[::-1].copy()
    close(fattn.attention(q2, k, v, **options, **seed), wanted(q2, k, v, options, **seed)[0])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_backward(rng, options):
    """Gradients of double precision, on the oracle of the library, are differences of the formula."""
    q, k, v = problem(rng, b=1 if "alibi_slopes" in options else 2, dtype=np.float64)
    options = {name: a.astype(np.float64) if getattr(a, "dtype", None) == np.float32 else a
               for name, a in expand(rng, options).items()}
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"][..., -4:].reshape(-1, 4)[0].copy()
    want = ["dq", "dk", "dv"] + ["d" + name for name in ("bias", "sink") if name in options]
    seed = {"seed": 5} if "dropout_p" in options else {}
    o, lse = fattn.attention(q, k, v, return_lse=True, device="reference", **options, **seed)
    dout, dlse = draw(rng, *o.shape, dtype=np.float64), draw(rng, *lse.shape, dtype=np.float64)
    gradients = fattn.attention_backward(dout, q, k, v, o, lse, dlse=dlse, want=want,
                                         device="reference", **options, **seed)
    inputs = {"dq": q, "dk": k, "dv": v} | {"d" + n: options[n] for n in ("bias", "sink")
                                            if n in options}

    def loss(**changed):
        a = inputs | changed
        other = {n: a["d" + n] for n in ("bias", "sink") if n in options}
        o, lse = wanted(a["dq"], a["dk"], a["dv"], options | other, **seed)
        return (o * dout).sum() + np.where(np.isfinite(lse), lse * dlse, 0).sum()

    for name in want:
        direction = draw(rng, *inputs[name].shape, dtype=np.float64)
        step = 1e-6
        difference = (loss(**{name: inputs[name] + step * direction}) -
                      loss(**{name: inputs[name] - step * direction})) / (2 * step)
        gradient = getattr(gradients, name)
        assert gradient.shape == inputs[name].shape and gradient.dtype == np.float64
        assert abs((gradient * direction).sum() - difference) <= 1e-6 * max(1, abs(difference)), name
    for name in set(fattn.Gradients._fields) - set(want):
        assert getattr(gradients, name) is None


def test_backward_in_float32(rng):
    q, k, v = problem(rng)
    sink = draw(rng, 4)
    o, lse = fattn.attention(q, k, v, causal=True, sink=sink, return_lse=True)
    dout = draw(rng, *o.shape)
    fast = fattn.attention_backward(dout, q, k, v, o, lse, causal=True, sink=sink,
                                    want=("dq", "dk", "dv", "dsink"))
    slow = fattn.attention_backward(dout, q, k, v, o, lse, causal=True, sink=sink,
                                    want=("dq", "dk", "dv", "dsink"), device="reference")
    for a, b in zip(fast, slow):
        if a is not None:
            close(a, b.astype(np.float64), 1e-5)
    dq, dk, dv = (np.ones_like(a) for a in (q, k, v))
    fattn.attention_backward(dout, q, k, v, o, lse, causal=True, sink=sink, accumulate=True, dq=dq,
                             dk=dk, dv=dv)
    for a, b in zip((dq, dk, dv), fast):
        close(a, b.astype(np.float64) + 1, 1e-5)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_layouts_and_strides(rng, layout):
    q, k, v = problem(rng)
    expected = oracle.attention(q, k, v)[0]
    views = []
    for a in (q, k, v):
        wide = np.full((a.shape[0], a.shape[1] + 3, a.shape[2], a.shape[3] + 5), np.nan, np.float32)
        wide[:, 2:-1, :, 4:-1] = a
        view = wide[:, 2:-1, :, 4:-1]
        views.append(view.transpose(0, 2, 1, 3) if layout == "bhsd" else view)
    o = fattn.attention(*views, layout=layout)
    close(o.transpose(0, 2, 1, 3) if layout == "bhsd" else o, expected)
    # One key for all, by a stride of 0.
    one = np.broadcast_to(k[:, :1], k.shape)
    close(fattn.attention(q, one, v), oracle.attention(q, one, v)[0])


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_short_types(rng, name):
    if name == "bfloat16":
        dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    else:
        dtype = np.dtype(name)
    q, k, v = problem(rng, dtype=dtype)
    o = fattn.attention(q, k, v)
    assert o.dtype == dtype
    close(o.astype(np.float64), oracle.attention(q, k, v)[0], 2e-2)
    wide = fattn.attention(q, k, v, out_dtype="float32")
    assert wide.dtype == np.float32
    close(wide, oracle.attention(q, k, v)[0], 1e-2)


def test_given_outputs(rng):
    q, k, v = problem(rng)
    out, lse = np.empty((2, 37, 4, 16), np.float32), np.empty((2, 4, 37), np.float32)
    result = fattn.attention(q, k, v, out=out, lse=lse)
    assert result is out
    close(out, oracle.attention(q, k, v)[0])
    close(lse, oracle.attention(q, k, v)[1])


def test_varlen(rng):
    lengths_q, lengths_k = [3, 0, 20, 14], [5, 7, 20, 1]
    q, k, v = draw(rng, 37, 4, 24), draw(rng, 33, 2, 24), draw(rng, 33, 2, 16)
    cu_q, cu_k = (np.cumsum([0] + n).astype(np.int32) for n in (lengths_q, lengths_k))
    o, lse = fattn.attention_varlen(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True,
                                    return_lse=True)
    assert lse.shape == (4, 37)
    dout = draw(rng, *o.shape)
    gradients = fattn.attention_backward(dout, q, k, v, o, lse, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
                                         causal=True)
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        if lengths_q[b]:
            wanted_o, wanted_lse = oracle.attention(q[None, rows], k[None, keys], v[None, keys],
                                                    causal=True)
            close(o[rows], wanted_o[0])
            close(lse[:, rows], wanted_lse[0])
        one, one_lse = fattn.attention(q[None, rows], k[None, keys], v[None, keys], causal=True,
                                       return_lse=True)
        alone = fattn.attention_backward(dout[None, rows], q[None, rows], k[None, keys], v[None, keys],
                                         one, one_lse, causal=True)
        for together, single, part in zip(gradients, alone, (rows, keys, keys)):
            if together is not None:
                close(together[part], single[0].astype(np.float64), 1e-5)


def test_kvcache(rng):
    q = draw(rng, 3, 2, 4, 24)
    k, v = draw(rng, 3, 64, 2, 24), draw(rng, 3, 64, 2, 16)
    used = np.array([2, 64, 31], np.int32)
    expected = oracle.attention(q, k, v, causal=True, lengths_k=used)[0]
    close(fattn.attention_with_kvcache(q, k, v, cache_seqlens=used, causal=True), expected)
    # The same keys in pages of 16 that lie anywhere.
    table = rng.permutation(20)[:12].reshape(3, 4).astype(np.int32)
    pages_k, pages_v = np.full((20, 16, 2, 24), np.nan, np.float32), np.full((20, 16, 2, 16), np.nan,
                                                                              np.float32)
    for b in range(3):
        for page in range(4):
            pages_k[table[b, page]] = k[b, page * 16:page * 16 + 16]
            pages_v[table[b, page]] = v[b, page * 16:page * 16 + 16]
    close(fattn.attention_with_kvcache(q, pages_k, pages_v, cache_seqlens=used, block_table=table,
                                       causal=True), expected)


def test_packed_queries_over_a_cache(rng):
    """A prompt, a sequence without new rows, and a single token: no cu_seqlens_k."""
    cu, used = np.array([0, 5, 5, 6], np.int32), np.array([9, 4, 16], np.int32)
    q, k, v = draw(rng, 6, 4, 24), draw(rng, 3, 16, 2, 24), draw(rng, 3, 16, 2, 16)
    table = np.array([[2, 0], [5, -1], [1, 4]], np.int32)
    pages_k, pages_v = np.full((6, 8, 2, 24), np.nan, np.float32), np.full((6, 8, 2, 16), np.nan, np.float32)
    for b, page in np.argwhere(table >= 0):
        pages_k[table[b, page]] = k[b, page * 8:page * 8 + 8]
        pages_v[table[b, page]] = v[b, page * 8:page * 8 + 8]
    options = dict(cu_seqlens_q=cu, seqused_k=used, causal=True)
    for o in (fattn.attention_varlen(q, k, v, **options),
              fattn.attention_varlen(q, pages_k, pages_v, block_table=table, **options)):
        for b in (0, 2):
            rows, keys = slice(cu[b], cu[b + 1]), slice(0, used[b])
            close(o[rows], oracle.attention(q[None, rows], k[b:b + 1, keys], v[b:b + 1, keys], causal=True)[0][0])


def test_block_mask(rng):
    q, k, v = problem(rng)
    blocks = rng.random((2, 1, 5, 4)) < 0.6
    mask = np.repeat(np.repeat(blocks, 8, 2), 16, 3)[:, :, :37, :53]
    close(fattn.attention(q, k, v, block_mask=blocks, block_size=(8, 16)),
          oracle.attention(q, k, v, mask=mask)[0])


def test_merge_and_positions(rng):
    """Keys in two shards, each told where it lies, merge into the whole."""
    q, k, v = problem(rng, sq=40, sk=40)
    parts = []
    for begin, end in ((0, 16), (16, 40)):
        positions = fattn.Positions(q_offset=0, k_offset=begin, whole_q=40, whole_k=40)
        parts += fattn.attention(q, k[:, begin:end], v[:, begin:end], causal=True, return_lse=True,
                                 positions=positions)
    o, lse = fattn.merge(*parts)
    wanted_o, wanted_lse = oracle.attention(q, k, v, causal=True)
    close(o, wanted_o)
    close(lse, wanted_lse)
    arrays = fattn.Positions(q_offset=np.zeros(2, np.int64), k_offset=np.full(2, 16, np.int64),
                             whole_q=np.full(2, 40, np.int64), whole_k=np.full(2, 40, np.int64))
    again = fattn.attention(q, k[:, 16:], v[:, 16:], causal=True, positions=arrays)
    assert (again == parts[2]).all()


def test_seed_in_an_array(rng):
    q, k, v = problem(rng)
    seed = np.array([11, 3], np.int64)
    assert (fattn.attention(q, k, v, dropout_p=0.4, seed=seed) ==
            fattn.attention(q, k, v, dropout_p=0.4, seed=11, offset=3)).all()


def test_numbers_of_numpy(rng):
    """Are as good as Python's, and a dtype as good as its name."""
    q, k, v = problem(rng, dtype=np.float16)
    for ours, theirs in ((dict(window=3), dict(window=(3, 3))), (dict(window=np.int64(3)), dict(window=3)),
                         (dict(window=np.array([3, 0])), dict(window=(3, 0))),
                         (dict(dropout_p=0.5, seed=np.int64(7), offset=np.int32(2)),
                          dict(dropout_p=0.5, seed=7, offset=2)),
                         (dict(scale=np.float32(0.5), chunk=np.int64(4)), dict(scale=0.5, chunk=4)),
                         (dict(scale=np.array(0.5), softcap=np.array(3.0), chunk=np.array(4)),
                          dict(scale=0.5, softcap=3.0, chunk=4)),
                         (dict(dropout_p=np.array(0.5), batch_offset=np.array(1), head_offset=np.array(2)),
                          dict(dropout_p=0.5, batch_offset=1, head_offset=2)),
                         (dict(dropout_p=np.array(0.0), batch_offset=np.array(1)), {}),
                         (dict(block_mask=np.eye(10, 14, dtype=bool), block_size=[4, 4]),
                          dict(block_mask=np.eye(10, 14, dtype=bool), block_size=(4, 4))),
                         (dict(block_mask=np.eye(10, 14, dtype=bool), block_size=np.array([4, 4])),
                          dict(block_mask=np.eye(10, 14, dtype=bool), block_size=(4, 4))),
                         (dict(out_dtype=np.float32), dict(out_dtype="float32")),
                         (dict(out_dtype=np.dtype("float16")), {}),
                         (dict(causal=True, positions=fattn.Positions(np.int64(0), np.int32(4), np.int64(99), 99)),
                          dict(causal=True, positions=fattn.Positions(0, 4, 99, 99)))):
        a, b = fattn.attention(q, k, v, **ours), fattn.attention(q, k, v, **theirs)
        assert a.dtype == b.dtype and (a == b).all(), ours


def test_numbers_in_arrays(rng):
    """Of all functions; an array that was written since has its new number."""
    q, k, v = problem(rng)
    scale, chunk = np.array(0.5), np.array(8)
    cu_q, cu_k = np.array([0, 37], np.int32), np.array([0, 53], np.int32)
    mask = dict(block_mask=np.eye(10, 14, dtype=bool))
    o, lse = fattn.attention(q, k, v, return_lse=True)
    calls = [lambda s, c, i: fattn.attention(q, k, v, scale=s, chunk=c),
             lambda s, c, i: fattn.attention_varlen(q[0], k[0], v[0], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, scale=s,
                                                    max_seqlen_q=i(37), max_seqlen_k=i(53), chunk=c),
             lambda s, c, i: fattn.attention_with_kvcache(q, k, v, scale=s, chunk=c),
             lambda s, c, i: fattn.attention_backward(o, q, k, v, o, lse, scale=s, chunk=c, **mask,
                                                      block_size=[i(4), i(4)]).dq,
             lambda s, c, i: fattn.inspect(q, k, v, scale=s, chunk=c, **mask, block_size=[i(4), i(4)])]
    for scale[...], chunk[...] in ((0.5, 8), (0.25, 16)):
        for call in calls:
            np.testing.assert_array_equal(call(scale, chunk, np.array), call(float(scale), int(chunk), int))


def test_empty(rng):
    q, k, v = problem(rng)
    o, lse = fattn.attention(q, k[:, :0], v[:, :0], return_lse=True)
    assert (o == 0).all() and np.isneginf(lse).all()
    assert fattn.attention(q[:0], k[:0], v[:0]).shape == (0, 37, 4, 16)
    for layout, places in (("bshd", (0, 2, 1)), ("bhsd", (0, 1, 2))):
        for shape in ((0, 3, 2, 4), (2, 0, 3, 4), (2, 3, 0, 4)):
            part = np.zeros(shape, np.float32)
            part = part, np.zeros([shape[i] for i in places], np.float32)
            merged = fattn.merge(*part, *part, layout=layout)
            assert [a.shape for a in merged] == [a.shape for a in part]
    assert fattn.attention(q[:, :0], k, v).shape == (2, 0, 4, 16)


def test_plan(rng):
    q, k, v = problem(rng)
    plan = fattn.Plan(q, k, v, causal=True)
    assert plan.kernel in str(plan) and plan.flops > 0 and plan.workspace_bytes >= 0
    assert str(plan) == fattn.explain(q, k, v, causal=True)
    back = fattn.Plan(q, k, v, causal=True, sink=np.zeros(4, np.float32), backward=True)
    assert "backward" in str(back) and back.flops > plan.flops
    assert 0 < fattn.Plan(q, k, v, dropout_p=1e-9).effective_dropout == 1 / 65536


def test_copies_of_a_plan(rng):
    """Two owners of one plan would destroy it twice."""
    plan = fattn.Plan(*problem(rng))
    for copied in (copy.copy(plan), copy.deepcopy(plan), copy.deepcopy({"plan": plan})["plan"]):
        assert str(copied) == str(plan)
    del copied
    for give in (pickle.dumps, lambda plan: copy.deepcopy(plan._handle), lambda plan: copy.copy(plan._handle)):
        with pytest.raises(TypeError, match="a plan cannot be copied or pickled"):
            give(plan)
    assert plan.kernel in str(plan)


def test_devices():
    assert fattn.info("cpu") in fattn.devices()
    assert {d.backend for d in fattn.devices()} >= {"cpu", "reference"}
    with pytest.raises(fattn.UnknownDevice):
        fattn.info("abacus")
    with pytest.raises(fattn.NoDevice):
        fattn.info("cpu:7")


@pytest.mark.parametrize("kv", ["float16", "bfloat16"])
def test_narrow_cache_under_wide_queries(rng, kv):
    """k and v of 16 bits, read as they are: what they are rounded to, in float32."""
    if kv == "bfloat16":
        ml_dtypes = pytest.importorskip("ml_dtypes")
        kv = ml_dtypes.bfloat16
    q, k, v = problem(rng)
    narrow_k, narrow_v = k.astype(kv), v.astype(kv)
    o = fattn.attention(q, narrow_k, narrow_v, causal=True)
    assert o.dtype == np.float32
    close(o, oracle.attention(q, narrow_k.astype(np.float64), narrow_v.astype(np.float64), causal=True)[0])
    lengths = np.array([30, 53], np.int32)
    o = fattn.attention_with_kvcache(q[:, :1].copy(), narrow_k, narrow_v, cache_seqlens=lengths)
    close(o, oracle.attention(q[:, :1], narrow_k.astype(np.float64), narrow_v.astype(np.float64),
                              lengths_k=lengths)[0])


def quantised(a):
    """a (batch, key, head, channel) in e4m3, each sequence and head divided by a factor; the factors; their product."""
    factors = np.abs(a).max((1, 3)) / np.float32(448)
    codes = (a / factors[:, None, :, None]).astype(pytest.importorskip("ml_dtypes").float8_e4m3fn)
    return codes, factors, codes.astype(np.float64) * factors[:, None, :, None]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("sq", [1, 37])
def test_cache_in_eight_bits(rng, sq, dtype):
    """k and v in e4m3 are read as they are, and multiplied by a factor for each sequence and head."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype, tolerance = (np.float32, 2e-6) if dtype == "float32" else (getattr(ml_dtypes, dtype, dtype), 2e-2)
    q, k, v = problem(rng, sq=sq)
    q = q.astype(dtype)
    (k8, of_k, k_wide), (v8, of_v, v_wide) = quantised(k), quantised(v)
    o, lse = fattn.attention(q, k8, v8, causal=True, k_descale=of_k, v_descale=of_v, return_lse=True)
    wanted = oracle.attention(q, k_wide, v_wide, causal=True)
    assert o.dtype == q.dtype
    close(o.astype(np.float64), wanted[0], tolerance)
    close(lse, wanted[1], tolerance)
    # Other factors, by the plan that is remembered; and in layout "bhsd".
    o = fattn.attention(q, k8, v8, causal=True, k_descale=2 * of_k, v_descale=3 * of_v)
    close(o.astype(np.float64), oracle.attention(q, 2 * k_wide, 3 * v_wide, causal=True)[0], tolerance)
    heads_first = [np.ascontiguousarray(a.transpose(0, 2, 1, 3)) for a in (q, k8, v8)]
    o = fattn.attention(*heads_first, causal=True, k_descale=of_k, v_descale=of_v, layout="bhsd")
    close(o.transpose(0, 2, 1, 3).astype(np.float64), wanted[0], tolerance)
    # One of the two in 8 bits.
    q = q.astype(np.float32)
    close(fattn.attention(q, k8, v, k_descale=of_k), oracle.attention(q, k_wide, v)[0])
    close(fattn.attention(q, k, v8, v_descale=of_v), oracle.attention(q, k, v_wide)[0])


def shapes_of_factors():
    """What broadcasts to (3, 2), for k and v."""
    every = np.arange(1, 7, dtype=np.float32).reshape(3, 2) / 4
    wide = np.repeat(np.repeat(every, 2, 0), 3, 1)[::2, ::3]
    return {"(B, Hk)": (every, every[::-1].copy()), "(Hk)": (every[0], every[1]), "(B, 1)": (every[:, :1], every[:, 1:]),
            "(1)": (every[0, :1], every[1, :1]), "()": (np.array(2, np.float32), np.array(3, np.float32)),
            "numbers": (0.5, 3), "NumPy's numbers": (np.float32(0.5), np.int64(3)), "of k alone": (every, None),
            "of v alone": (None, every[0]), "a number of k alone": (0.5, None), "number and array": (2.0, every[:, :1]),
            "other shapes": (every[:, :1], every[0]), "strides of 0": (np.broadcast_to(every[0], (3, 2)), every[2:]),
            "other strides": (wide, every), "strided": (wide, wide), "strided alone": (None, wide),
            "negative strides": (every[::-1], 1.5), "Fortran's order": (np.asfortranarray(every), None)}


@pytest.mark.parametrize("name", shapes_of_factors())
def test_factors_of_a_cache(rng, name):
    q, k, v = problem(rng, b=3, sq=2)
    given = shapes_of_factors()[name]
    k8, v8 = (quantised(a)[0] for a in (k, v))
    k_wide, v_wide = (a.astype(np.float64) * np.broadcast_to(1 if factor is None else factor, (3, 2))[:, None, :, None]
                      for a, factor in zip((k8, v8), given))
    scale = 0.002
    factors = dict(k_descale=given[0], v_descale=given[1])
    close(fattn.attention(q, k8, v8, scale=scale, **factors), oracle.attention(q, k_wide, v_wide, scale=scale)[0])
    assert "e4m3" in fattn.explain(q, k8, v8, **factors)
    scores = fattn.inspect(q, k8, v8, scale=scale, **factors)
    close(scores, fattn.inspect(q, k_wide.astype(np.float32), v_wide.astype(np.float32), scale=scale).astype(np.float64))


def test_factors_of_a_wide_cache(rng):
    """Also 16-bit and 32-bit caches may be quotients."""
    q, k, v = problem(rng)
    for dtype in (np.float32, np.float16):
        narrow = k.astype(dtype), v.astype(dtype)
        close(fattn.attention(q, *narrow, k_descale=2.0, v_descale=0.25),
              oracle.attention(q, 2 * narrow[0].astype(np.float64), narrow[1].astype(np.float64) / 4)[0])


def test_factors_and_a_seed(rng):
    """Both are arrays behind all others."""
    q, k, v = problem(rng)
    (k8, of_k, k_wide), (v8, of_v, v_wide) = quantised(k), quantised(v)
    keep = fattn.dropout_mask(2, 4, 37, 53, dropout_p=0.4, seed=11, offset=3)
    o = fattn.attention(q, k8, v8, k_descale=of_k, v_descale=of_v, dropout_p=0.4, seed=np.array([11, 3]))
    close(o, oracle.attention(q, k_wide, v_wide, keep=keep, dropout_p=0.4)[0])


@pytest.mark.parametrize("sq", [1, 2, 20])
def test_pages_in_eight_bits(rng, sq):
    """What no sequence has filled is NaN."""
    q = draw(rng, 3, sq, 4, 24)
    (k8, of_k, k_wide), (v8, of_v, v_wide) = quantised(draw(rng, 3, 64, 2, 24)), quantised(draw(rng, 3, 64, 2, 16))
    used = np.array([20, 64, 31], np.int32)
    options = dict(cache_seqlens=used, causal=True, k_descale=of_k, v_descale=of_v)
    expected = oracle.attention(q, k_wide, v_wide, causal=True, lengths_k=used)[0]
    close(fattn.attention_with_kvcache(q, k8, v8, **options), expected)
    table = rng.permutation(20)[:12].reshape(3, 4).astype(np.int32)
    pages_k, pages_v = (np.full((20, 16, 2, d), np.nan, k8.dtype) for d in (24, 16))
    for b, j in np.argwhere(np.arange(64) < used[:, None]):
        pages_k[table[b, j // 16], j % 16], pages_v[table[b, j // 16], j % 16] = k8[b, j], v8[b, j]
    close(fattn.attention_with_kvcache(q, pages_k, pages_v, block_table=table, **options), expected)
    # A step of an engine: packed rows over the same pages.
    options["seqused_k"] = options.pop("cache_seqlens")
    o = fattn.attention_varlen(q.reshape(-1, 4, 24), pages_k, pages_v, cu_seqlens_q=np.arange(4, dtype=np.int32) * sq,
                               block_table=table, **options)
    close(o.reshape(3, sq, 4, 16), expected)


def test_varlen_in_eight_bits(rng):
    """The first axis of factors counts sequences, not rows."""
    cu_q, cu_k = np.array([0, 3, 20], np.int32), np.array([0, 5, 33], np.int32)
    q, k, v = draw(rng, 20, 4, 24), draw(rng, 33, 2, 24), draw(rng, 33, 2, 16)
    codes = [quantised(a[None])[0][0] for a in (k, v)]
    factors = [np.array(x, np.float32) for x in ([[1, 2], [3, 4]], [[5, 6], [7, 8]])]
    scale = 0.001
    o = fattn.attention_varlen(q, *codes, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, scale=scale, k_descale=factors[0],
                               v_descale=factors[1])
    for b in range(2):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        wide = [a[None, keys].astype(np.float64) * factor[b, :, None] for a, factor in zip(codes, factors)]
        close(o[rows], oracle.attention(q[None, rows], *wide, scale=scale)[0][0])


def test_nan_in_eight_bits(rng):
    q, k, v = problem(rng, sq=3)
    (k8, of_k, k_wide), (v8, of_v, v_wide) = quantised(k), quantised(v)
    k8[0, 7, 1, 5] = v8[1, 9, 0, 3] = np.nan
    o = fattn.attention(q, k8, v8, k_descale=of_k, v_descale=of_v)
    wrong = np.zeros(o.shape, bool)
    wrong[0, :, 2:] = wrong[1, :, :2, 3] = True
    assert (np.isnan(o) == wrong).all()
    close(o[~wrong], oracle.attention(q, k_wide, v_wide)[0][~wrong])


def test_arrays_made_of_factors_live_until_the_run(rng, monkeypatch):
    from fattn import _arrays, _plans
    q, k, v = problem(rng)
    kind, execute, made, alive = _arrays.kind_of(q), _plans._execute, [], []

    def watched(make):
        def run(*arguments):
            result = make(*arguments)
            made.extend([weakref.ref(a) for a in (result if isinstance(result, tuple) else (result,))])
            return result
        return run

    def watch(*arguments):
        alive.append([reference() is not None for reference in made])
        return execute(*arguments)

    for name in ("full", "spread"):
        monkeypatch.setattr(kind, name, watched(getattr(kind, name)))
    monkeypatch.setattr(_plans, "_execute", watch)
    fattn.attention(q, k, v, k_descale=2.0)
    assert alive.pop() == [True, True]
    made.clear()
    fattn.attention(q, k, v, k_descale=np.ones((2, 1), np.float32), v_descale=np.ones(2, np.float32))
    assert alive.pop() == [True, True]


def test_narrow_bias(rng):
    q, k, v = problem(rng)
    bias = draw(rng, 4, 37, 53, dtype=np.float16)
    close(fattn.attention(q, k, v, bias=bias), oracle.attention(q, k, v, bias=bias)[0])


@pytest.mark.parametrize("sq", [1, 5])
def test_latent_attention(rng, sq):
    q, k = draw(rng, 2, sq, 16, 576), draw(rng, 2, 70, 1, 576)
    v = k[..., :512]
    o, lse = fattn.attention(q, k, v, causal=True, return_lse=True)
    wanted = oracle.attention(q, k, v, causal=True)
    close(o, wanted[0], 4e-6)
    close(lse, wanted[1], 4e-6)


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}, {"sink": (4,)}, {"chunk": 16},
                                     {"seqused_k": [20, 53]}, {"seqstart_k": [9, 0], "causal": True}], ids=str)
def test_inspect(rng, options):
    q, k, v = problem(rng)
    options = expand(rng, options)
    scores = fattn.inspect(q, k, v, **options)
    weights = fattn.inspect(q, k, v, what="probabilities", **options)
    o, lse = fattn.attention(q, k, v, return_lse=True, **options)
    assert scores.shape == weights.shape == (2, 4, 37, 53) and scores.dtype == weights.dtype == np.float32
    assert not np.isnan(scores).any() and not np.isnan(weights).any()
    with np.errstate(divide="ignore", invalid="ignore"):
        from_scores = np.where(np.isneginf(scores), 0, np.exp(scores - lse[..., None]))
    close(weights, from_scores, 1e-5)
    close(np.einsum("bhij,bjhc->bihc", weights, np.repeat(v, 2, axis=2)), o, 1e-5)
    with pytest.raises(fattn.InvalidArgument, match="what is 'weights'"):
        fattn.inspect(q, k, v, what="weights")


def test_inspect_in_double(rng):
    q, k, v = problem(rng, dtype=np.float64)
    close(fattn.inspect(q, k, v, device="reference"),
          np.einsum("bihc,bjhc->bhij", q, np.repeat(k, 2, axis=2)) / np.sqrt(24), 1e-12)


def test_threads_share_plans(rng):
    problems = [problem(rng, sq=n) for n in (1, 5, 37)]
    expected = [fattn.attention(*p) for p in problems]
    failures = []

    def work():
        for turn in range(150):
            n = turn % 3
            if not (fattn.attention(*problems[n]) == expected[n]).all():
                failures.append(n)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_number_of_threads_is_heard():
    """What OpenMP's programs are told counts here too, whether the library was built with it or not."""
    def units(before="pass", **variables):
        environment = {k: v for k, v in os.environ.items() if not k.endswith("NUM_THREADS")} | variables
        code = f"{before}; import fattn; print(fattn.info('cpu').units)"
        return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True,
                                  env=environment).stdout)

    assert units(OMP_NUM_THREADS="1,2") == 1
    assert units(OMP_NUM_THREADS="1", FATTN_NUM_THREADS="3") == 3
    if units() > 1:
        told = "import sys, types; sys.modules['torch'] = types.SimpleNamespace(get_num_threads=lambda: 1)"
        assert units(told) == 1


def test_only_a_cpu_is_opened_again_for_torch():
    """A CPU works on PyTorch's threads once PyTorch is imported; every other device stays as it is."""
    code = ("import sys, types; from fattn import _devices; names = ('reference', 'cpu');"
            "before = [_devices.handle(n) for n in names];"
            "sys.modules['torch'] = types.SimpleNamespace(get_num_threads=lambda: 1);"
            "after = [_devices.handle(n) for n in names];"
            "print([a == b for a, b in zip(before, after)], after == [_devices.handle(n) for n in names])")
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.split() == ["[True,", "False]", "True"]


def test_device_that_cannot_be_opened_again(monkeypatch):
    """Leaves nothing open."""
    from fattn import _c, _devices
    monkeypatch.setattr(_devices, "_threads", lambda: 1)
    monkeypatch.delenv("FATTN_NUM_THREADS", raising=False)
    closed, close_device = [], _c.lib.fattn_device_close

    def close(device):
        closed.append(device.value)
        close_device(device)
    monkeypatch.setattr(_c.lib, "fattn_device_close", close)
    monkeypatch.setattr(_c.lib, "fattn_device_open_with", lambda *_: fattn.OutOfMemory.status)
    before = dict(_devices._infos)
    with pytest.raises(fattn.OutOfMemory):
        _devices._open("cpu")
    assert len(closed) == 1 and _devices._infos == before


@pytest.mark.parametrize("before", ["import fattn", "", "import fattn; fattn.attention(a, a, a)"])
def test_child_of_a_fork(before):
    """Whose parent has worked with PyTorch's OpenMP, with and without fattn."""
    pytest.importorskip("torch")
    code = f"""
import multiprocessing, numpy as np, torch
a = np.random.default_rng(1).standard_normal((4, 256, 8, 64)).astype("f")
torch.set_num_threads(2)
torch.randn(10**6).sum()
{before}
def child(pipe):
    import fattn
    pipe.send(fattn.attention(a, a, a).sum())
context = multiprocessing.get_context("fork")
here, there = context.Pipe()
process = context.Process(target=child, args=(there,), daemon=True)
process.start()
if not here.poll(60):
    process.kill()
    raise SystemExit("the child hangs")
import fattn
assert here.recv() == fattn.attention(a, a, a).sum()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_memory_does_not_grow(rng):
    q, k, v = problem(rng, sq=3, sk=9)

    def resident():
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096

    def calls(n):
        for turn in range(n):
            o, lse = fattn.attention(q, k[:, :1 + turn % 9], v[:, :1 + turn % 9], causal=True,
                                     return_lse=True)
            if turn % 10 == 0:
                fattn.attention_backward(o, q, k[:, :1 + turn % 9], v[:, :1 + turn % 9], o, lse,
                                         causal=True)

    calls(1000)
    grown = []
    for _ in range(3):  # Python takes and gives back a megabyte now and then: what is lost is lost each time
        before = resident()
        calls(20000)
        grown.append(resident() - before)
    assert min(grown) < 1 << 20, grown  # 52 bytes a call


def test_plans_are_forgotten(rng):
    """More problems than are remembered: the oldest go, and results stay right."""
    from fattn import _plans
    q, k, v = draw(rng, 1, 1, 1, 8), draw(rng, 1, 700, 1, 8), draw(rng, 1, 700, 1, 8)
    for n in range(1, 700):
        o = fattn.attention(q, k[:, :n], v[:, :n])
    assert len(_plans._cache) <= _plans._LIMIT
    close(o, oracle.attention(q, k[:, :699], v[:, :699])[0])
    close(fattn.attention(q, k[:, :3], v[:, :3]), oracle.attention(q, k[:, :3], v[:, :3])[0])


def test_import_takes_no_numpy():
    code = ("import sys; before = set(sys.modules); import fattn; "
            "sys.exit(bool((set(sys.modules) - before) & {'numpy', 'torch', 'inspect'}))")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_is_quick():
    """Other people's libraries are imported when one of their arrays comes, and few of Python's own at all:
    what takes time is counted, for a time would depend on the machine."""
    code = ("import sys; before = set(sys.modules); import fattn; "
            "print(*sorted(name for name in set(sys.modules) - before if not name.startswith('fattn')))")
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    assert len(loaded) < 40


def test_interpreter_ends_quietly():
    """Plans and workspaces are freed even if someone still holds a module, whose names are gone by then."""
    code = ("import ctypes, numpy as np, fattn, fattn._plans as plans; a = np.ones((1, 64, 2, 64), np.float32); "
            "fattn.attention_backward(a, a, a, a, *fattn.attention(a, a, a, return_lse=True)); "
            "assert plans._workspaces; ctypes.pythonapi.Py_IncRef(ctypes.py_object(plans))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


def test_environment_is_honoured(rng):
    """FATTN_BACKEND chooses for arrays in host memory, and a bad value is the library's error."""
    code = ("import numpy as np, fattn; a = np.zeros((1, 2, 1, 4)); fattn.attention(a, a, a); "
            "print(fattn.info().backend)")
    import os
    for value, word in (("reference", "reference"), ("abacus", "UnknownDevice")):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                              env=os.environ | {"FATTN_BACKEND": value})
        assert word in done.stdout + done.stderr
