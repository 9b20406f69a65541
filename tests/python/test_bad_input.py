# SPDX-License-Identifier: Apache-2.0
"""What is wrong is an exception that says what, before anything is written."""

import fattn
import numpy as np
import pytest


def arrays():
    rng = np.random.default_rng(3)
    return [rng.standard_normal(shape).astype(np.float32)
            for shape in ((2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 6))]


def change(**changed):
    """q, k, v and options, of which some are changed by name."""
    q, k, v = arrays()
    given = {"q": q, "k": k, "v": v}
    for name, value in changed.items():
        given[name] = value(given.get(name)) if callable(value) else value
    return given


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


CASES = [
    # what, exception, words of its sentence
    (dict(q=lambda a: a[0]), fattn.InvalidShape, "q has shape .* rank 3: rank 4"),
    (dict(k=lambda a: a[None]), fattn.InvalidShape, "k has shape .* rank 5"),
    (dict(v=lambda a: a.astype(np.float64)), fattn.InvalidArgument, "v has dtype float64, q float32: float64 does not mix"),
    (dict(k=lambda a: a.astype(np.int64)), fattn.InvalidArgument,
     "k has dtype int64, not float32 or float16 or bfloat16 or float8_e4m3fn$"),
    (dict(q=lambda a: a.astype(np.int32)), fattn.InvalidArgument, "q has dtype int32"),
    (dict(q=lambda a: a.astype(np.complex64)), fattn.InvalidArgument, "q has dtype complex64"),
    (dict(q=lambda a: a.astype(">f4")), fattn.InvalidArgument, "byte order"),
    (dict(q=lambda a: np.asfortranarray(a)), fattn.InvalidStride, "q has channels .* apart"),
    (dict(q=lambda a: np.repeat(a, 2, 3)[..., ::2]), fattn.InvalidStride, "q has channels 2 .* apart"),
    (dict(q=lambda a: a[..., ::-1]), fattn.InvalidStride, "q has channels -1 .* apart"),
    (dict(k=lambda a: a[:, ::-1]), fattn.InvalidStride, "seq stride of k is -16, negative"),
    (dict(q=lambda a: a[:1]), fattn.InvalidShape, "k has batch size 2, q 1"),
    (dict(v=lambda a: a[:, 1:]), fattn.InvalidShape, "v has length 8, k 9"),
    (dict(v=lambda a: a[:, :, :1]), fattn.InvalidShape, "v has heads 1, k 2"),
    (dict(k=lambda a: a[..., :5]), fattn.InvalidShape, "k has channels 5, q 8"),
    (dict(q=lambda a: a[:, :, :3]), fattn.InvalidShape, "heads_q is 3, not a multiple of heads_k, 2$"),
    (dict(q=lambda a: zeros(2, 7, 4, 0), k=lambda a: zeros(2, 9, 2, 0)), fattn.InvalidShape, "dim is 0"),
    (dict(layout="sbhd"), fattn.InvalidArgument, "layout is 'sbhd'"),
    (dict(anchor="middle"), fattn.InvalidArgument, "anchor is 'middle'"),
    (dict(scale=float("nan")), fattn.InvalidArgument, "scale is nan"),
    (dict(softcap=-1.0), fattn.InvalidArgument, "softcap is -1"),
    (dict(dropout_p=1.5), fattn.InvalidArgument, "dropout_p is 1.5"),
    (dict(dropout_p=float("nan")), fattn.InvalidArgument, "dropout_p is nan"),
    (dict(dropout_p=0.5, seed=-1), fattn.InvalidArgument, "seed is -1"),
    (dict(dropout_p=0.5, seed=None), fattn.InvalidArgument, "seed is None: dropout needs"),
    (dict(dropout_p=0.5, offset=1.5), fattn.InvalidArgument, "offset is 1.5, not an integer"),
    (dict(dropout_p=0.5, seed=zeros(2)), fattn.InvalidArgument, "seed has dtype float32"),
    (dict(window=(-5, 0)), fattn.InvalidArgument, "window_left is -5"),
    (dict(window=(1.9, 0)), fattn.InvalidArgument, r"window is \(1.9, 0\)"),
    (dict(window=(3,)), fattn.InvalidArgument, r"window is \(3,\)"),
    (dict(window=2.0), fattn.InvalidArgument, "window is 2.0"),
    (dict(device=3), fattn.InvalidArgument, "device is 3"),
    (dict(scale=10**400), fattn.InvalidArgument, "scale is an integer too large"),
    (dict(positions=3), fattn.InvalidArgument, "positions is 3, not"),
    (dict(scale="0.5"), fattn.InvalidArgument, "scale is '0.5', not a number"),
    (dict(softcap=[1.0, 2.0]), fattn.InvalidArgument, r"softcap is \[1.0, 2.0\], of type list: one value"),
    (dict(dropout_p="x"), fattn.InvalidArgument, "dropout_p is 'x', not a number"),
    (dict(causal="yes"), fattn.InvalidArgument, "causal is 'yes', neither True nor False"),
    (dict(causal=2), fattn.InvalidArgument, "causal is 2"),
    (dict(q=lambda a: a.astype(np.complex64)), fattn.InvalidArgument, "q has dtype complex64.*float16, bfloat16, float64$"),
    (dict(chunk=1.5), fattn.InvalidArgument, "chunk is 1.5, not an integer"),
    (dict(chunk=2**64 + 4), fattn.InvalidArgument, r"chunk is 18446744073709551620, not in -2\^63..2\^63-1"),
    (dict(window=(2**70, 0)), fattn.InvalidArgument, "window_left is 1180591620717411303424, not in"),
    (dict(window=-2**64), fattn.InvalidArgument, "window_left is -18446744073709551616, not in"),
    (dict(dropout_p=0.5, batch_offset=2**64 + 1), fattn.InvalidArgument, "batch_offset is 18446744073709551617"),
    (dict(dropout_p=0.5, head_offset=2**63), fattn.InvalidArgument, "head_offset is 9223372036854775808"),
    (dict(block_mask=zeros(1, 1, dtype=bool), block_size=(2**64 + 7, 9)), fattn.InvalidArgument, "block_m is 184467"),
    (dict(positions=(2**63, 0, -1, -1)), fattn.InvalidArgument, "q_offset is 9223372036854775808"),
    (dict(positions=(0, 0)), fattn.InvalidArgument, r"positions is \(0, 0\), not \(q_offset, k_offset, whole_q, "),
    (dict(block_mask=zeros(1, 1, dtype=bool), block_size=4), fattn.InvalidArgument, "block_size is 4"),
    (dict(block_mask=zeros(1, 1, dtype=bool), block_size=[4, 4, 4]), fattn.InvalidArgument, r"block_size is \[4, 4, 4"),
    (dict(q=lambda a: np.ma.array(a, mask=a > 0)), fattn.InvalidArgument, "masked array"),
    (dict(mask=np.ma.array(zeros(7, 9, dtype=bool))), fattn.InvalidArgument, "masked array"),
    (dict(bias=zeros(2, 3, 7, 9)), fattn.InvalidShape, "bias has shape .* does not broadcast"),
    (dict(bias=zeros(7, 9, dtype=np.float64)), fattn.InvalidArgument, "bias has dtype float64"),
    (dict(mask=zeros(7, 9)), fattn.InvalidArgument, "mask has dtype float32"),
    (dict(mask=zeros(8, 9, dtype=bool)), fattn.InvalidShape, "mask has shape"),
    (dict(block_mask=zeros(1, 1, dtype=bool)), fattn.InvalidArgument, "block_size is needed"),
    (dict(block_mask=zeros(1, 1, dtype=bool), block_size=(0, 4)), fattn.InvalidShape, "block_m is 0|broadcast"),
    (dict(block_size=(4, 4)), fattn.InvalidArgument, "block_size is given without block_mask"),
    (dict(sink=zeros(3)), fattn.InvalidShape, r"sink has shape \(3,\), not \(4,\)"),
    (dict(sink=zeros(8)[::2]), fattn.InvalidStride, "sink has elements 2 apart"),
    (dict(alibi_slopes=zeros(3, 4)), fattn.InvalidShape, "alibi_slopes has shape"),
    (dict(seqused_k=zeros(2, dtype=np.int64)), fattn.InvalidArgument, "seqused_k has dtype int64"),
    (dict(seqused_k=np.array([1, 99], np.int32)), fattn.InvalidData, r"seqused_k\[1\] is 99"),
    (dict(out_dtype="int32"), fattn.InvalidArgument, "o would have dtype int32, not float32$"),
    (dict(out_dtype=np.dtype("float16")), fattn.InvalidArgument, "o would have dtype float16, not float32$"),
    (dict(device="abacus"), fattn.UnknownDevice, "abacus"),
    (dict(device="cpu:9"), fattn.NoDevice, "9"),
    (dict(q=lambda a: zeros(1, 7, 4, 577), k=lambda a: zeros(1, 9, 2, 577), v=lambda a: zeros(1, 9, 2, 6)),
     fattn.InvalidShape, "577"),
    (dict(q=lambda a: a.astype(np.float64), k=lambda a: a.astype(np.float64),
          v=lambda a: a.astype(np.float64)), fattn.Unsupported,
     r'convert q, k and v to float32, or call attention\(..., device="reference"\)'),
    (dict(q=lambda a: a.swapaxes(1, 2), k=lambda a: a.swapaxes(1, 2), v=lambda a: a.swapaxes(1, 2)), fattn.InvalidShape,
     r"heads_q is 7, not a multiple of heads_k, 9: shapes \(2, 4, 7, 8\) and \(2, 2, 9, 8\) .* pass layout=\"bhsd\"$"),
    (dict(q=lambda a: a[0]), fattn.InvalidShape, r"for packed sequences attention_varlen\(\) with cu_seqlens_q$"),
    (dict(q=lambda a: np.frombuffer(bytearray(a.tobytes() + b"...."), np.uint8)[1:-3].view(np.float32)
          .reshape(a.shape)), fattn.Misaligned, "q is 0x.*, not a multiple of 4"),
    (dict(q=lambda a: a.tolist()), TypeError, "q is of type list, which is not an array"),
    (dict(q=None), TypeError, "q is of type NoneType, which is not an array"),
    (dict(k=None), TypeError, "k is of type NoneType"),
    (dict(v=None, causal=True, sink=zeros(4)), TypeError, "v is of type NoneType"),
    (dict(mask=[[True] * 9] * 7), TypeError, "mask is of type list"),
    (dict(seqused_k=[1, 2]), TypeError, "seqused_k is of type list"),
    (dict(dropout_p=0.5, seed=1.5), TypeError, "seed is of type float"),
    (dict(positions=(0, 1.0, -1, -1)), TypeError, "k_offset is of type float"),
    (dict(causal=np.array([True, False])), fattn.InvalidArgument, r"causal is array\(\[ True, False\]\), of type ndarray"),
]


@pytest.mark.parametrize("changed, exception, words", CASES, ids=[c[2][:40] for c in CASES])
def test_forward(changed, exception, words):
    given = change(**changed)
    q = given.pop("q")
    with pytest.raises(exception, match=words):
        fattn.attention(q, **given)
    out = np.full((2, 7, 4, 6), 42, np.float32)
    with pytest.raises((fattn.Error, TypeError)):
        fattn.attention(q, out=out, **given)
    assert (out == 42).all()


OUTPUTS = [
    (dict(out=lambda q: zeros(2, 7, 4, 5)), fattn.InvalidShape, "o has shape"),
    (dict(out=lambda q: zeros(2, 7, 4, 6, dtype=np.float64)), fattn.InvalidArgument, "dtype float64"),
    (dict(out=lambda q: np.broadcast_to(zeros(1, 7, 4, 6), (2, 7, 4, 6))), fattn.InvalidArgument,
     "o is read-only"),
    (dict(out=lambda q: np.lib.stride_tricks.as_strided(zeros(400), (2, 7, 4, 6), (0, 96, 24, 4))),
     fattn.Overlap, "o overlaps itself"),
    (dict(out=lambda q: q[..., :6]), fattn.Overlap, "o overlaps q"),
    (dict(out=lambda q: zeros(2, 7, 4, 12)[..., ::2]), fattn.InvalidStride, "o has channels 2"),
    (dict(lse=lambda q: zeros(2, 7, 4)), fattn.InvalidShape, "lse has shape"),
    (dict(lse=lambda q: zeros(2, 7, 4).transpose(0, 2, 1)), fattn.InvalidStride, "lse has strides"),
    (dict(lse=lambda q: zeros(2, 4, 7, dtype=np.float16)), fattn.InvalidArgument, "lse has dtype"),
]


@pytest.mark.parametrize("outputs, exception, words", OUTPUTS, ids=[c[2] for c in OUTPUTS])
def test_outputs(outputs, exception, words):
    q, k, v = arrays()
    with pytest.raises(exception, match=words):
        fattn.attention(q, k, v, **{name: make(q) for name, make in outputs.items()})


def test_read_only_outputs(tmp_path):
    """Also of a layout for which an array that may be written has left a plan behind."""
    q, k, v = arrays()
    out, lse = fattn.attention(q, k, v, return_lse=True)
    fattn.attention(q, k, v, out=out, lse=lse)
    gradients = {name: np.empty_like(a) for name, a in zip(("dq", "dk", "dv"), (q, k, v))}
    fattn.attention_backward(out, q, k, v, out, lse, **gradients)

    def immutable(a):
        return np.frombuffer(bytes(a.nbytes), np.float32).reshape(a.shape)

    def mapped(a):
        path = tmp_path / "zeros"
        path.write_bytes(bytes(a.nbytes))
        return np.memmap(path, np.float32, "r", shape=a.shape)

    for made in (immutable, mapped):
        for name, array in {"o": out, "lse": lse}.items():
            a = made(array)
            given = {"out": out, "lse": lse} | {name if name == "lse" else "out": a}
            with pytest.raises(fattn.InvalidArgument, match=f"{name} is read-only"):
                fattn.attention(q, k, v, **given)
            assert not a.any()
        for name, array in gradients.items():
            a = made(array)
            with pytest.raises(fattn.InvalidArgument, match=f"{name} is read-only"):
                fattn.attention_backward(out, q, k, v, out, lse, **gradients | {name: a})
            assert not a.any()


def test_backward():
    q, k, v = arrays()
    o, lse = fattn.attention(q, k, v, return_lse=True)
    right = dict(dout=o, q=q, k=k, v=v, o=o, lse=lse)
    for name, value, exception, words in (
            ("dout", o[:1], fattn.InvalidShape, "dout has shape"),
            ("dout", o.astype(np.float16), fattn.InvalidArgument, "dout has dtype float16"),
            ("lse", lse[:, :2], fattn.InvalidShape, "lse has shape"),
            ("dlse", lse.astype(np.float64), fattn.InvalidArgument, "dlse has dtype float64"),
            ("want", ("dx",), fattn.InvalidArgument, "want has 'dx'"),
            ("want", ("dbias",), fattn.InvalidArgument, "there is no bias"),
            ("want", ("dsink",), fattn.InvalidArgument, "there is no sink"),
            ("accumulate", True, fattn.InvalidArgument, "accumulate adds to dq, which is wanted but not given"),
            ("dq", zeros(2, 7, 4, 7), fattn.InvalidShape, "dq has shape"),
            ("dout", None, TypeError, "dout is of type NoneType"),
            ("lse", None, TypeError, "lse is of type NoneType"),
            ("causal", [True], fattn.InvalidArgument, r"causal is \[True\], of type list"),
            ("dq", q, fattn.Overlap, "dq overlaps q|q overlaps dq")):
        given = right | {name: value}
        with pytest.raises(exception, match=words):
            fattn.attention_backward(**given)


def test_varlen():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((10, 2, 8)).astype(np.float32)
    cu = np.array([0, 4, 10], np.int32)
    fattn.attention_varlen(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu)
    for changed, exception, words in (
            (dict(cu_seqlens_q=cu.astype(np.int64)), fattn.InvalidArgument, "int32"),
            (dict(cu_seqlens_k=cu[:2]), fattn.InvalidShape, "sequences"),
            (dict(cu_seqlens_q=np.array([0, 4, 99], np.int32), max_seqlen_q=6), fattn.InvalidData,
             r"cu_seqlens_q\[2\] is 99"),
            (dict(cu_seqlens_q=np.array([0, 7, 4], np.int32), max_seqlen_q=7), fattn.InvalidData,
             "less than"),
            (dict(max_seqlen_q=6.5), fattn.InvalidArgument, "max_seqlen_q is 6.5, not an integer"),
            (dict(max_seqlen_q=2**64 + 6), fattn.InvalidArgument, "max_seqlen_q is 18446744073709551622, not in"),
            (dict(max_seqlen_q=3), fattn.InvalidData, "longer than the problem's 3"),
            (dict(max_seqlen_q=0), fattn.InvalidData, "longer than the problem's 0"),
            (dict(cu_seqlens_q=cu.reshape(1, 3)), fattn.InvalidShape, "cu_seqlens_q has shape"),
            (dict(cu_seqlens_q=None), TypeError, "cu_seqlens_q is of type NoneType")):
        given = dict(cu_seqlens_q=cu, cu_seqlens_k=cu) | changed
        with pytest.raises(exception, match=words):
            fattn.attention_varlen(q, q, q, **given)


def test_maximum_that_is_not_read():
    """A longest length is an error where arrays are not packed and have no pages."""
    q, k, v = arrays()
    o, lse = fattn.attention(q, k, v, return_lse=True)
    cu = np.array([0, 3, 7], np.int32)
    for call, name, without in (
            (lambda n: fattn.attention_with_kvcache(q, k, v, max_seqlen_k=n), "k", "cu_seqlens_k or block_table"),
            (lambda n: fattn.attention_varlen(q[0], k, v, cu_seqlens_q=cu, max_seqlen_k=n), "k",
             "cu_seqlens_k or block_table"),
            (lambda n: fattn.attention_backward(o, q, k, v, o, lse, max_seqlen_q=n), "q", "cu_seqlens_q"),
            (lambda n: fattn.attention_backward(o, q, k, v, o, lse, max_seqlen_k=n), "k", "cu_seqlens_k"),
            (lambda n: fattn.Plan(q, k, v, max_seqlen_q=n), "q", "cu_seqlens_q"),
            (lambda n: fattn.explain(q, k, v, max_seqlen_k=n), "k", "cu_seqlens_k or")):
        for n in (3, 9, -1):
            with pytest.raises(fattn.InvalidArgument, match=f"max_seqlen_{name} is given without {without}"):
                call(n)
        with pytest.raises(fattn.InvalidArgument, match=f"max_seqlen_{name} is "):
            call(2.5)
        call(None)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


EIGHT_BITS = [
    (dict(q="float8_e4m3fn"), {}, fattn.InvalidArgument, "q has dtype float8_e4m3fn, not one of float32"),
    (dict(k="float8_e5m2"), {}, fattn.InvalidArgument, "k has dtype float8_e5m2, which is not one of .*float8_e4m3fn$"),
    (dict(v="float8_e4m3fnuz"), {}, fattn.InvalidArgument, "v has dtype float8_e4m3fnuz, which is not"),
    (dict(v="float8_e5m2fnuz"), {}, fattn.InvalidArgument, "v has dtype float8_e5m2fnuz, which is not"),
    (dict(k="float8_e4m3"), {}, fattn.InvalidArgument, "k has dtype float8_e4m3, which is not"),
    (dict(q="float64"), dict(device="reference"), fattn.InvalidArgument, "k has dtype float8_e4m3fn, q float64"),
    ({}, dict(bias="float8_e4m3fn"), fattn.InvalidArgument, "bias has dtype float8_e4m3fn, not float32 or"),
    ({}, dict(sink="float8_e4m3fn"), fattn.InvalidArgument, "sink has dtype float8_e4m3fn, not float32"),
    ({}, dict(out_dtype="float8_e4m3fn"), fattn.InvalidArgument, "o would have dtype float8_e4m3fn"),
    ({}, dict(k_descale=ones(2, dtype=np.float16)), fattn.InvalidArgument, "k_descale has dtype float16, not float32"),
    ({}, dict(v_descale=ones(2, dtype=np.float64)), fattn.InvalidArgument, "v_descale has dtype float64, not float32"),
    ({}, dict(k_descale=ones(4)), fattn.InvalidShape, r"k_descale or .* shape \(4,\), which .* broadcast to \(2, 2\)"),
    ({}, dict(k_descale=ones(2, 3), v_descale=ones(2, 2)), fattn.InvalidShape, r"shape \(2, 3\), which does not"),
    ({}, dict(k_descale=ones(2), v_descale=ones(3, 1)), fattn.InvalidShape, r"shape \(3, .\), which does not"),
    ({}, dict(v_descale=ones(1, 2, 2)), fattn.InvalidShape, "rank 3: at most 2 axes"),
    ({}, dict(k_descale=ones(1, 2, 1, 1), v_descale=ones(2, 2)), fattn.InvalidShape, "rank 4: at most 2 axes"),
    ({}, dict(k_descale=[1.0, 2.0]), TypeError, "k_descale is of type list"),
    ({}, dict(v_descale="2"), TypeError, "v_descale is of type str"),
    ({}, dict(v_descale=1j), TypeError, "v_descale is of type complex"),
]


@pytest.mark.parametrize("dtypes, options, exception, words", EIGHT_BITS, ids=[c[3][:40] for c in EIGHT_BITS])
def test_eight_bits(dtypes, options, exception, words):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    shapes = dict(bias=(7, 9), sink=(4,))

    def as_type(a, name):
        return a.astype(getattr(ml_dtypes, name, name))

    q, k, v = arrays()
    given = {name: as_type(a, dtypes.get(name, "float32" if name == "q" else "float8_e4m3fn"))
             for name, a in zip("qkv", (q, k, v))}
    options = {name: as_type(zeros(*shapes[name]), value) if name in shapes else value for name, value in options.items()}
    with pytest.raises(exception, match=words):
        fattn.attention(*given.values(), **options)
    with pytest.raises(exception, match=words):
        fattn.explain(*given.values(), **options)


def test_backward_of_eight_bits():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = arrays()
    k8, v8 = (a.astype(ml_dtypes.float8_e4m3fn) for a in (k, v))
    o, lse = fattn.attention(q, k8, v8, return_lse=True)
    for want in (("dq",), ("dq", "dk", "dv")):
        with pytest.raises(fattn.Unsupported, match="dtype_kv is e4m3 in a backward"):
            fattn.attention_backward(o, q, k8, v8, o, lse, want=want)
        with pytest.raises(fattn.Unsupported, match="dtype_v is e4m3 in a backward"):
            fattn.attention_backward(o, q, k, v8, o, lse, want=want)
    for arrays_of_plan, words in ((k8, v8), "dtype_kv is e4m3"), ((k, v), "FATTN_DESCALE in a backward"):
        with pytest.raises(fattn.Unsupported, match=words):
            fattn.Plan(q, *arrays_of_plan, k_descale=2.0, backward=True)


def test_numbers_equal_to_right_ones():
    """Are errors also where the right ones have left a plan behind."""
    q, k, v = arrays()
    p, cu = q[0], np.array([0, 7], np.int32)
    for chunk, longest in ((5.0, 7.0), (5, 7), (5.0, 7.0)):
        calls = (("chunk", lambda: fattn.attention(q, k, v, chunk=chunk)),
                 ("max_seqlen_q", lambda: fattn.attention_varlen(p, p, p, cu_seqlens_q=cu, cu_seqlens_k=cu,
                                                                 max_seqlen_q=longest, max_seqlen_k=7)))
        for name, call in calls:
            if isinstance(chunk, int):
                call()
                continue
            with pytest.raises(fattn.InvalidArgument, match=f"{name} is .*, not an integer"):
                call()


def test_dropout_mask():
    for name in ("batch_offset", "head_offset", "q_offset", "k_offset"):
        for value in (2**64, 1.5):
            with pytest.raises(fattn.InvalidArgument, match=f"{name} is {value}, not"):
                fattn.dropout_mask(1, 1, 2, 2, dropout_p=0.5, **{name: value})
    for changed, words in ((dict(dropout_p="x"), "dropout_p is 'x', not a number"), (dict(batch=1.0), "batch is 1.0, not"),
                           (dict(seed=zeros(2, dtype=np.int64)), r"seed is array\(\[0, 0\]\), not an integer")):
        with pytest.raises(fattn.InvalidArgument, match=words):
            fattn.dropout_mask(**dict(batch=1, heads=1, seqlen_q=2, seqlen_k=2, dropout_p=0.5) | changed)


def test_device():
    with pytest.raises(fattn.InvalidArgument, match="device is 3, not a name"):
        fattn.info(3)


def test_pages():
    rng = np.random.default_rng(0)
    q, pages = (rng.standard_normal(s).astype(np.float32) for s in ((2, 1, 2, 8), (5, 4, 2, 8)))
    table, used = np.array([[0, 1], [2, 7]], np.int32), np.array([4, 8], np.int32)
    with pytest.raises(fattn.InvalidData, match="block_table"):
        fattn.attention_with_kvcache(q, pages, pages, cache_seqlens=used, block_table=table)
    for wrong, exception in ((used + 9, fattn.InvalidData), (used.astype(np.int64), fattn.InvalidArgument)):
        with pytest.raises(exception, match="cache_seqlens"):
            fattn.attention_with_kvcache(q, pages, pages, cache_seqlens=wrong, block_table=table)
    with pytest.raises(fattn.InvalidShape, match="block_table has shape"):
        fattn.attention_with_kvcache(q, pages, pages, cache_seqlens=used, block_table=table[0])
    with pytest.raises(fattn.InvalidShape, match="v has pages"):
        fattn.attention_with_kvcache(q, pages, pages[:3], cache_seqlens=used, block_table=table[:, :1])


def test_merge():
    o, lse = zeros(1, 3, 2, 4), zeros(1, 2, 3)
    for args, exception, words in (
            ((o.astype(np.float16), lse, o, lse), fattn.InvalidArgument, "o1 has dtype float16"),
            ((o, lse, o[:, :2], lse), fattn.InvalidShape, "o2 has shape"),
            ((o, lse, o, lse[0]), fattn.InvalidShape, "lse2 has shape"),
            ((o, lse, o[..., ::-1], lse), fattn.InvalidStride, "o2 has channels -1"),
            ((o, lse, o, 3.0), TypeError, "lse2 is of type float")):
        with pytest.raises(exception, match=words):
            fattn.merge(*args)


def test_mixed_libraries():
    class Other:
        """An array of another library, by DLPack."""

        def __init__(self, a):
            self.a = a

        def __dlpack__(self, **options):
            return self.a.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.a.__dlpack_device__()

    q, k, v = arrays()
    with pytest.raises(fattn.InvalidArgument, match="k is a dlpack array, q a numpy array"):
        fattn.attention(q, Other(k), v)
    factors = [Other(zeros(2, 2)) for _ in range(2)]
    with pytest.raises(fattn.Unsupported, match="has no from_dlpack"):
        fattn.attention(Other(q), Other(k), Other(v), k_descale=factors[0], v_descale=factors[1])
    for k_descale in (2.0, Other(zeros(2))):
        with pytest.raises(fattn.Unsupported, match="has no __array_namespace__, so k_descale and v_descale must be"):
            fattn.attention(Other(q), Other(k), Other(v), k_descale=k_descale, v_descale=factors[1])
    with pytest.raises(fattn.InvalidArgument, match="v_descale is a dlpack array, q a numpy array"):
        fattn.attention(q, k, v, v_descale=factors[0])
