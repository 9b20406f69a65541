# SPDX-License-Identifier: Apache-2.0
"""The functions on CuPy's arrays: agreement with NumPy's, streams, memory."""

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
try:
    cupy.cuda.runtime.getDeviceCount()
except cupy.cuda.runtime.CUDARuntimeError:
    pytest.skip("no GPU that CuPy can use", allow_module_level=True)

import fattn  # noqa: E402

OPTIONS = {"plain": {}, "causal": {"causal": True}, "window": {"window": (40, 3)}, "softcap": {"softcap": 8.0},
           "bias": {"bias": (4, 90, 130)}, "mask": {"mask": (2, 1, 90, 130)}, "sink": {"sink": (4,)},
           "alibi": {"alibi_slopes": (2, 4)}, "dropout": {"dropout_p": 0.25, "seed": 5}}


def tensors(dtype=np.float16, b=2, sq=90, sk=130, hq=4, hk=2, d=64):
    rng = np.random.default_rng(3)
    return [rng.standard_normal((b, n, h, d)).astype(dtype) for n, h in ((sq, hq), (sk, hk), (sk, hk))]


def drawn(options):
    """Shapes become arrays, those of masks booleans."""
    rng = np.random.default_rng(4)
    made = {}
    for name, value in options.items():
        if name in ("bias", "mask", "sink", "alibi_slopes"):
            array = rng.standard_normal(value).astype(np.float32)
            value = array > -1 if name == "mask" else np.abs(array) if name == "alibi_slopes" else array
        made[name] = value
    return made


def on_gpu(options):
    return {name: cupy.asarray(a) if isinstance(a, np.ndarray) else a for name, a in options.items()}


def close(got, wanted, tolerance=4e-3):
    assert isinstance(got, cupy.ndarray) and got.shape == wanted.shape and got.dtype == wanted.dtype
    np.testing.assert_allclose(cupy.asnumpy(got).astype(np.float64), wanted.astype(np.float64),
                               rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", OPTIONS)
def test_as_with_numpy(name, dtype):
    given, options = tensors(dtype), drawn(OPTIONS[name])
    o, lse = fattn.attention(*map(cupy.asarray, given), return_lse=True, **on_gpu(options))
    wanted, row_sums = fattn.attention(*given, return_lse=True, **options)
    close(o, wanted)
    close(lse, row_sums)
    dout = np.random.default_rng(5).standard_normal(o.shape).astype(dtype)
    got = fattn.attention_backward(cupy.asarray(dout), *map(cupy.asarray, given), o, lse, **on_gpu(options))
    other = fattn.attention_backward(dout, *given, wanted, row_sums, **options)
    for of in ("dq", "dk", "dv"):
        close(getattr(got, of), getattr(other, of), 1e-2)


def test_views_and_outputs():
    """Strides are taken as they are, and results written where the caller wants them."""
    q, k, v = tensors(np.float32, sk=90, hk=4)
    packed = cupy.asarray(np.stack((q, k, v), axis=2))
    out = cupy.full((2, 90, 8, 64), 7, np.float32)
    o = fattn.attention(packed[:, :, 0], packed[:, :, 1], packed[:, :, 2], out=out[:, :, ::2])
    assert o.data.ptr == out.data.ptr
    close(cupy.ascontiguousarray(out[:, :, ::2]), fattn.attention(q, k, v), 1e-5)
    assert (out[:, :, 1::2] == 7).all()


def test_varlen_and_cache():
    q, k, v = tensors(np.float32, b=1)
    ends_q, ends_k = np.array([0, 31, 90], np.int32), np.array([0, 50, 130], np.int32)
    options = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, "max_seqlen_q": 59, "max_seqlen_k": 80, "causal": True}
    close(fattn.attention_varlen(*(cupy.asarray(a[0]) for a in (q, k, v)), **on_gpu(options)),
          fattn.attention_varlen(q[0], k[0], v[0], **options), 1e-5)
    pages = [np.random.default_rng(6).standard_normal((9, 16, 2, 64)).astype(np.float32) for _ in range(2)]
    table, used = np.array([[3, 1, 7], [8, 0, 2]], np.int32), np.array([37, 48], np.int32)
    q = tensors(np.float32, sq=2)[0]
    options = {"block_table": table, "cache_seqlens": used, "causal": True}
    close(fattn.attention_with_kvcache(cupy.asarray(q), *map(cupy.asarray, pages), **on_gpu(options)),
          fattn.attention_with_kvcache(q, *pages, **options), 1e-5)


@pytest.mark.parametrize("blocking", [True, False])
def test_current_stream(blocking):
    """Work is queued behind what makes its inputs, on the stream that is current, and the host does not wait."""
    given = [cupy.asarray(a) for a in tensors()]
    wanted = fattn.attention(*given)
    slow = cupy.RawKernel("""extern "C" __global__ void wait() {
        const long long begin = clock64();
        while (clock64() - begin < 100000000) {}
    }""", "wait")
    slow.compile()
    late = [cupy.zeros_like(a) for a in given]
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=not blocking)
    with stream:
        slow((1,), (1,), ())
        for a, b in zip(late, given):
            a.data.copy_from_device_async(b.data, b.nbytes)
        o = fattn.attention(*late)
        waited = stream.done
    assert not waited
    stream.synchronize()
    assert (o == wanted).all()


def test_many_calls():
    """Memory of CuPy's pool stays the same, and later work does not disturb a workspace that is in use."""
    q, k, v = (cupy.asarray(a) for a in tensors(sq=1, sk=4096))  # parts of keys meet in a workspace
    wanted = fattn.attention(q, k, v)
    pool = cupy.get_default_memory_pool()
    before = pool.total_bytes()
    for _ in range(300):
        o = fattn.attention(q, k, v)
        other = cupy.full((64, 1024), 3, np.float32)
    assert (o == wanted).all() and (other == 3).all()
    assert pool.total_bytes() <= before + 2 * other.nbytes


def test_what_is_refused():
    q, k, v = tensors()
    a, b, c = (cupy.asarray(x) for x in (q, k, v))
    for given in ((a, k, v), (q, b, c)):
        with pytest.raises((fattn.Error, TypeError)):
            fattn.attention(*given)
    with pytest.raises((fattn.Error, TypeError)):
        fattn.attention(a.astype(np.int32), b, c)
    with pytest.raises(fattn.Error):
        fattn.attention(a, b[:, ::-1, :, ::-1], c)
