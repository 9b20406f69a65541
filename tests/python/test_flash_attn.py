# SPDX-License-Identifier: Apache-2.0
"""fattn.flash_attn: the package's functions and signatures, against the formula in double precision."""

import inspect

import pytest

torch = pytest.importorskip("torch")

import fattn  # noqa: E402
import numpy as np  # noqa: E402
import oracle  # noqa: E402
from fattn import flash_attn as fa  # noqa: E402

COMMON = ("dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
          "alibi_slopes=None, deterministic=False, return_attn_probs=False")
# As the package declares them (2.8), names and defaults.
SIGNATURES = {
    "flash_attn_func": "q, k, v, " + COMMON,
    "flash_attn_qkvpacked_func": "qkv, " + COMMON,
    "flash_attn_kvpacked_func": "q, kv, " + COMMON,
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, " + COMMON +
                              ", block_table=None",
    "flash_attn_varlen_qkvpacked_func": "qkv, cu_seqlens, max_seqlen, " + COMMON,
    "flash_attn_varlen_kvpacked_func": "q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, " +
                                       COMMON,
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
                               "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, "
                               "block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), "
                               "softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
                               "return_softmax_lse=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    told = ", ".join(str(p.replace(annotation=p.empty))
                     for p in inspect.signature(getattr(fa, name)).parameters.values())
    assert told == SIGNATURES[name]
    assert name in fa.__all__ and len(fa.__all__) == len(SIGNATURES)


def draw(*shape, grad=False):
    return torch.randn(*shape, requires_grad=grad)


def close(a, b):
    torch.testing.assert_close(a.detach().double(), torch.as_tensor(b), rtol=2e-5, atol=2e-5)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(2)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 1)}, {"softcap": 2.0},
                                     {"softmax_scale": 0.2}, {"alibi_slopes": True}], ids=str)
def test_func(options):
    q, k, v = draw(2, 5, 4, 8, grad=True), draw(2, 9, 2, 8, grad=True), draw(2, 9, 2, 8, grad=True)
    options = dict(options)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.rand(4)
    names = {"window_size": "window", "softmax_scale": "scale"}
    wanted, wanted_lse = oracle.attention(
        *(t.detach().numpy() for t in (q, k, v)),
        **{names.get(n, n): a.numpy() if isinstance(a, torch.Tensor) else a for n, a in options.items()})
    out, lse, probs = fa.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    close(out, wanted)
    close(lse, wanted_lse)
    assert probs is None
    packed = fa.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), **options)
    assert torch.equal(packed, out)
    gradients = torch.autograd.grad(packed.square().sum(), (q, k, v))
    for a, b in zip(gradients, torch.autograd.grad(out.square().sum(), (q, k, v))):
        torch.testing.assert_close(a, b)


def test_packed():
    qkv = draw(2, 7, 3, 4, 8, grad=True)
    out = fa.flash_attn_qkvpacked_func(qkv, causal=True)
    assert torch.equal(out, fa.flash_attn_func(*qkv.unbind(2), causal=True))
    out.sum().backward()
    assert qkv.grad.shape == qkv.shape and qkv.grad.abs().sum() > 0


def test_varlen():
    cu = torch.tensor([0, 4, 4, 11], dtype=torch.int32)
    qkv = draw(11, 3, 2, 8)
    out, lse, _ = fa.flash_attn_varlen_qkvpacked_func(qkv, cu, 7, causal=True, return_attn_probs=True)
    assert lse.shape == (2, 11)
    q, k, v = qkv.unbind(1)
    assert torch.equal(out, fa.flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, causal=True))
    assert torch.equal(out, fa.flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], cu, cu, 7, 7, causal=True))
    for b in (0, 2):
        rows = slice(cu[b], cu[b + 1])
        close(out[rows], oracle.attention(*(t[None, rows].numpy() for t in (q, k, v)), causal=True)[0][0])


def test_empty_rows():
    out, lse, _ = fa.flash_attn_func(draw(1, 5, 1, 8), draw(1, 2, 1, 8), draw(1, 2, 1, 8), causal=True,
                                     return_attn_probs=True)
    assert (out[0, :3] == 0).all() and torch.isneginf(lse[0, 0, :3]).all()


def rotate(x, at, cos, sin, interleaved):
    """The rotary embedding by complex numbers."""
    half = cos.shape[1]
    turn = cos[at] + 1j * sin[at]
    pairs = (x[..., :2 * half].reshape(*x.shape[:-1], half, 2) if interleaved else
             np.stack((x[..., :half], x[..., half:2 * half]), -1))
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn[:, :, None]
    pairs = np.stack((turned.real, turned.imag), -1)
    first = pairs.reshape(*x.shape[:-1], 2 * half) if interleaved else np.concatenate(
        (pairs[..., 0], pairs[..., 1]), -1)
    return np.concatenate((first, x[..., 2 * half:]), -1)


@pytest.mark.parametrize("paged", [False, True], ids=["whole", "pages"])
@pytest.mark.parametrize("rotary", [None, True, False], ids=["plain", "interleaved", "halves"])
def test_kvcache(paged, rotary):
    b, keys, new, h, d = 3, 24, 2, 2, 16
    q, k, v = draw(b, new, 4, d), draw(b, new, h, d), draw(b, new, h, d)
    k_cache, v_cache = draw(b, keys, h, d), draw(b, keys, h, d)
    lengths = torch.tensor([0, 9, keys - new], dtype=torch.int32)
    cos, sin = (torch.cos(torch.rand(64, 4)), torch.sin(torch.rand(64, 4)))
    wanted_k, wanted_v = k_cache.double().numpy().copy(), v_cache.double().numpy().copy()
    at = lengths.numpy()[:, None] + np.arange(new)
    turned = {"q": q.numpy(), "k": k.numpy()}
    if rotary is not None:
        turned = {n: rotate(a, at, cos.numpy(), sin.numpy(), rotary) for n, a in turned.items()}
    for i in range(b):
        wanted_k[i, at[i]], wanted_v[i, at[i]] = turned["k"][i], v[i].numpy()
    wanted, wanted_lse = oracle.attention(turned["q"], wanted_k, wanted_v, causal=True,
                                          lengths_k=lengths.numpy() + new)
    table = None
    if paged:
        order = torch.randperm(b * 6)
        table = order.reshape(b, 6).to(torch.int32)
        pages = torch.empty(2, b * 6, 4, h, d)
        for cache, whole in zip(pages, (k_cache, v_cache)):
            cache[order] = whole.reshape(b * 6, 4, h, d)
        k_cache, v_cache = pages
    more = {} if rotary is None else dict(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=rotary)
    out, lse = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths,
                                          block_table=table, causal=True, return_softmax_lse=True, **more)
    close(out, wanted)
    close(lse, wanted_lse)
    if paged:
        k_cache = k_cache[order].reshape(b, keys, h, d)
    close(k_cache, wanted_k)


def test_kvcache_entries_and_padding():
    q, k_cache, v_cache = draw(2, 1, 2, 8), draw(5, 12, 2, 8), draw(5, 12, 2, 8)
    entries, pad = torch.tensor([4, 1], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32)
    out = fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=10, cache_batch_idx=entries,
                                     cache_leftpad=pad, causal=True)
    for b in range(2):
        keys = slice(pad[b], 10)
        wanted = oracle.attention(q[b:b + 1].numpy(), *(c[entries[b], keys][None].numpy()
                                                        for c in (k_cache, v_cache)))[0]
        close(out[b:b + 1], wanted)


def test_kvcache_errors():
    """After an error nothing has been written."""
    q, caches = draw(2, 1, 2, 8), (draw(4, 4, 2, 8), draw(4, 4, 2, 8))
    k, table = draw(2, 1, 2, 8), torch.tensor([[0], [1]], dtype=torch.int32)
    before = [cache.clone() for cache in caches]
    new = dict(k=k, v=k, cache_seqlens=0, block_table=table)
    turn = torch.ones(4, 4)
    for given, exception, words in (
            (new | dict(cache_seqlens=4), fattn.InvalidData, "1 new keys exceed the cache's 4"),
            (new | dict(cache_seqlens=-1), fattn.InvalidData, "1 new keys exceed the cache's 4"),
            (new | dict(block_table=-table), fattn.InvalidData, r"not in 0\.\.3"),
            (new | dict(block_table=4 * table), fattn.InvalidData, r"not in 0\.\.3"),
            (new | dict(block_table=None, cache_batch_idx=4 * table[:, 0]), fattn.InvalidData, r"not in 0\.\.3"),
            (new | dict(block_table=table.long()), fattn.InvalidArgument, "block_table has dtype int64"),
            (new | dict(v=k[..., :4]), fattn.InvalidShape, "v has shape"),
            (new | dict(k=k[:, :, :1]), fattn.InvalidShape, "k has shape"),
            (new | dict(k=k[:1], v=k[:1]), fattn.InvalidShape, "k has shape"),
            (new | dict(softmax_scale=float("nan")), fattn.InvalidArgument, "scale is nan"),
            (new | dict(alibi_slopes=torch.ones(3)), fattn.InvalidShape, "alibi_slopes has shape"),
            (new | dict(rotary_cos=turn), fattn.InvalidArgument, "rotary_cos and rotary_sin must be given together"),
            (new | dict(rotary_sin=turn), fattn.InvalidArgument, "rotary_cos and rotary_sin must be given together"),
            (new | dict(rotary_cos=turn, rotary_sin=turn[:, :3]), fattn.InvalidShape, "rotary_cos has shape"),
            (new | dict(rotary_cos=turn[:2], rotary_sin=turn[:2], cache_seqlens=2), fattn.InvalidData, "2 positions"),
            (new | dict(cache_seqlens=torch.zeros(2, dtype=torch.int64)), fattn.InvalidArgument,
             "cache_seqlens has dtype torch.int64"),
            (new | dict(cache_seqlens=torch.zeros(3, dtype=torch.int32)), fattn.InvalidShape, "cache_seqlens has shape"),
            (new | dict(cache_seqlens="one"), TypeError, "str"),
            (dict(k=k, cache_seqlens=1), fattn.InvalidArgument, "k and v must be given together"),
            (dict(k=k, v=k), fattn.InvalidArgument, "cache_seqlens is needed"),
            (dict(block_table=table, cache_seqlens=9), fattn.InvalidData, r"cache_seqlens\[0\] is 9"),
            (dict(rotary_cos=turn, rotary_sin=turn), fattn.InvalidArgument, "without k and v"),
            (dict(cache_batch_idx=table[:, 0], block_table=table), fattn.InvalidArgument, "cannot be given together")):
        with pytest.raises(exception, match=words):
            fa.flash_attn_with_kvcache(q, *caches, **given)
        assert all(torch.equal(a, b) for a, b in zip(caches, before)), given


def test_errors():
    q, cu = draw(2, 5, 2, 8), torch.tensor([0, 5], dtype=torch.int32)
    for call, exception, words in (
            (lambda: fa.flash_attn_func(q.numpy(), q, q), TypeError, "q is a numpy.ndarray, not a tensor"),
            (lambda: fa.flash_attn_with_kvcache(q, None, q), TypeError, "k is a NoneType, not a tensor"),
            (lambda: fa.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, None, 5), fattn.InvalidArgument,
             "max_seqlen_q is needed"),
            (lambda: fa.flash_attn_qkvpacked_func(q), fattn.InvalidShape,
             r"qkv has shape \(2, 5, 2, 8\), not \(batch, length, 3, heads, channels\)"),
            (lambda: fa.flash_attn_varlen_kvpacked_func(q[0], q, cu, cu, 5, 5), fattn.InvalidShape,
             r"kv has shape \(2, 5, 2, 8\), not \(total, 2, heads, channels\)"),
            (lambda: fa.flash_attn_kvpacked_func(q, 3), TypeError, "kv is a int, not a tensor")):
        with pytest.raises(exception, match=words):
            call()


def test_kvcache_pages_that_are_not_used():
    """Entries of the table past the keys of a sequence are not looked at; those of the new keys are."""
    q, k, caches = draw(1, 1, 2, 8), draw(1, 1, 2, 8), (draw(4, 4, 2, 8), draw(4, 4, 2, 8))
    for length, table, right in ((3, [[1, -1]], True), (4, [[1, -1]], False), (4, [[1, 2]], True)):
        def attend():
            return fa.flash_attn_with_kvcache(q, *caches, k, k, cache_seqlens=length,
                                              block_table=torch.tensor(table, dtype=torch.int32))
        if right:
            attend()
            assert torch.equal(caches[0][table[0][length // 4], length % 4], k[0, 0])
        else:
            with pytest.raises(fattn.InvalidData):
                attend()


def test_kvcache_number_of_keys():
    """Any integer will do."""
    q, caches = draw(2, 1, 2, 8), (draw(2, 12, 2, 8), draw(2, 12, 2, 8))
    wanted = fa.flash_attn_with_kvcache(q, *caches, cache_seqlens=torch.full((2,), 9, dtype=torch.int32))
    for length in (9, np.int64(9), np.int32(9)):
        assert torch.equal(fa.flash_attn_with_kvcache(q, *caches, cache_seqlens=length), wanted)


def test_kvcache_windows():
    """Of any sequence, with new keys and rotation too."""
    q, k, caches, turn = draw(2, 1, 2, 8), draw(2, 1, 2, 8), (draw(2, 12, 2, 8), draw(2, 12, 2, 8)), torch.rand(12, 4)
    for wanted, window in (((-1, -1), [-1, -1]), ((3, 0), [3, 0]), ((3, 0), torch.tensor([3, 0])), ((2, 2), 2)):
        a, b = (fa.flash_attn_with_kvcache(q, *caches, k, k, rotary_cos=turn, rotary_sin=turn, cache_seqlens=9,
                                           window_size=w) for w in (wanted, window))
        assert torch.equal(a, b)


def test_kvcache_under_autocast():
    q, k, caches = draw(2, 1, 2, 8), draw(2, 1, 2, 8), (draw(2, 12, 2, 8), draw(2, 12, 2, 8))
    with torch.autocast("cpu", torch.bfloat16):
        out = fa.flash_attn_with_kvcache(q.bfloat16(), *caches, k, k, cache_seqlens=9)
    assert out.dtype == torch.bfloat16 and torch.equal(caches[0][:, 9], k[:, 0])


@pytest.mark.parametrize("paged", [False, True])
def test_kvcache_in_eight_bits(paged):
    """New keys and values are rounded to nearest, ties to even, and saturated; those of e4m3 are written as they are."""
    q, k, v = draw(2, 1, 2, 8), 8 * draw(2, 2, 2, 8), 8 * draw(2, 2, 2, 8)
    k[0, 0, 0, :6] = v[1, 1, 1, :6] = torch.tensor([17, 19, 1e9, -500, 2 ** -10, 464.5])
    rounded = torch.tensor([16, 20, 448, -448, 0, 448])
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32) if paged else None
    written = []
    for new in ((k, v), tuple(a.clamp(-448, 448).to(torch.float8_e4m3fn) for a in (k, v))):
        torch.manual_seed(1)
        caches = [draw(*((4, 4) if paged else (2, 8)), 2, 8).to(torch.float8_e4m3fn) for _ in range(2)]
        out = fa.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=3, block_table=table, causal=True)
        written.append((*[a.view(torch.uint8) for a in caches], out))
        wide = [a.float() if table is None else a.float()[table].flatten(1, 2) for a in caches]
        assert torch.equal(wide[0][0, 3, 0, :6], rounded) and torch.equal(wide[1][1, 4, 1, :6], rounded)
        torch.testing.assert_close(out, fa.flash_attn_with_kvcache(q, *wide, cache_seqlens=5, causal=True))
    assert all(torch.equal(a, b) for a, b in zip(*written))


def test_kvcache_compiles():
    """In one graph, with new keys, rotation and pages, and with checks before anything is written."""
    q, k, caches = draw(2, 1, 2, 8), draw(2, 1, 2, 8), (draw(4, 4, 2, 8), draw(4, 4, 2, 8))
    table, turn = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32), torch.rand(9, 4)

    def attend(lengths, table, *caches):
        return fa.flash_attn_with_kvcache(q, *caches, k, k, rotary_cos=turn, rotary_sin=turn, cache_seqlens=lengths,
                                          block_table=table, causal=True)
    try:
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        lengths = torch.tensor([0, 5], dtype=torch.int32)
        others = [cache.clone() for cache in caches]
        torch.testing.assert_close(compiled(lengths, table, *caches), attend(lengths, table, *others))
        assert all(torch.equal(a, b) for a, b in zip(caches, others))
        for wrong in ((lengths + 7, table), (lengths, -table)):
            with pytest.raises(RuntimeError):
                compiled(*wrong, *caches)
            assert all(torch.equal(a, b) for a, b in zip(caches, others))
    finally:
        torch.compiler.reset()


def test_channels_apart():
    """Copied, as flash-attn does; caches are not."""
    q, k, v = (draw(2, 5, 2, 16)[..., ::2] for _ in range(3))
    wanted = fa.flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(fa.flash_attn_func(q, k, v), wanted)
    cu = torch.tensor([0, 5], dtype=torch.int32)
    assert torch.equal(fa.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 5, 5), wanted[0])
    assert torch.equal(fa.flash_attn_with_kvcache(q, k.contiguous(), v.contiguous()), wanted)
    with pytest.raises(fattn.InvalidStride, match="k has channels 2"):
        fa.flash_attn_with_kvcache(q, k, v)
