# SPDX-License-Identifier: Apache-2.0
"""fattn.torch: operators, gradients, compilation, transforms, and PyTorch's own function by fattn."""

import math
import os
import pickle
import subprocess
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")

import fattn  # noqa: E402
import fattn.flash_attn  # noqa: E402
import fattn.torch  # noqa: E402
import numpy as np  # noqa: E402
import torch.autograd.forward_ad as forward_ad  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import torch.overrides  # noqa: E402
import torch.utils._python_dispatch  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.library import opcheck  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from fattn.torch._schemas import ALL, COMMON  # noqa: E402

(FORWARD, BACKWARD), (FORWARD_COMMON, BACKWARD_COMMON) = ALL.operators(), COMMON.operators()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(5)
    torch._dynamo.reset()


def tensors(b=2, sq=7, sk=9, hq=4, hk=2, d=8, dv=6, dtype=torch.float32, grad=True):
    return [torch.randn(*shape, dtype=dtype, requires_grad=grad)
            for shape in ((b, sq, hq, d), (b, sk, hk, d), (b, sk, hk, dv))]


def packed(dtype=torch.float32):
    q, k, v = (torch.randn(n, h, d, dtype=dtype, requires_grad=True)
               for n, h, d in ((12, 4, 8), (15, 2, 8), (15, 2, 6)))
    return (q, k, v), dict(cu_seqlens_q=torch.tensor([0, 5, 12], dtype=torch.int32),
                           cu_seqlens_k=torch.tensor([0, 9, 15], dtype=torch.int32), max_seqlen_q=7,
                           max_seqlen_k=9)


FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "top left": {"causal": True, "anchor": "top_left"},
    "window": {"window": (2, 3)},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": (2, 4, 7, 9)},
    "bias of rows": {"bias": (1, 1, 9)},
    "mask": {"mask": (2, 1, 7, 9)},
    "block mask": {"block_mask": (1, 2, 3), "block_size": (4, 3)},
    "alibi": {"alibi_slopes": (4,)},
    "sink": {"sink": (4,)},
    "dropout": {"dropout_p": 0.25},
    "used": {"seqused_k": [4, 9]},
    "positions": {"positions": (3, 0, 20, 20), "causal": True},
    "started": {"seqstart_k": [2, 0], "causal": True},
    "chunk": {"chunk": 4},
    "alibi of bias": {"alibi_slopes": (4,), "bias": (2, 4, 7, 9), "alibi_bias": True},
    "bhsd": {"layout": "bhsd"},
    "all": {"causal": True, "softcap": 3.0, "bias": (4, 7, 9), "sink": (4,), "dropout_p": 0.1,
            "window": (5, 1)},
}


def options_of(name, dtype=torch.float32):
    options = dict(FEATURES[name])
    for key in ("bias", "sink", "alibi_slopes"):
        if key in options:
            options[key] = torch.randn(options[key], dtype=dtype, requires_grad=key != "alibi_slopes")
    for key in ("mask", "block_mask"):
        if key in options:
            options[key] = torch.rand(options[key]) < 0.7
    for key in ("seqused_k", "seqstart_k"):
        if key in options:
            options[key] = torch.tensor(options[key], dtype=torch.int32)
    if "dropout_p" in options:
        options["seed"] = torch.tensor([3, 4])
    return options


def inputs_of(name, dtype=torch.float32):
    options = options_of(name, dtype)
    given = tensors(dtype=dtype)
    if options.get("layout") == "bhsd":
        given = [t.detach().transpose(1, 2).requires_grad_() for t in given]
    return given, options


@pytest.mark.parametrize("name", FEATURES)
def test_gradcheck_in_double(name):
    """Every gradient, by differences, through backend reference."""
    given, options = inputs_of(name, torch.float64)
    extra = [key for key in ("bias", "sink") if key in options]

    def function(*args):
        more = dict(zip(extra, args[3:]))
        return fattn.torch.attention(*args[:3], **options | more, return_lse=True, device="reference")

    assert torch.autograd.gradcheck(function, (*given, *(options[key] for key in extra)), fast_mode=True)


@pytest.mark.parametrize("name", FEATURES)
def test_float_against_double(name):
    given, options = inputs_of(name)
    wide = [t.detach().double().requires_grad_() for t in given]
    wide_options = {key: a.detach().double().requires_grad_(a.requires_grad)
                    if isinstance(a, torch.Tensor) and a.is_floating_point() else a
                    for key, a in options.items()}
    o, lse = fattn.torch.attention(*given, **options, return_lse=True)
    wide_o, wide_lse = fattn.torch.attention(*wide, **wide_options, return_lse=True, device="reference")
    torch.testing.assert_close(o.double(), wide_o, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), wide_lse, rtol=1e-5, atol=1e-6)
    dout, dlse = torch.randn_like(o), torch.randn_like(lse)
    torch.autograd.backward((o, lse), (dout, dlse))
    torch.autograd.backward((wide_o, wide_lse), (dout.double(), dlse.double()))
    for key in options:
        if isinstance(options[key], torch.Tensor) and options[key].requires_grad:
            given.append(options[key])
            wide.append(wide_options[key])
    for a, b in zip(given, wide):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-5)


def arguments(given, **options):
    """Of the operators, in the order of their schema."""
    schema = FORWARD._schema.arguments
    names = [a.name for a in schema]
    values = {a.name: a.default_value if a.has_default_value() else None for a in schema}
    values.update(zip("qkv", given))
    assert set(options) <= set(names), set(options) - set(names)
    values.update(options)
    return tuple(values[name] for name in names)


CALLS = {
    "plain": lambda: arguments(tensors()),
    "bhsd": lambda: arguments([t.detach().transpose(1, 2).requires_grad_() for t in tensors()], bhsd=True,
                              causal=True, top_left=True),
    "wide": lambda: arguments(tensors(dtype=torch.bfloat16), out_f32=True),
    "everything": lambda: arguments(
        tensors(), bias=torch.randn(4, 7, 9, requires_grad=True), mask=torch.rand(2, 1, 7, 9) < 0.8,
        alibi_slopes=torch.rand(4), sink=torch.randn(4, requires_grad=True),
        seqused_k=torch.tensor([4, 9], dtype=torch.int32), chunk=8,
        seqstart_k=torch.tensor([1, 0], dtype=torch.int32), seed=torch.tensor([1, 2]), dropout_p=0.1,
        causal=True, window_left=5, scale=0.4, softcap=3.0, positions=[0, 0, -1, -1]),
    "packed": lambda: arguments(packed()[0], **packed()[1]),
}
STATIC = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    args = CALLS[name]()
    tests = STATIC + (("test_aot_dispatch_dynamic",) if name in ("plain", "everything") else ())
    opcheck(FORWARD, args, test_utils=tests)
    detached = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
    o, lse = FORWARD(*detached)
    outputs = 0b1111100 if name == "everything" else 0b0011100
    opcheck(BACKWARD, (torch.randn_like(o), torch.randn_like(lse), o, lse, outputs, *detached),
            test_utils=STATIC)


COMMON_CALLS = {
    "plain": {}, "causal": {"causal": True}, "numbers": {"window_left": 3, "window_right": 1, "scale": 0.4},
    "bhsd": {"bhsd": True, "top_left": True, "causal": True}, "mask": {"mask": lambda: torch.rand(2, 1, 7, 9) < 0.7},
    "used": {"seqused_k": lambda: torch.tensor([4, 9], dtype=torch.int32), "causal": True},
}


@pytest.mark.parametrize("name", COMMON_CALLS)
def test_operators_of_common_options(name):
    """They pass PyTorch's tests, and their results are those of the operators with all options, bit for bit."""
    options = {key: value() if callable(value) else value for key, value in COMMON_CALLS[name].items()}
    given = tensors()
    if options.get("bhsd"):
        given = [t.detach().transpose(1, 2).requires_grad_() for t in given]
    args = COMMON.select(arguments(given, **options))
    tests = STATIC + (("test_aot_dispatch_dynamic",) if name in ("plain", "mask") else ())
    opcheck(FORWARD_COMMON, args, test_utils=tests)
    detached = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    wanted = FORWARD(*arguments(detached[:3], **options))
    o, lse = FORWARD_COMMON(*detached)
    assert torch.equal(o, wanted[0]) and torch.equal(lse, wanted[1])
    dout, dlse = torch.randn_like(o), torch.randn_like(lse)
    for outputs in (0b0011100, 0b0001000):
        opcheck(BACKWARD_COMMON, (dout, dlse, o, lse, outputs, *detached), test_utils=STATIC)
        common = BACKWARD_COMMON(dout, dlse, o, lse, outputs, *detached)
        every = BACKWARD(dout, dlse, o, lse, outputs, *arguments(detached[:3], **options))
        assert len(common) == 3 and all(torch.equal(a, b) for a, b in zip(common, every))
    # As an operator is differentiated.
    wanted = torch.autograd.grad(FORWARD(*arguments(given, **options))[0], given, dout)
    for a, b in zip(torch.autograd.grad(FORWARD_COMMON(*args)[0], given, dout), wanted):
        assert torch.equal(a, b)


def test_which_operators_take_a_call():
    """Graphs have the operators of common options unless another option is given, whichever it is."""
    q = torch.randn(1, 6, 2, 8)
    extras = {
        "bias": torch.randn(6, 6), "block_mask": torch.ones(1, 3, 3, dtype=torch.bool), "alibi_slopes": torch.ones(2),
        "sink": torch.zeros(2), "seqused_q": torch.tensor([4], dtype=torch.int32),
        "seqstart_k": torch.tensor([2], dtype=torch.int32), "softcap": 2.0,
        "out_dtype": torch.float32, "positions": (0, 0, 6, 6), "batch_invariant": True, "checked": True,
        "device": "reference", "chunk": 3}
    more = {"block_mask": {"block_size": (2, 2)}}
    common = {"causal": True, "window": 2, "scale": 0.3, "layout": "bhsd", "anchor": "top_left",
              "mask": torch.ones(6, 6).bool(),
              "seqused_k": torch.tensor([4], dtype=torch.int32), "deterministic": True}
    # No function has these without another of these options: packed sequences, dropout, scaled caches.
    left = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seed", "dropout_p", "k_descale", "v_descale",
            "alibi_bias", "block_m", "block_n"}
    renamed = {"out_f32": "out_dtype"}
    names = {a.name for a in FORWARD._schema.arguments} - {a.name for a in FORWARD_COMMON._schema.arguments}
    assert {renamed.get(name, name) for name in names - left} == set(extras)
    for name, value in (extras | common).items():
        options = {name: value, **more.get(name, {})}
        x = q.bfloat16() if name == "out_dtype" else q.transpose(1, 2) if value == "bhsd" else q
        graph = make_fx(lambda x: fattn.torch.attention(x, x, x, **options))(x).graph
        wanted = FORWARD_COMMON if name in common else FORWARD
        assert [node.target for node in graph.nodes if "fattn" in str(node.target)] == [wanted], name


def test_selective_checkpointing_sees_known_calls():
    """A policy is asked about every call, also about one like earlier calls, and a result that it saves is not computed
    again."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
    asked = []

    def policy(ctx, op, *args, **kwargs):
        if op is FORWARD_COMMON:
            asked.append(ctx.is_recompute)
        return CheckpointPolicy.MUST_SAVE if op is FORWARD_COMMON else CheckpointPolicy.PREFER_RECOMPUTE

    def attend(x):
        return fattn.torch.attention(x * 2, x, x, causal=True)

    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    for _ in range(3):
        wanted, = torch.autograd.grad(attend(q).sum(), q)
    o = checkpoint(attend, q, use_reentrant=False,
                   context_fn=lambda: create_selective_checkpoint_contexts(policy))
    fattn.cache_clear()
    assert torch.equal(torch.autograd.grad(o.sum(), q)[0], wanted)
    assert asked == [False]


def test_compiles_windows_of_any_size():
    """Windows and a cache's length are numbers of a graph, not constants."""
    def step(q, n):
        return fattn.torch.attention(q, q, q, causal=True, window=(n, 0))

    def token(q, n):
        return fattn.flash_attn.flash_attn_with_kvcache(q[:, :1], q, q, cache_seqlens=n, causal=True, window_size=(n, 0))

    q = torch.randn(1, 40, 2, 16)
    for call in (step, token):
        torch._dynamo.reset()
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for n in range(2, 12):
                torch.testing.assert_close(compiled(q, n), call(q, n))
    length = torch.export.Dim("length", min=8, max=64)

    class Half(torch.nn.Module):
        def forward(self, q):
            return fattn.torch.attention(q, q, q, causal=True, window=(q.shape[1] // 2, 0))

    exported = torch.export.export(Half(), (q,), dynamic_shapes={"q": {1: length}}).module()
    assert torch.equal(exported(q[:, :20]), Half()(q[:, :20]))


def test_devices_do_not_mix():
    """Also where no kernel runs: with a tensor without memory, and while tracing."""
    q = torch.randn(1, 5, 2, 8)
    mask = torch.ones(5, 5, dtype=torch.bool, device="meta")
    for call in (lambda: fattn.torch.attention(q, q.to("meta"), q), lambda: FORWARD_COMMON(q, q.to("meta"), q),
                 lambda: FORWARD(q, q, q.to("meta")), lambda: fattn.torch.attention(q, q, q, mask=mask)):
        with pytest.raises(fattn.InvalidArgument, match="is on device"):
            call()
    with torch._subclasses.FakeTensorMode():
        q, k = torch.empty(1, 5, 2, 8), torch.empty(1, 5, 2, 8, device="cuda")
        with pytest.raises(fattn.InvalidArgument, match="k is on device cuda"):
            fattn.torch.attention(q, k, k)


def test_empty_axis_of_vmap():
    for name, options in (("folded", {}), ("each", {"mask": torch.ones(0, 9, 9, dtype=torch.bool)})):
        k = torch.randn(0, 1, 9, 4, 16, requires_grad=True)
        if options:
            o = torch.func.vmap(lambda k, m: fattn.torch.attention(k, k, k, mask=m))(k, options["mask"])
        else:
            o = torch.func.vmap(lambda k: fattn.torch.attention(k, k, k, causal=True))(k)
        assert o.shape == k.shape, name
        assert torch.autograd.grad(o.sum(), k)[0].shape == k.shape, name


def test_both_ways_agree():
    """The operator and the short way past it, bit for bit, gradients too."""
    given, options = inputs_of("all")
    leaves = (*given, options["bias"], options["sink"])
    short = fattn.torch.attention(*given, **options)
    dout = torch.randn_like(short)
    wanted = torch.autograd.grad(short, leaves, dout)
    long = FORWARD(*arguments(given, bias=options["bias"], sink=options["sink"], seed=options["seed"],
                              causal=True, softcap=3.0, dropout_p=0.1, window_left=5, window_right=1))[0]
    assert torch.equal(short, long)
    for a, b in zip(torch.autograd.grad(long, leaves, dout), wanted):
        assert torch.equal(a, b)


def test_compiles_without_breaks_or_recompiles():
    """20 lengths by one graph, forward and backward."""
    from torch._dynamo.testing import CompileCounter
    counter = CompileCounter()

    def step(q, k, v):
        return fattn.torch.attention(q * 1.0, k, v, causal=True, window=(100, 0)) + 1

    for backend in (counter, "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for n in range(20, 40):
                given = tensors(sq=n, sk=n)
                o, wanted = compiled(*given), step(*given)
                assert torch.equal(o, wanted)
                for a, b in zip(torch.autograd.grad(o.sum(), given),
                                torch.autograd.grad(wanted.sum(), given)):
                    assert torch.equal(a, b)
    assert counter.frame_count == 1


def test_compiles_the_switch():
    def step(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2

    with fattn.torch.sdpa(), torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
        for n in range(5, 25):
            q, k, v = (t.transpose(1, 2) for t in tensors(hk=4, dv=8, sq=n, sk=n))
            assert torch.equal(compiled(q, k, v), step(q, k, v))


def test_export_saves_and_loads(tmp_path):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return fattn.torch.attention(q, k, v, causal=True)

    given = tensors(grad=False)
    n = torch.export.Dim("n", min=2, max=512)
    program = torch.export.export(Model(), tuple(given), dynamic_shapes=({}, {1: n}, {1: n}))
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for sk in (9, 31):
        given = tensors(sk=sk, grad=False)
        assert torch.equal(loaded(*given), Model()(*given))


def by_attention(q, k, v):
    return fattn.torch.attention(q, k, v, causal=True, layout="bhsd")


def by_its_sdpa(q, k, v):
    return fattn.torch.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_the_switch(q, k, v):
    with fattn.torch.sdpa():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("attend, strict", [(by_attention, False), (by_its_sdpa, False), (by_the_switch, False),
                                            (by_attention, True), (by_its_sdpa, True)])
def test_exports_any_length(attend, strict):
    """Of queries and keys alike. What is not strict traces with symbolic lengths."""
    class Model(torch.nn.Module):
        def forward(self, x):
            return attend(x, x, x)

    n = torch.export.Dim("n", min=2, max=512)
    exported = torch.export.export(Model(), (torch.randn(2, 4, 5, 16),), dynamic_shapes={"x": {2: n}}, strict=strict)
    assert any("fattn.forward" in str(node.target) for node in exported.graph.nodes)
    for length in (9, 31):
        x = torch.randn(2, 4, length, 16)
        assert torch.equal(exported.module()(x), attend(x, x, x))


def test_traces_symbolic_lengths():
    for attend in (by_attention, by_its_sdpa):
        traced = make_fx(lambda x: attend(x, x, x), tracing_mode="symbolic")(torch.randn(2, 4, 5, 16))
        x = torch.randn(2, 4, 7, 16)
        assert torch.equal(traced(x), attend(x, x, x))


def test_meta_tensors():
    """They have shapes and no memory."""
    x = torch.randn(2, 4, 7, 16, device="meta", requires_grad=True)
    for attend in (by_attention, by_its_sdpa, by_the_switch):
        for given in (x, x.detach()):
            o = attend(given, given, given)
            assert o.shape == x.shape and o.is_meta
        attend(x, x, x).sum().backward()
        assert x.grad.is_meta and x.grad.shape == x.shape
    mask = torch.ones(1, 1, 7, 7, dtype=torch.bool, device="meta")
    assert fattn.torch.attention(x, x, x, mask=mask, layout="bhsd").is_meta
    with torch.device("meta"), fattn.torch.sdpa():
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        assert layer(torch.randn(2, 7, 32)).is_meta


def test_plain_functions_need_numbers():
    from torch._subclasses import FakeTensorMode
    x = torch.randn(3, 2, 4, 5, 8)
    with pytest.raises(fattn.Unsupported, match="use fattn.torch"):
        torch.vmap(lambda x: fattn.attention(x, x, x))(x)
    with FakeTensorMode():
        fake = torch.randn(2, 4, 5, 8)
    with pytest.raises(fattn.Unsupported, match="use fattn.torch"):
        fattn.attention(fake, fake, fake)
    double = x[0].double()
    with pytest.raises(fattn.Unsupported, match=r'call attention\(..., device="reference"\)'):
        fattn.torch.scaled_dot_product_attention(double, double, double)


def test_vmap():
    q, k, v = (torch.randn(3, *t.shape) for t in tensors())
    together = torch.vmap(lambda q, k, v: fattn.torch.attention(q, k, v, causal=True))(q, k, v)
    each = torch.stack([fattn.torch.attention(*t, causal=True) for t in zip(q, k, v)])
    assert torch.equal(together, each)
    one = torch.vmap(lambda q: fattn.torch.attention(q, k[0], v[0]), in_dims=1)(q.transpose(0, 1))
    assert torch.equal(one, torch.stack([fattn.torch.attention(a, k[0], v[0]) for a in q]))
    sinks = torch.randn(3, 4)
    own = torch.vmap(lambda q, s: fattn.torch.attention(q, k[0], v[0], sink=s))(q, sinks)
    assert torch.equal(own, torch.stack([fattn.torch.attention(a, k[0], v[0], sink=s)
                                         for a, s in zip(q, sinks)]))


def test_gradients_of_each_sample():
    q, k, v = (torch.randn(3, *t.shape) for t in tensors())

    def loss(q, k, v):
        return fattn.torch.attention(q, k, v, causal=True).square().sum()

    together = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for i in range(3):
        for a, b in zip(together, torch.func.grad(loss, argnums=(0, 1, 2))(q[i], k[i], v[i])):
            torch.testing.assert_close(a[i], b)


def plain(x):
    """Attention of x to itself by PyTorch's elementary operators."""
    return torch.softmax(x @ x.mT / x.shape[-1] ** 0.5, -1) @ x


def loss_of(attend):
    return lambda x: attend(x).square().sum()


def by_sdpa(x):
    return fattn.torch.scaled_dot_product_attention(x, x, x)


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(loss_of(f)),
    "grad of a sum": lambda f: torch.func.grad(lambda x: f(x * x).sum()),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(loss_of(f))),
    "jacrev": lambda f: torch.func.jacrev(f),
    "functionalize": lambda f: torch.func.functionalize(torch.func.grad(loss_of(f))),
    "compiled grad": lambda f: torch.compile(torch.func.grad(loss_of(f)), backend="aot_eager", fullgraph=True),
    "compiled vmap of grad": lambda f: torch.compile(torch.vmap(torch.func.grad(loss_of(f))), backend="aot_eager",
                                                     fullgraph=True),
    "jacobian": lambda f: lambda x: torch.autograd.functional.jacobian(f, x, vectorize=True),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name, batch):
    x = torch.randn(3, batch, 2, 3, 4) if "vmap" in name else torch.randn(batch, 2, 3, 4)
    wanted = TRANSFORMS[name](plain)(x)
    for attend in [by_sdpa] * 3 + [lambda x: fattn.torch.attention(x, x, x, layout="bhsd")]:
        torch.testing.assert_close(TRANSFORMS[name](attend)(x), wanted, rtol=1e-4, atol=1e-5)


def test_batches_of_gradients():
    """Of lse, a bias and a sink too."""
    given = [torch.randn(1, 3, 2, 4, requires_grad=True) for _ in range(3)]
    bias, sink = torch.randn(1, 2, 3, 3, requires_grad=True), torch.randn(2, requires_grad=True)
    o, lse = fattn.torch.attention(*given, bias=bias, sink=sink, return_lse=True)
    dout, dlse, leaves = torch.randn(5, *o.shape), torch.randn(5, *lse.shape), (*given, bias, sink)
    together = torch.autograd.grad((o, lse), leaves, (dout, dlse), retain_graph=True, is_grads_batched=True)
    for i in range(5):
        for a, b in zip(together, torch.autograd.grad((o, lse), leaves, (dout[i], dlse[i]), retain_graph=True)):
            torch.testing.assert_close(a[i], b)


SECOND_BY_TRANSFORMS = {
    "grad of grad": lambda x: torch.func.grad(lambda y: torch.func.grad(lambda z: by_sdpa(z).sum())(y).sum())(x),
    "hessian": torch.func.hessian(loss_of(by_sdpa)),
    "autograd of grad": lambda x: torch.func.grad(loss_of(by_sdpa))(x.requires_grad_()).sum().backward(),
    "jvp of grad": lambda x: torch.func.jvp(torch.func.grad(loss_of(by_sdpa)), (x,), (x,)),
}


@pytest.mark.parametrize("name", SECOND_BY_TRANSFORMS)
def test_no_second_derivatives_by_transforms(name):
    with pytest.raises(fattn.Unsupported, match="derivatives"):
        SECOND_BY_TRANSFORMS[name](torch.randn(1, 2, 3, 4))


@pytest.mark.parametrize("grad", [False, True])
def test_no_derivatives_in_forward_mode(grad):
    """An error as PyTorch's, instead of a result without its tangent."""
    q = torch.randn(1, 2, 3, 4, requires_grad=grad)
    mask = torch.ones(3, 3, dtype=torch.bool)
    calls = (fattn.torch.attention, fattn.torch.scaled_dot_product_attention, lambda *qkv: FORWARD(*qkv)[0],
             lambda *qkv: fattn.torch.scaled_dot_product_attention(*qkv, mask))
    for call in calls:
        wanted = [call(q, q, q) for _ in range(3)][0]  # from now on the call is known
        with forward_ad.dual_level():
            assert torch.equal(call(q, q, q), wanted)
            for n in range(3):
                dual = [forward_ad.make_dual(q, torch.ones_like(q)) if i == n else q for i in range(3)]
                with pytest.raises(NotImplementedError, match="forward mode"):
                    call(*dual)
        with pytest.raises(NotImplementedError, match="forward mode"):
            torch.func.jvp(lambda x: call(x, x, x), (q.detach(),), (q.detach(),))


def test_checkpointing_repeats_dropout():
    from torch.utils.checkpoint import checkpoint
    given = tensors()

    def block(q, k, v):
        return fattn.torch.attention(q, k, v, dropout_p=0.5)

    for reentrant in (False, True):
        torch.manual_seed(1)
        plain = torch.autograd.grad(block(*given).sum(), given)
        torch.manual_seed(1)
        for t in given:
            t.grad = None
        checkpoint(block, *given, use_reentrant=reentrant).sum().backward()
        for t, b in zip(given, plain):
            assert torch.equal(t.grad, b)
    assert not torch.equal(block(*given), block(*given))


def test_saved_tensors_come_back_with_other_strides():
    """As from a hook that keeps them elsewhere. Plans of the first layout must not be found for the second."""
    q, k, v = (torch.randn(2, 9, 4, 8).transpose(1, 2).requires_grad_() for _ in range(3))
    plain = torch.autograd.grad(fattn.torch.scaled_dot_product_attention(q, k, v).sum(), (q, k, v))
    moved = []

    def unpack(t):
        t = t.clone(memory_format=torch.contiguous_format)
        moved.append(t.stride())
        return t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        o = fattn.torch.scaled_dot_product_attention(q, k, v)
    for a, b in zip(torch.autograd.grad(o.sum(), (q, k, v)), plain):
        torch.testing.assert_close(a, b)
    assert moved[0] != q.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    given, options = inputs_of("all")
    with torch.autocast("cpu", dtype):
        o = fattn.torch.attention(*given, **options)
        s = fattn.torch.scaled_dot_product_attention(*(torch.randn(2, 2, 5, 8) for _ in range(3)))
    assert o.dtype == s.dtype == dtype
    o.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in (*given, options["bias"], options["sink"]))


def test_deterministic_is_heard(monkeypatch):
    """Of the problems that are described: the second call must not find the first one's plan."""
    from fattn import _c
    from fattn.torch import _calls
    fattn.cache_clear()
    heard = []
    describe = _calls.prepare

    def listen(kind, options, arrays):
        if options[0] == _c.BACKWARD:
            heard.append(options[11])
        return describe(kind, options, arrays)

    monkeypatch.setattr(_calls, "prepare", listen)
    torch.use_deterministic_algorithms(True)
    try:
        fattn.torch.attention(*tensors()).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    fattn.torch.attention(*tensors()).sum().backward()
    assert heard == [_c.DETERMINISTIC, 0]


SECOND = {
    "sdpa": fattn.torch.scaled_dot_product_attention,
    "masked": lambda *qkv: fattn.torch.scaled_dot_product_attention(*qkv, torch.ones(7, 7).tril().bool()),
    "attention": lambda *qkv: fattn.torch.attention(*qkv, layout="bhsd"),
    "lse": lambda *qkv: fattn.torch.attention(*qkv, layout="bhsd", return_lse=True)[1],
    "operator": lambda *qkv: FORWARD(*arguments(qkv, bhsd=True))[0],
}


@pytest.mark.parametrize("name", SECOND)
def test_no_second_derivatives(name):
    """An error, also if the gradient of the result is a constant, as that of a sum is: gradients depend on
    what was attended to."""
    x, w = torch.randn(2, 4, 7, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    for turn in range(3):  # the third call is known
        for constant in (True, False):
            y = x @ w
            o = SECOND[name](y, y, y)
            first, = torch.autograd.grad(o.sum() if constant else o.square().sum(), x, create_graph=True)
            with pytest.raises(fattn.Unsupported, match="second derivatives"):
                first.square().sum().backward()


def test_forward_without_a_backward():
    """Is refused where gradients are recorded, rather than after the rest of a model; and is computed otherwise."""
    q, k, v = (t.detach() for t in tensors())
    table, used = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([9, 4], dtype=torch.int32)
    narrow = k.bfloat16(), v.bfloat16()
    for forward in (lambda q: fattn.torch.attention(q, *narrow),
                    lambda q: fattn.torch.attention(q, *narrow, return_lse=True)[0],
                    lambda q: fattn.torch.attention(q, *narrow, mask=torch.ones(7, 9, dtype=torch.bool)),
                    lambda q: fattn.torch.attention_with_kvcache(q, k, v, block_table=table, cache_seqlens=used)):
        for _ in range(3):  # the third call is known
            o = forward(q)
            with pytest.raises(fattn.Unsupported, match=r"without gradients \(torch.no_grad\(\)\)"):
                forward(q.clone().requires_grad_())
            with torch.no_grad():
                assert torch.equal(forward(q.clone().requires_grad_()), o)


def test_varlen_and_cache():
    given, lengths = packed()
    o, lse = fattn.torch.attention_varlen(*given, **lengths, causal=True, return_lse=True)
    o.sum().backward()
    for rows, keys in ((slice(0, 5), slice(0, 9)), (slice(5, 12), slice(9, 15))):
        q, k, v = (t.detach()[None, part].requires_grad_() for t, part in zip(given, (rows, keys, keys)))
        alone = fattn.torch.attention(q, k, v, causal=True)
        torch.testing.assert_close(o[None, rows], alone)
        alone.sum().backward()
        torch.testing.assert_close(given[0].grad[None, rows], q.grad)
        torch.testing.assert_close(given[1].grad[None, keys], k.grad)
    q, k, v = tensors(sq=1, sk=16, grad=False)
    used = torch.tensor([3, 16], dtype=torch.int32)
    torch.testing.assert_close(
        fattn.torch.attention_with_kvcache(q, k, v, cache_seqlens=used),
        torch.cat([fattn.torch.attention(q[b:b + 1], k[b:b + 1, :n], v[b:b + 1, :n])
                   for b, n in enumerate(used.tolist())]))


def test_packed_queries_over_a_cache():
    q, k, v = tensors(sq=5, sk=16)
    packed, used = torch.cat([q[0], q[1, :1]]), torch.tensor([9, 16], dtype=torch.int32)
    o = fattn.torch.attention_varlen(packed, k, v, cu_seqlens_q=torch.tensor([0, 5, 6], dtype=torch.int32),
                                     max_seqlen_q=5, seqused_k=used, causal=True)
    alone = torch.cat([fattn.torch.attention(q[b:b + 1, :rows], k[b:b + 1, :n], v[b:b + 1, :n], causal=True)[0]
                       for b, rows, n in ((0, 5, 9), (1, 1, 16))])
    torch.testing.assert_close(o, alone)
    dout = torch.randn_like(o)
    for got, wanted in zip(torch.autograd.grad(o, (q, k, v), dout), torch.autograd.grad(alone, (q, k, v), dout)):
        torch.testing.assert_close(got, wanted)


# --- Caches in 8 bits -----------------------------------------------------------------------------


def cache(sq=7, sk=9, **sizes):
    """q; k and v in e4m3; their factors (B, Hk)."""
    q, k, v = tensors(sq=sq, sk=sk, grad=False, **sizes)
    return (q, *(a.to(torch.float8_e4m3fn) for a in (k, v)),
            *(torch.rand(k.shape[0], k.shape[2]) + 0.5 for _ in range(2)))


def wide(codes, factor):
    """What numbers of e4m3 (B, S, H, D) stand for."""
    return codes.float() * torch.as_tensor(factor).broadcast_to(codes.shape[0], codes.shape[2])[:, None, :, None]


FACTORS = {
    "(B, Hk)": lambda a, b: (a, b), "(Hk)": lambda a, b: (a[0], b[0]), "(B, 1)": lambda a, b: (a[:, :1], b[:, :1]),
    "one": lambda a, b: (a[0, 0].expand(2, 2), b[0, 0].expand(2, 2)), "()": lambda a, b: (a[0, 0], b[0, 0]),
    "of k": lambda a, b: (a, None), "of v": lambda a, b: (None, b[0]), "numbers": lambda a, b: (0.5, 2),
    "NumPy's number": lambda a, b: (None, np.float32(2)), "number and tensor": lambda a, b: (0.5, b[:, :1]),
    "strided": lambda a, b: (a.t(), b.t()), "other strides": lambda a, b: (a.t(), b),
    "other shapes": lambda a, b: (a[:, :1], b[0]), "neither": lambda a, b: (None, None)}


@pytest.mark.parametrize("name", FACTORS)
def test_cache_in_eight_bits(name):
    """As the same call of what the cache stands for, in each of the functions and each time it is repeated."""
    for turn in range(3):
        q, k, v, *factors = cache()
        of_k, of_v = FACTORS[name](*factors)
        factors = dict(k_descale=of_k, v_descale=of_v)
        k_wide, v_wide = (wide(a, 1.0 if factor is None else factor) for a, factor in ((k, of_k), (v, of_v)))
        o, lse = fattn.torch.attention(q, k_wide, v_wide, causal=True, return_lse=True)
        for ours, lse_ours in (fattn.torch.attention(q, k, v, causal=True, return_lse=True, **factors),
                               fattn.attention(q, k, v, causal=True, return_lse=True, **factors)):
            torch.testing.assert_close(ours, o, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(lse_ours, lse, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(fattn.torch.attention(q, k, v, causal=True, **factors), o, rtol=1e-5, atol=1e-6)
        used = torch.tensor([5, 9], dtype=torch.int32)
        wanted = fattn.torch.attention_with_kvcache(q, k_wide, v_wide, cache_seqlens=used)
        # The same keys in pages of 3, in layout "bhsd", and as the cache of packed rows.
        table = torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32)
        pages = [a.new_empty(6, 3, *a.shape[2:]) for a in (k, v)]
        for a, b in zip(pages, (k, v)):
            a[table.flatten().long()] = b.reshape(6, 3, *b.shape[2:])
        heads_first = [a.transpose(1, 2) for a in (q, k, v)]
        packed_rows = dict(cu_seqlens_q=torch.tensor([0, 7, 14], dtype=torch.int32), max_seqlen_q=7, seqused_k=used)
        for plain in (fattn, fattn.torch):
            results = [plain.attention_with_kvcache(q, k, v, cache_seqlens=used, **factors),
                       plain.attention_with_kvcache(q, *pages, cache_seqlens=used, block_table=table, **factors),
                       plain.attention_with_kvcache(*heads_first, cache_seqlens=used, layout="bhsd",
                                                    **factors).transpose(1, 2),
                       plain.attention_varlen(q.flatten(0, 1), *pages, block_table=table, **packed_rows,
                                              **factors).unflatten(0, (2, 7))]
            for ours in results:
                torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_queries_of_a_cache_in_eight_bits(dtype):
    q, k, v, of_k, of_v = cache(sq=1, sk=200, hq=8, hk=2, d=64, dv=64)
    o = fattn.torch.attention(q.to(dtype), k, v, k_descale=of_k, v_descale=of_v)
    assert o.dtype == dtype
    torch.testing.assert_close(o.float(), fattn.torch.attention(q.to(dtype).float(), wide(k, of_k), wide(v, of_v)),
                               rtol=1e-2, atol=1e-2)


def test_opcheck_in_eight_bits():
    q, k, v, of_k, of_v = cache()
    for factors in ((of_k, of_v), (of_k[0], of_v.t())):
        options = dict(k_descale=factors[0], v_descale=factors[1], causal=True)
        args = arguments((q, k, v), **options)
        opcheck(FORWARD, arguments((q, k.float(), v.float()), **options), test_utils=STATIC)
        # PyTorch's test of schemas compares arguments, which it cannot in e4m3.
        opcheck(FORWARD, args, test_utils=(*STATIC[1:], "test_aot_dispatch_dynamic"))
        torch.testing.assert_close(
            FORWARD(*args)[0], fattn.torch.attention(q, wide(k, factors[0]), wide(v, factors[1]), causal=True))


def test_compiles_in_eight_bits():
    def step(q, k, v, of_k, of_v, used):
        a = fattn.torch.attention_with_kvcache(q * 1.0, k, v, cache_seqlens=used, k_descale=of_k, v_descale=of_v)
        return a + fattn.torch.attention(q, k, v, k_descale=of_k) + fattn.torch.attention(q, k, v, v_descale=0.5)

    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for n in range(20, 24):
                given = (*cache(sq=1, sk=n), torch.tensor([3, n], dtype=torch.int32))
                torch.testing.assert_close(compiled(*given), step(*given))


def test_vmap_in_eight_bits():
    """Of queries alone, of queries and caches, and of everything."""
    every = [torch.stack(a) for a in zip(*[cache() for _ in range(3)])]

    def attend(q, k, v, of_k, of_v):
        return fattn.torch.attention(q, k, v, k_descale=of_k, v_descale=of_v)

    for mapped in (1, 3, 5):
        given = [a if i < mapped else a[0] for i, a in enumerate(every)]
        together = torch.vmap(attend, in_dims=(0,) * mapped + (None,) * (5 - mapped))(*given)
        each = [attend(*[a[n] if i < mapped else a for i, a in enumerate(given)]) for n in range(3)]
        assert torch.equal(together, torch.stack(each))
    together = torch.vmap(fattn.torch.attention)(*every[:3])
    assert torch.equal(together, torch.stack([fattn.torch.attention(*a) for a in zip(*every[:3])]))


def test_no_gradients_in_eight_bits():
    """The forward says so, in whichever way it is called, and without gradients it runs."""
    q, k, v, of_k, of_v = cache()
    learning, factors = q.clone().requires_grad_(), dict(k_descale=of_k, v_descale=of_v)
    used = torch.tensor([5, 9], dtype=torch.int32)
    calls = [lambda q: fattn.torch.attention(q, k, v), lambda q: fattn.torch.attention(q, k, v, **factors),
             lambda q: fattn.torch.attention(q, k, v, return_lse=True)[0],
             lambda q: fattn.torch.attention(q, k.float(), v), lambda q: fattn.torch.attention(q, k, v.float()),
             lambda q: fattn.torch.attention(q, k.float(), v.float(), **factors),
             lambda q: fattn.torch.attention_with_kvcache(q, k, v, cache_seqlens=used, **factors),
             lambda q: FORWARD(*arguments((q, k, v)))[0],
             torch.compile(lambda q: fattn.torch.attention(q, k, v, **factors), backend="aot_eager"),
             torch.compile(lambda q: fattn.torch.attention(q, k.float(), v.float(), **factors), backend="aot_eager")]
    for call in calls:
        for _ in range(3):
            with torch.no_grad():
                o = call(learning)
            assert torch.equal(call(q), o)
            with pytest.raises((fattn.Unsupported, torch._dynamo.exc.BackendCompilerFailed),
                               match="forward|without gradients"):
                call(learning)
        if call not in calls[-2:]:
            with pytest.raises(fattn.Unsupported):
                torch.func.grad(lambda q: call(q).sum())(q)
    for name in factors:
        with pytest.raises(fattn.InvalidArgument, match=f"{name} requires a gradient, but has none"):
            fattn.torch.attention(q, k.float(), v.float(), **factors | {name: of_k.clone().requires_grad_()})
    with pytest.raises(fattn.Unsupported):
        fattn.torch.attention(q, k.clone().requires_grad_(), v)


def test_autocast_leaves_a_cache_in_eight_bits():
    q, k, v, of_k, of_v = cache()
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            o = fattn.torch.attention(q, k, v, k_descale=of_k, v_descale=of_v)
        cast = fattn.torch._functions.autocast(q, k, v, None)
        with pytest.raises(fattn.InvalidArgument, match="k has dtype float8_e5m2, which is not one of"):
            fattn.torch.attention(q, k.to(torch.float8_e5m2), v)
    assert cast[0].dtype == torch.bfloat16 and cast[1] is k and cast[2] is v
    assert torch.equal(o, fattn.torch.attention(q.bfloat16(), k, v, k_descale=of_k, v_descale=of_v))


BAD_EIGHT_BITS = [
    (lambda q, k, v: dict(q=k), fattn.InvalidArgument, "q has dtype float8_e4m3fn, not one of float32"),
    (lambda q, k, v: dict(k=q.to(torch.float8_e5m2)), fattn.InvalidArgument, "k has dtype float8_e5m2, which is not"),
    (lambda q, k, v: dict(v=q.to(torch.float8_e4m3fnuz)), fattn.InvalidArgument, "v has dtype float8_e4m3fnuz, which"),
    (lambda q, k, v: dict(v=q.to(torch.float8_e5m2fnuz)), fattn.InvalidArgument, "v has dtype float8_e5m2fnuz, which"),
    (lambda q, k, v: dict(bias=torch.ones(7, 9).to(k.dtype)), fattn.InvalidArgument, "bias has dtype float8_e4m3fn"),
    (lambda q, k, v: dict(sink=torch.ones(4).to(k.dtype)), fattn.InvalidArgument, "sink has dtype float8_e4m3fn"),
    (lambda q, k, v: dict(k_descale=torch.ones(2).half()), fattn.InvalidArgument, "k_descale has dtype float16"),
    (lambda q, k, v: dict(v_descale=torch.ones(2).to(k.dtype)), fattn.InvalidArgument, "v_descale has dtype float8_e4m3fn"),
    (lambda q, k, v: dict(k_descale=torch.ones(4)), fattn.InvalidShape, r"k_descale or .* \(4,\), which does not"),
    (lambda q, k, v: dict(k_descale=torch.ones(2, 2), v_descale=torch.ones(3)), fattn.InvalidShape, "does not broadcast"),
    (lambda q, k, v: dict(k_descale=torch.ones(2, 2, 1), v_descale=2.0), fattn.InvalidShape, "rank 3"),
    (lambda q, k, v: dict(k_descale=[1.0]), fattn.InvalidArgument, r"k_descale is \[1.0\], not a number"),
    (lambda q, k, v: dict(v_descale="2"), fattn.InvalidArgument, "v_descale is '2', not a number"),
]


@pytest.mark.parametrize("change, exception, words", BAD_EIGHT_BITS, ids=[c[2] for c in BAD_EIGHT_BITS])
def test_bad_eight_bits(change, exception, words):
    q, k, v = cache()[:3]
    given = dict(q=q, k=k, v=v) | change(q, k, v)
    for _ in range(2):
        with pytest.raises(exception, match=words):
            fattn.torch.attention(**given)
    with pytest.raises(TypeError, match="q is a list"):
        fattn.torch.attention([q], k, v, k_descale=2.0)


def test_freed_factors():
    for turn in range(3):
        q, k, v, of_k, of_v = cache()
        shrink(of_v)
        for attend in (fattn.torch.attention, fattn.attention):
            with pytest.raises(fattn.NullPointer, match=f"v_descale needs 16 {GONE}"):
                attend(q, k, v, k_descale=of_k, v_descale=of_v)
            attend(q, k, v, k_descale=of_k, v_descale=of_k)


PADDED = {
    "past the last sequence": dict(cu_seqlens_q=[0, 5, 12], cu_seqlens_k=[0, 9, 15]),
    "past the rows in use": dict(cu_seqlens_q=[0, 5, 12], cu_seqlens_k=[0, 9, 15], seqused_q=[3, 7], seqused_k=[2, 6]),
    "dense": dict(seqused_q=[3, 7], seqused_k=[2, 6]),
}


@pytest.mark.parametrize("name", PADDED)
def test_rows_of_no_sequence(name, monkeypatch):
    """Their results and gradients are 0, whatever was in the memory before: a Linear below and one above
    multiply them by other zeros."""
    monkeypatch.setattr(fattn.torch._calls._kind, "maker_of", lambda shape, strides, dtype, device: lambda:
                        torch.empty_strided(shape, strides, dtype=dtype, device=device).fill_(math.nan))
    fattn.cache_clear()
    lengths = {key: torch.tensor(value, dtype=torch.int32) for key, value in PADDED[name].items()}
    if name == "dense":
        given, function = tensors(), fattn.torch.attention
    else:
        given = [torch.randn(n, h, 8, requires_grad=True) for n, h in ((20, 4), (30, 2), (30, 2))]
        lengths |= dict(max_seqlen_q=7, max_seqlen_k=9)
        function = fattn.torch.attention_varlen
    o, lse = function(*given, **lengths, return_lse=True)
    pads = (o == 0).all(-1)
    assert pads.any() and not pads.all()
    assert torch.equal(lse == -math.inf, pads.movedim(-1, -2)) and not lse.isnan().any()
    gradients = torch.autograd.grad(o, given, torch.ones_like(o))
    for g in gradients:
        assert not g.isnan().any() and (g == 0).all(-1).any() and (g != 0).any()
    fattn.cache_clear()


def test_maximum_that_is_not_read():
    """Is an error, as in fattn's own functions."""
    q, k, v = tensors(grad=False)
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    for call in (lambda: fattn.torch.attention_with_kvcache(q, k, v, max_seqlen_k=9),
                 lambda: fattn.torch.attention_varlen(q[0], k, v, cu_seqlens_q=cu, max_seqlen_q=7, max_seqlen_k=9)):
        with pytest.raises(fattn.InvalidArgument, match="max_seqlen_k is given without cu_seqlens_k or block_table"):
            call()


def test_plain_functions_take_tensors():
    q, k, v = tensors(grad=False)
    o, lse = fattn.attention(q, k, v, causal=True, return_lse=True)
    assert isinstance(o, torch.Tensor) and torch.equal(o, fattn.torch.attention(q, k, v, causal=True))
    half = [t.to(torch.bfloat16) for t in (q, k, v)]
    assert fattn.attention(*half).dtype == torch.bfloat16
    merged, _ = fattn.merge(o, lse, o, lse)
    torch.testing.assert_close(merged, o)
    gradients = fattn.attention_backward(torch.ones_like(o), q, k, v, o, lse, causal=True)
    given = [t.clone().requires_grad_() for t in (q, k, v)]
    fattn.torch.attention(*given, causal=True).sum().backward()
    for a, b in zip(gradients, given):
        assert torch.equal(a, b.grad)


# --- PyTorch's own function -----------------------------------------------------------------------

SDPA = {
    "plain": ((2, 4, 7, 8), (2, 4, 9, 8), {}),
    "causal": ((2, 4, 7, 8), (2, 4, 9, 8), {"is_causal": True}),
    "causal, more rows": ((2, 4, 9, 8), (2, 4, 7, 8), {"is_causal": True}),
    "groups": ((2, 4, 7, 8), (2, 2, 9, 8), {"enable_gqa": True}),
    "scale": ((2, 4, 7, 8), (2, 4, 9, 8), {"scale": 0.7}),
    "mask": ((2, 4, 7, 8), (2, 4, 9, 8), {"attn_mask": (2, 1, 7, 9)}),
    "mask of two axes": ((2, 4, 7, 8), (2, 4, 9, 8), {"attn_mask": (7, 9)}),
    "bias": ((2, 4, 7, 8), (2, 4, 9, 8), {"bias": (2, 4, 7, 9)}),
    "bias of keys": ((2, 4, 7, 8), (2, 4, 9, 8), {"bias": (1, 9)}),
    "two axes": ((7, 8), (9, 8), {}),
    "three axes": ((4, 7, 8), (4, 9, 8), {"attn_mask": (4, 7, 9)}),
    "three axes, plain": ((4, 7, 8), (4, 9, 8), {"is_causal": True}),
    "three axes, groups": ((4, 7, 8), (2, 9, 8), {"enable_gqa": True}),
    "three axes, broadcast": ((4, 7, 8), (1, 9, 8), {}),
    "four axes and three": ((2, 4, 7, 8), (4, 9, 8), {}),
    "five axes, plain": ((3, 2, 4, 7, 8), (3, 2, 4, 9, 8), {"scale": 0.7}),
    "five axes, groups": ((3, 2, 4, 7, 8), (3, 1, 2, 9, 8), {"enable_gqa": True}),
    "five axes": ((3, 2, 4, 7, 8), (3, 2, 4, 9, 8), {"attn_mask": (1, 2, 4, 7, 9)}),
    "broadcast": ((2, 4, 7, 8), (1, 1, 9, 8), {}),
    "no keys": ((2, 4, 7, 8), (2, 4, 0, 8), {}),
}


@pytest.mark.parametrize("name", SDPA)
def test_sdpa(name):
    q_shape, k_shape, options = SDPA[name]
    options = dict(options)
    if "attn_mask" in options:
        mask = torch.rand(options["attn_mask"]) < 0.6
        mask[..., 0, :] = False  # a row that sees nothing
        options["attn_mask"] = mask
    leaves = [torch.randn(shape, requires_grad=True) for shape in (q_shape, k_shape, k_shape)]
    if "bias" in options:
        options["attn_mask"] = torch.randn(options.pop("bias"), requires_grad=True)
        leaves.append(options["attn_mask"])
    wanted = F.scaled_dot_product_attention(*leaves[:3], **options)
    got = fattn.torch.scaled_dot_product_attention(*leaves[:3], **options)
    torch.testing.assert_close(got, wanted.nan_to_num(), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(fattn.torch.scaled_dot_product_attention(*leaves[:3], **options), got)
    dout = torch.randn_like(wanted)
    for a, b in zip(torch.autograd.grad(got, leaves, dout), torch.autograd.grad(wanted, leaves, dout)):
        torch.testing.assert_close(a, b.nan_to_num(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SDPA)
def test_sdpa_describes_a_problem_once(name, monkeypatch):
    """However many axes there are, and whether they broadcast."""
    q_shape, k_shape, options = SDPA[name]
    mask = {"attn_mask": torch.ones(options[word], dtype=torch.bool) if word == "attn_mask" else torch.zeros(options[word])
            for word in ("attn_mask", "bias") if word in options}
    options = {word: value for word, value in options.items() if word not in ("attn_mask", "bias")} | mask
    q, k, v = torch.randn(q_shape), torch.randn(k_shape), torch.randn(k_shape)
    wanted = fattn.torch.scaled_dot_product_attention(q, k, v, **options)
    monkeypatch.setattr(fattn.torch._calls, "prepare", lambda *_: pytest.fail("it is described again"))
    assert torch.equal(fattn.torch.scaled_dot_product_attention(q, k, v, **options), wanted)


def test_sdpa_strides():
    """Channels that do not lie together are PyTorch's business, and so taken."""
    q, k, v = (torch.randn(2, 4, 8, 7).transpose(2, 3) for _ in range(3))
    torch.testing.assert_close(fattn.torch.scaled_dot_product_attention(q, k, v),
                               F.scaled_dot_product_attention(q, k, v), rtol=1e-5, atol=1e-5)


def test_sdpa_errors():
    q, k = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 9, 8)
    with pytest.raises(RuntimeError, match=r"query, \(2, 4\), key, \(2, 2\), .* do not broadcast; enable_gqa=True"):
        fattn.torch.scaled_dot_product_attention(q, k, k)
    with pytest.raises(fattn.InvalidArgument, match="q has layout torch.sparse_coo"):
        fattn.torch.scaled_dot_product_attention(q.to_sparse(), q, q)
    with pytest.raises(RuntimeError, match="together"):
        fattn.torch.scaled_dot_product_attention(q, q, q, torch.ones(7, 7, dtype=torch.bool),
                                                 is_causal=True)
    with pytest.raises(RuntimeError, match="one dtype"):
        fattn.torch.scaled_dot_product_attention(q, q.bfloat16(), q.bfloat16())
    with pytest.raises(fattn.Error):
        fattn.torch.scaled_dot_product_attention(q.int(), q.int(), q.int())
    with pytest.raises(fattn.Unsupported, match="f64"):
        fattn.torch.scaled_dot_product_attention(q.double(), q.double(), q.double())


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("sq, sk", [(4, 4), (4, 7), (7, 4)])
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_causal_bias(bias, sq, sk):
    """PyTorch's objects for causal masks, which are tensors with nothing in their memory."""
    leaves = [torch.randn(2, 4, n, 8, requires_grad=True) for n in (sq, sk, sk)]
    seen = bias(sq, sk)._materialize()
    wanted = F.scaled_dot_product_attention(*leaves, attn_mask=seen).nan_to_num()
    with fattn.torch.sdpa():
        switched = F.scaled_dot_product_attention(*leaves, attn_mask=bias(sq, sk))
    dout = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, leaves, dout)
    for o in (switched, fattn.torch.scaled_dot_product_attention(*leaves, bias(sq, sk))):
        torch.testing.assert_close(o, wanted, rtol=1e-5, atol=1e-5)
        for a, b in zip(torch.autograd.grad(o, leaves, dout), gradients):
            torch.testing.assert_close(a, b.nan_to_num(), rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="together"):
        fattn.torch.scaled_dot_product_attention(*leaves, bias(sq, sk), is_causal=True)
    for name in ("bias", "mask"):
        with pytest.raises(TypeError, match=f"{name} is a CausalBias"):
            fattn.torch.attention(*leaves, layout="bhsd", **{name: bias(sq, sk)})


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sdpa_types_of_masks(dtype, autocast):
    """What PyTorch refuses, integers above all, is not added to scores."""
    q = torch.randn(2, 4, 7, 8, dtype=dtype)
    for kind in (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
                 torch.float64):
        mask = torch.ones(7, 7).tril().to(kind)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            try:
                wanted = F.scaled_dot_product_attention(q, q, q, mask)
            except RuntimeError:
                with pytest.raises(RuntimeError, match=f"attn_mask is {kind}"):
                    fattn.torch.scaled_dot_product_attention(q, q, q, mask)
            else:
                got = fattn.torch.scaled_dot_product_attention(q, q, q, mask)
                bound = 1e-5 if got.dtype == torch.float32 else 3e-2
                torch.testing.assert_close(got, wanted, rtol=bound, atol=bound)


def test_sdpa_asks_torch_function():
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is F.scaled_dot_product_attention:
                return "taken"
            return super().__torch_function__(function, types, args, kwargs)

    class Plain(torch.Tensor):
        pass

    q = torch.randn(2, 4, 7, 8)
    wanted = fattn.torch.scaled_dot_product_attention(q, q, q)
    with fattn.torch.sdpa():
        assert F.scaled_dot_product_attention(q, q, q.as_subclass(Own)) == "taken"
        o = F.scaled_dot_product_attention(q, q.as_subclass(Plain), q)
    assert type(o) is Plain and torch.equal(o.as_subclass(torch.Tensor), wanted)
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    for _ in range(3):  # of known calls, too
        with Mode():
            assert torch.equal(fattn.torch.scaled_dot_product_attention(q, q, q), wanted)
    assert seen.count(fattn.torch.scaled_dot_product_attention) == 3


def test_sdpa_dropout():
    q = torch.randn(2, 4, 64, 16)
    torch.manual_seed(3)
    a = fattn.torch.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    b = fattn.torch.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(a, fattn.torch.scaled_dot_product_attention(q, q, q, dropout_p=0.5))
    assert not torch.equal(a, b)
    ones = fattn.torch.scaled_dot_product_attention(q, q, torch.ones_like(q), dropout_p=0.5)
    assert abs(ones.mean() - 1) < 0.05 and ones.std() > 0.01


def test_switch():
    original = F.scaled_dot_product_attention
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 9, 16)
    wanted = layer(x, x, x, need_weights=False)[0]
    with fattn.torch.sdpa():
        assert F.scaled_dot_product_attention is fattn.torch.scaled_dot_product_attention
        with fattn.torch.sdpa(unsupported="torch"):
            pass
        assert F.scaled_dot_product_attention is fattn.torch.scaled_dot_product_attention
        torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], wanted, rtol=1e-5, atol=1e-5)
    assert F.scaled_dot_product_attention is original
    fattn.torch.sdpa(True)
    assert F.scaled_dot_product_attention is fattn.torch.scaled_dot_product_attention
    fattn.torch.sdpa(False)
    assert F.scaled_dot_product_attention is original


def test_switch_nests():
    original, ours, sdpa = F.scaled_dot_product_attention, fattn.torch.scaled_dot_product_attention, fattn.torch.sdpa

    def now():
        return F.scaled_dot_product_attention

    with sdpa(True):
        assert now() is ours
        with sdpa(False):
            assert now() is original
            with sdpa():
                assert now() is ours
            assert now() is original
        assert now() is ours
    assert now() is original
    sdpa(True)
    with sdpa(False) as off:
        assert now() is original
        with off:
            pass
        assert now() is original
    assert now() is ours
    with sdpa():
        sdpa(False)  # of the process: seen when the context is left
        assert now() is ours
    assert now() is original


@pytest.mark.parametrize("on", (None, True))
def test_switch_as_a_decorator(on):
    """As PyTorch's contexts are; also of a function that calls itself, or fails."""
    original, ours = F.scaled_dot_product_attention, fattn.torch.scaled_dot_product_attention

    @fattn.torch.sdpa(on)
    def fails_at_zero(n):
        assert F.scaled_dot_product_attention is ours
        return 1 // n if n < 2 else fails_at_zero(n - 1)

    for _ in range(2):
        assert F.scaled_dot_product_attention is original
        assert fails_at_zero(3) == 1
        with pytest.raises(ZeroDivisionError):
            fails_at_zero(0)
    assert F.scaled_dot_product_attention is original


def test_switch_of_overlapping_contexts():
    """As of two threads: whoever leaves first takes the own one away and no other."""
    original, ours = F.scaled_dot_product_attention, fattn.torch.scaled_dot_product_attention
    for first, second in ((0, 1), (1, 0)):
        contexts = fattn.torch.sdpa(), fattn.torch.sdpa()
        for context in contexts:
            context.__enter__()
        contexts[first].__exit__()
        assert F.scaled_dot_product_attention is ours
        contexts[second].__exit__()
        assert F.scaled_dot_product_attention is original


def test_switch_tells_what_it_leaves():
    q = torch.randn(1, 1, 3, 8, dtype=torch.float64)
    with fattn.torch.sdpa():
        with pytest.raises(fattn.Unsupported):
            F.scaled_dot_product_attention(q, q, q)
    with fattn.torch.sdpa(unsupported="torch"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            o = F.scaled_dot_product_attention(q, q, q)
    assert o.dtype == torch.float64 and len(told) == 1 and "f64" in str(told[0].message)


def nested(*lengths, layout=torch.jagged):
    return torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in lengths or (2, 4)], layout=layout)


def test_nested():
    lengths = (5, 1, 8)
    rows = [torch.randn(n, 4, 8) for n in lengths]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    q = jagged.transpose(1, 2)
    o = fattn.torch.scaled_dot_product_attention(q, q, q, is_causal=True)
    dense = [r.transpose(0, 1)[None].requires_grad_() for r in rows]
    for got, r in zip(o.transpose(1, 2).unbind(), dense):
        wanted = F.scaled_dot_product_attention(r, r, r, is_causal=True)
        torch.testing.assert_close(got.transpose(0, 1)[None], wanted, rtol=1e-5, atol=1e-5)
        wanted.sum().backward()
    o.transpose(1, 2).values().sum().backward()
    torch.testing.assert_close(jagged.grad.values(),
                               torch.cat([r.grad[0].transpose(0, 1) for r in dense]), rtol=1e-4,
                               atol=1e-5)


class SelfAttention(torch.nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize("unsupported", ["error", "torch"])
def test_switch_in_a_traced_graph(unsupported):
    x = torch.randn(2, 3, 5, 8)
    wanted = fattn.torch.scaled_dot_product_attention(x, x, x, is_causal=True)
    with fattn.torch.sdpa(unsupported=unsupported):
        graph = torch.fx.symbolic_trace(SelfAttention())
    assert torch.equal(pickle.loads(pickle.dumps(graph))(x), wanted)
    assert fattn.torch.scaled_dot_product_attention in [node.target for node in graph.graph.nodes]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("unsupported", ["error", "torch"])
def test_switch_in_torchscript(unsupported):
    """PyTorch's own runs there, as without the switch."""
    x, layer = torch.randn(3, 1, 16), torch.nn.MultiheadAttention(16, 2)
    with fattn.torch.sdpa(unsupported=unsupported):
        torch.jit.script(SelfAttention())(torch.randn(2, 3, 5, 8))
        torch.testing.assert_close(torch.jit.script(layer)(x, x, x)[0], layer(x, x, x)[0])


def test_operations_are_counted():
    x = torch.randn(2, 3, 5, 8, requires_grad=True)

    def count(call):
        with FlopCounterMode(display=False) as counter:
            call().sum().backward()
        return counter.get_total_flops()

    for options in ({}, {"is_causal": True}):  # two products forward, five backward, as PyTorch counts its own
        assert (count(lambda: fattn.torch.scaled_dot_product_attention(x, x, x, **options)) ==
                2 * 3 * 5 * 5 * 2 * (2 * 8 + 5 * 8))
    given, lengths = packed()
    assert count(lambda: fattn.torch.attention_varlen(*given, **lengths)) == 4 * (5 * 9 + 7 * 6) * 2 * (4 * 8 + 3 * 6)


def test_calls_are_profiled():
    q = torch.randn(1, 2, 4, 8)
    for _ in range(3):
        fattn.torch.scaled_dot_product_attention(q, q, q)
    for call in (fattn.torch.scaled_dot_product_attention, fattn.torch.attention):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call(q, q, q)
        assert "fattn::forward_common" in [event.key for event in profile.key_averages()]


LEFT = {
    "double": lambda q: ([q.double()] * 3, {}),
    "double, float bias": lambda q: ([q.double()] * 3, {"attn_mask": torch.randn(4, 4)}),
    "no channels": lambda q: ([q[..., :0], q[..., :0], q], {}),
    "no channels of value": lambda q: ([q, q, q[..., :0]], {}),
    "many channels": lambda q: ([torch.randn(1, 2, 4, 600)] * 3, {}),
    "heads of key and of value": lambda q: ([q.repeat(1, 2, 1, 1), q, q[:, :1]], {"enable_gqa": True}),
    "nested, strided": lambda q: ([nested(layout=torch.strided)] * 3, {}),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", LEFT)
def test_switch_leaves_what_it_cannot(name):
    given, options = LEFT[name](torch.randn(1, 2, 4, 8))
    wanted = F.scaled_dot_product_attention(*given, **options)
    with pytest.raises((fattn.Error, NotImplementedError)):
        fattn.torch.scaled_dot_product_attention(*given, **options)
    fattn.torch._sdpa._told.clear()
    with fattn.torch.sdpa(unsupported="torch"), pytest.warns(match="PyTorch's own attention runs"):
        o = F.scaled_dot_product_attention(*given, **options)
    assert type(o) is type(wanted) and o.is_nested == wanted.is_nested
    if not o.is_nested and o.device.type == "cpu":
        torch.testing.assert_close(o, wanted)


def test_switch_leaves_no_mistakes():
    q = torch.randn(1, 2, 4, 8)
    with fattn.torch.sdpa(unsupported="torch"):
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, q[..., :4], q)
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, q, q, torch.ones(4, 4, dtype=torch.int64))


@pytest.mark.parametrize("causal", [False, True])
def test_nested_with_holes(causal):
    """Rows between sequences, which `lengths` leaves out, are not attended to."""
    values = torch.randn(12, 4, 8, requires_grad=True)
    jagged = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 5, 12]), lengths=torch.tensor([3, 6]))
    q = jagged.transpose(1, 2)
    o = fattn.torch.scaled_dot_product_attention(q, q, q, is_causal=causal).transpose(1, 2)
    parts = [r.transpose(0, 1)[None] for r in jagged.unbind()]
    wanted = [F.scaled_dot_product_attention(r, r, r, is_causal=causal)[0].transpose(0, 1) for r in parts]
    for a, b in zip(o.unbind(), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    got, = torch.autograd.grad(sum(r.square().sum() for r in o.unbind()), values)
    expected, = torch.autograd.grad(sum(r.square().sum() for r in wanted), values)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_nested_values_of_other_lengths():
    q, k, v, w = (nested(*n).transpose(1, 2) for n in ((3, 5), (2, 6), (2, 6), (6, 2)))
    torch.testing.assert_close(fattn.torch.scaled_dot_product_attention(q, k, v).values(),
                               F.scaled_dot_product_attention(q, k, v).values(), rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="key and value have different lengths"):
        fattn.torch.scaled_dot_product_attention(q, k, w)


# --- Bad input ------------------------------------------------------------------------------------

BAD = [
    (lambda q, k, v: dict(q=q[0]), fattn.InvalidShape, "q has shape"),
    (lambda q, k, v: dict(k=k.double()), fattn.InvalidArgument, "k has dtype float64, q float32: float64 does not mix"),
    (lambda q, k, v: dict(q=q.int(), k=k.int(), v=v.int()), fattn.InvalidArgument, "q has dtype int32"),
    (lambda q, k, v: dict(q=q.transpose(1, 3).contiguous().transpose(1, 3)), fattn.InvalidStride,
     "q has channels"),
    (lambda q, k, v: dict(q=q.to_sparse()), fattn.InvalidArgument, "layout torch.sparse_coo"),
    (lambda q, k, v: dict(mask=torch.ones(7, 9)), fattn.InvalidArgument, "mask has dtype float32"),
    (lambda q, k, v: dict(alibi_slopes=torch.rand(4, requires_grad=True)), fattn.InvalidArgument,
     "alibi_slopes requires a gradient"),
    (lambda q, k, v: dict(anchor="middle"), fattn.InvalidArgument, "anchor is 'middle'"),
    (lambda q, k, v: dict(layout="sbhd"), fattn.InvalidArgument, "layout is 'sbhd'"),
    (lambda q, k, v: dict(block_size=(2, 2)), fattn.InvalidArgument, "block_size is given without block_mask"),
    (lambda q, k, v: dict(chunk=2**64 + 4), fattn.InvalidArgument, "chunk is 18446744073709551620, not in"),
    (lambda q, k, v: dict(window=(2**70, 0)), fattn.InvalidArgument, "window_left is 1180591620717411303424, not in"),
    (lambda q, k, v: dict(positions=(2**63, 0, -1, -1)), fattn.InvalidArgument, "q_offset is 9223372036854775808"),
    (lambda q, k, v: dict(positions=(0.0, 0, -1, -1)), fattn.InvalidArgument, "a number of positions is 0.0, not an integer"),
    (lambda q, k, v: dict(out_dtype=torch.float16), fattn.InvalidArgument, "is torch.float16, not torch.float32$"),
    (lambda q, k, v: dict(causal=[True]), fattn.InvalidArgument, r"an option is \[True\], of type list"),
    (lambda q, k, v: dict(positions=(0, 0)), fattn.InvalidArgument, r"positions is \(0, 0\), not \(q_offset"),
    (lambda q, k, v: dict(device="cuda:99"), (fattn.NoDevice, fattn.UnknownDevice), "cuda"),
    (lambda q, k, v: dict(seqused_k=torch.tensor([1, 99], dtype=torch.int32)), fattn.InvalidData, "99"),
]


@pytest.mark.parametrize("change, exception, words", BAD, ids=[c[2] for c in BAD])
def test_bad_input(change, exception, words):
    q, k, v = tensors(grad=False)
    given = dict(q=q, k=k, v=v) | change(q, k, v)
    for _ in range(2):
        with pytest.raises(exception, match=words):
            fattn.torch.attention(**given)


def test_wrong_numbers_do_not_stay():
    """A call that fails leaves nothing behind for a right one with equal numbers; of integers a right one leaves
    nothing for a wrong one, either."""
    q, k, v = tensors(grad=False)
    p, cu = q[0], torch.tensor([0, 7], dtype=torch.int32)

    def packed(longest):
        return fattn.torch.attention_varlen(p, p, p, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest,
                                            max_seqlen_k=7)

    for call, wrong, right, words in ((lambda n: fattn.torch.attention(q, k, v, chunk=n), 5.0, 5, "chunk is 5.0"),
                                      (packed, 7.0, 7, "max_seqlen_q is 7.0")):
        for _ in range(2):
            with pytest.raises(fattn.InvalidArgument, match=words):
                call(wrong)
            call(right)
    with pytest.raises(fattn.InvalidArgument, match="scale is"):
        fattn.torch.attention(q, k, v, scale=1 + 0j)
    fattn.torch.attention(q, k, v, scale=1.0)


def test_bad_lengths_of_a_cache():
    """By the name that the caller gave them."""
    q, k, v = tensors(sq=1, sk=16, grad=False)
    for lengths, exception, words in (
            (torch.zeros(2, 1, dtype=torch.int32), fattn.InvalidShape, "cache_seqlens has shape"),
            (torch.zeros(2, dtype=torch.int64), fattn.InvalidArgument, "cache_seqlens has dtype"),
            (torch.tensor([1, 99], dtype=torch.int32), fattn.InvalidData, r"cache_seqlens\[1\] is 99"),
            (3, TypeError, "cache_seqlens is a int")):
        with pytest.raises(exception, match=words):
            fattn.torch.attention_with_kvcache(q, k, v, cache_seqlens=lengths)


def test_numbers_given_as_tensors():
    """Those of one number are taken; a gradient that would be dropped is an error, as in PyTorch."""
    q = torch.randn(1, 2, 4, 8)
    calls = {"scale": lambda x: fattn.torch.scaled_dot_product_attention(q, q, q, scale=x),
             "softcap": lambda x: fattn.torch.attention(q, q, q, softcap=x),
             "dropout_p": lambda x: fattn.torch.scaled_dot_product_attention(q, q, q, dropout_p=x)}
    calls["scale "] = lambda x: fattn.torch.attention(q, q, q, scale=x)
    calls["dropout_p "] = lambda x: fattn.torch.attention(q, q, q, dropout_p=x)
    for name, call in calls.items():
        x = torch.tensor(0.5)
        for value in (0.5, 0.25):  # written in place: not the plan of the other
            x.fill_(value)
            torch.manual_seed(3)
            o = call(x)
            for other in (value, np.array(value)):
                torch.manual_seed(3)
                assert torch.equal(o, call(other))
        for bad in (torch.tensor(0.5, requires_grad=True), torch.tensor([0.5])):
            with pytest.raises(TypeError, match=f"{name.strip()} is a tensor that"):
                call(bad)
    chunk = torch.tensor(2)
    for chunk[...] in (2, 3):
        assert torch.equal(*(fattn.torch.attention(q, q, q, chunk=c) for c in (chunk, int(chunk))))


NO_TENSORS = [
    (lambda q, a, s: a(q, None, q), "k is a NoneType"),
    (lambda q, a, s: a(None, q, q), "q is a NoneType"),
    (lambda q, a, s: a(q, q.numpy(), q), "k is a numpy.ndarray"),
    (lambda q, a, s: a(q, q, q, mask=[True]), "mask is a list"),
    (lambda q, a, s: a(q, q, nested()), "v is a nested tensor"),
    (lambda q, a, s: a(nested(), q, q), "q is a nested tensor"),
    (lambda q, a, s: s(None, q, q), "query is a NoneType"),
    (lambda q, a, s: s(q, q.numpy(), q), "key is a numpy.ndarray"),
    (lambda q, a, s: s(q, q, q, torch.ones(4, 4).bool().numpy()), "attn_mask is a numpy.ndarray"),
    (lambda q, a, s: s(q, nested(), nested()), "must all be nested"),
    (lambda q, a, s: s(nested(), nested(), q), "must all be nested"),
]


@pytest.mark.parametrize("call, words", NO_TENSORS, ids=[words for _, words in NO_TENSORS])
def test_no_tensors(call, words):
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), pytest.raises(TypeError, match=words):
            call(torch.randn(2, 4, 2, 8), fattn.torch.attention, fattn.torch.scaled_dot_product_attention)


def test_freed_storage():
    """As FSDP frees parameters that are not in use: shapes and strides stay, and plans are found by them."""
    q, k, v = tensors()
    o = fattn.torch.attention(q, k, v)
    turned = [t.detach().transpose(1, 2) for t in (q, k, v)]
    v.untyped_storage().resize_(0)
    for call in (lambda: fattn.torch.attention(q, k, v),
                 lambda: fattn.torch.attention(q.detach(), k.detach(), v.detach()),
                 lambda: fattn.torch.scaled_dot_product_attention(*turned, enable_gqa=True),
                 lambda: torch.autograd.grad(o.sum(), q)):
        with pytest.raises(fattn.NullPointer, match="v needs 864 bytes of its storage, which has 0"):
            call()


guarded = pytest.mark.skipif(fattn.torch._calls._Guards is None, reason="this PyTorch's guards are not known")


@guarded
@pytest.mark.parametrize("grad", (False, True))
def test_known_calls(grad):
    """A call that is found by one look at its tensors is the same call, and another one is not taken for it:
    other shapes, strides, dtypes, modes and options, in turns."""
    sdpa = fattn.torch.scaled_dot_product_attention
    shapes = [(2, 3, 8, 16), (2, 3, 9, 16), (1, 3, 8, 16), (2, 6, 8, 8)]
    makers = [lambda s: torch.randn(s), lambda s: torch.randn(s[0], s[2], s[1], s[3]).transpose(1, 2),
              lambda s: torch.randn(s).half(), lambda s: torch.randn(s).bfloat16(),
              lambda s: torch._neg_view(torch.randn(s))]
    makers = [lambda s, m=m: m(s).requires_grad_(grad) for m in makers]
    makers += [lambda s: torch.nn.Parameter(torch.randn(s), requires_grad=grad)]
    for turn in range(2):
        for causal in (False, True):
            for shape in shapes:
                for maker in makers * 3 if turn else [m for m in makers for _ in range(3)]:
                    q, k, v = (maker(shape) for _ in range(3))
                    o, expected = sdpa(q, k, v, is_causal=causal), F.scaled_dot_product_attention(q, k, v, is_causal=causal)
                    bound = {torch.bfloat16: 3e-2, torch.float16: 4e-3}.get(q.dtype, 1e-5)
                    assert o.dtype == q.dtype and o.requires_grad == grad
                    torch.testing.assert_close(o, expected, atol=bound, rtol=bound)
                    if grad:
                        g = torch.randn_like(o)
                        g = g if turn else g.transpose(1, 2).contiguous().transpose(1, 2)
                        for ours, theirs in zip(torch.autograd.grad(o, (q, k, v), g),
                                                torch.autograd.grad(expected, (q, k, v), g)):
                            torch.testing.assert_close(ours, theirs, atol=4 * bound, rtol=4 * bound)
    assert len(fattn.torch._calls._known) >= 2 * len(shapes), "too little was remembered"
    fattn.cache_clear()
    assert not fattn.torch._calls._known


@guarded
@pytest.mark.parametrize("grad", (False, True))
def test_known_calls_with_a_tensor_twice(grad):
    """Are found too, and are not taken for those of different tensors, nor these for them."""
    fattn.cache_clear()
    x, y, z = (torch.randn(2, 3, 8, 16, requires_grad=grad) for _ in range(3))
    cases = [given for given in ((x, x, x), (x, y, y), (x, x, y), (x, y, z)) for _ in range(3)]
    for given in cases + cases[::-1]:
        o, expected = fattn.torch.scaled_dot_product_attention(*given), F.scaled_dot_product_attention(*given)
        torch.testing.assert_close(o, expected, atol=1e-5, rtol=1e-5)
        if grad:
            leaves, g = list({id(t): t for t in given}.values()), torch.randn_like(o)
            for a, b in zip(torch.autograd.grad(o, leaves, g), torch.autograd.grad(expected, leaves, g)):
                torch.testing.assert_close(a, b, atol=4e-5, rtol=4e-5)
    known = [known for few in fattn.torch._calls._known.values() for known in few]
    for given in ((x, x, x), (x, y, y), (x, y, z)):
        assert sum(known.check(*given) for known in known) == 1
    p, cu = torch.randn(7, 2, 8), torch.tensor([0, 3, 7], dtype=torch.int32)
    for _ in range(3):
        fattn.torch.attention_varlen(p, p, p, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=4, max_seqlen_k=4)
    known = [known for few in fattn.torch._calls._known.values() for known in few]
    assert sum(known.check(p, p, p, cu, cu) for known in known if len(known.call.places) == 5) == 1


@guarded
@pytest.mark.parametrize("grad", (False, True))
def test_known_calls_with_masks(grad, monkeypatch):
    """Are found by one look as well, whatever the mask, and the masks of others are not taken for theirs."""
    fattn.cache_clear()
    masks = [lambda n: torch.rand(2, 3, n, n) < 0.7, lambda n: torch.rand(n, n) < 0.7, lambda n: None,
             lambda n: torch.randn(n).expand(2, 3, n, n), lambda n: torch.randn(n, n, requires_grad=grad)]

    def check():
        for n in (7, 9):
            for make in masks:
                mask = make(n)
                leaves = [torch.randn(2, 3, n, 16, requires_grad=grad) for _ in range(3)]
                o = fattn.torch.scaled_dot_product_attention(*leaves, mask)
                expected = F.scaled_dot_product_attention(*leaves, mask).nan_to_num()
                torch.testing.assert_close(o, expected, atol=1e-5, rtol=1e-5)
                leaves += [mask] if mask is not None and mask.requires_grad else []
                g = torch.randn_like(o)
                for a, b in zip(*(torch.autograd.grad(x, leaves, g) for x in (o, expected)) if grad else ()):
                    torch.testing.assert_close(a, b.nan_to_num(), atol=4e-5, rtol=4e-5)

    for _ in range(3):
        check()
    for slower in ("make_known", "operator"):
        monkeypatch.setattr(fattn.torch._sdpa, slower, lambda *_, **__: pytest.fail("it is not known"))
    check()


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


@guarded
def test_known_calls_elsewhere():
    """What a known call's tensors do not show: autocast, transforms, modes, tracing and freed memory."""
    sdpa = fattn.torch.scaled_dot_product_attention
    fattn.cache_clear()
    q, k, v = (torch.randn(2, 3, 8, 16) for _ in range(3))
    expected = [sdpa(q, k, v) for _ in range(4)][-1]
    assert any(known.check(q, k, v) for few in fattn.torch._calls._known.values() for known in few)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            assert sdpa(q, k, v).dtype == torch.bfloat16
            low = sdpa(q.bfloat16(), k.bfloat16(), v.bfloat16())
        with torch.autocast("cpu", torch.float16):
            assert sdpa(q.bfloat16(), k.bfloat16(), v.bfloat16()).dtype == torch.float16
        assert low.dtype == torch.bfloat16 and torch.equal(sdpa(q, k, v), expected)
    mapped = torch.func.vmap(sdpa)(*(t[:, None].expand(2, 3, 3, 8, 16) for t in (q, k, v)))
    torch.testing.assert_close(mapped[:, 0], expected)
    with Recorder() as recorder:
        sdpa(q, k, v)
    assert "fattn::forward_common" in recorder.names
    mask = torch.ones(8, 8, dtype=torch.bool)
    for _ in range(4):
        torch.testing.assert_close(sdpa(q, k, v, mask), expected)
    with Recorder() as recorder:
        sdpa(q, k, v, mask)
    assert "fattn::forward_common" in recorder.names
    with pytest.raises(RuntimeError, match="attn_mask and is_causal cannot be given together"):
        sdpa(q, k, v, mask, is_causal=True)
    with pytest.raises(TypeError, match="attn_mask is a list"):
        sdpa(q, k, v, [[True]])
    mask.untyped_storage().resize_(0)
    with pytest.raises(fattn.NullPointer, match="mask needs"):
        sdpa(q, k, v, mask)
    with torch._subclasses.FakeTensorMode() as mode:
        assert sdpa(*(mode.from_tensor(t) for t in (q, k, v))).shape == expected.shape
    with torch.inference_mode():
        assert torch.equal(sdpa(q, k, v), expected)
    v.untyped_storage().resize_(0)
    with pytest.raises(fattn.NullPointer, match=GONE):
        sdpa(q, k, v)


@guarded
@pytest.mark.parametrize("grad", (False, True))
def test_known_calls_with_features(grad, monkeypatch):
    """The same of attention(): with and without lse, with tensors that come and go, of changing lengths."""
    attention = fattn.torch.attention

    def results(tensors, g, options):
        o, lse = attention(*tensors, return_lse=True, **options)
        alone = attention(*tensors, **options)
        wanted = [t for t in (*tensors, *options.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
        assert o.requires_grad == lse.requires_grad == alone.requires_grad == bool(wanted)
        made = [d for result in (o, alone) for d in torch.autograd.grad(result, wanted, g)] if wanted else []
        return [o, lse, alone, *made]

    for turn in range(4):
        for length in (7, 9):
            q, k, v = (torch.randn(2, length, 3, 16).requires_grad_(grad) for _ in range(3))
            bias, mask = torch.randn(2, 3, length, length), torch.rand(2, 1, length, length) < 0.8
            given = [dict(bias=bias), dict(mask=mask), dict(sink=torch.randn(3)), dict(bias=bias, mask=mask),
                     dict(bias=bias.detach().clone().requires_grad_(grad)), dict(softcap=2.0), dict(causal=True),
                     dict(seqused_k=torch.tensor([length, 3], dtype=torch.int32)), dict(window=(2, 0)), dict()]
            for options in given:
                g = torch.randn_like(q)
                with monkeypatch.context() as patch:
                    patch.setattr(fattn.torch._functions, "find_known", lambda *_: None)
                    expected = results((q, k, v), g, options)
                for ours, theirs in zip(results((q, k, v), g, options), expected, strict=True):
                    assert torch.equal(ours, theirs)
    assert len(fattn.torch._calls._known) >= 10


def test_known_gradients_of_freed_storage():
    q, k, v = (torch.randn(2, 3, 8, 16, requires_grad=True) for _ in range(3))
    for turn in range(4):
        o = fattn.torch.scaled_dot_product_attention(q, k, v)
        if turn == 3:
            v.untyped_storage().resize_(0)
            with pytest.raises(fattn.NullPointer, match=GONE):
                o.sum().backward()
        else:
            o.sum().backward()


def shrink(t):
    """Takes the last element's memory away, which leaves shape and strides as they are."""
    t.untyped_storage().resize_(t.untyped_storage().nbytes() - t.itemsize)


GONE = "bytes of its storage, which has .*: it was freed or resized"


@pytest.mark.parametrize("known", (False, True), ids=("new", "known"))
@pytest.mark.parametrize("name", ("q", "k", "v", "bias", "mask", "out"))
def test_shrunk_storage(name, known):
    """Views that begin later, too; `known`: of a problem whose plan is there."""
    def calls(batch):
        whole = dict(zip("qkv", tensors(batch, dv=8, grad=False)))
        if name in ("bias", "mask"):
            whole[name] = {"bias": torch.randn, "mask": torch.ones}[name](batch, 4, 7, 9)
        if name == "mask":
            whole[name] = whole[name].bool()
        out = torch.full((batch, 7, 4, 8), 42.0)
        given = {key: t[batch - 2:] for key, t in whole.items()}
        q, k, v = qkv = given["q"], given["k"], given["v"]
        turned = [t.transpose(1, 2) for t in qkv]
        more = {key: given[key] for key in given.keys() - set("qkv")}
        learning, learning_turned = q.detach().requires_grad_(), turned[0].detach().requires_grad_()
        of_rank_5, written = [t[None] for t in turned], out[batch - 2:]
        result = [lambda: fattn.attention(*qkv, **more, out=written)]
        if name != "out":
            result += [lambda: fattn.attention(*qkv, **more),
                       lambda: fattn.torch.attention(*qkv, **more),
                       lambda: fattn.torch.attention(learning, k, v, **more),
                       lambda: torch.ops.fattn.forward(*qkv, more.get("bias"), more.get("mask"))]
        if name in "qkv":
            result += [lambda: fattn.torch.scaled_dot_product_attention(*turned, enable_gqa=True),
                       lambda: fattn.torch.scaled_dot_product_attention(learning_turned, *turned[1:],
                                                                        enable_gqa=True),
                       lambda: fattn.torch.scaled_dot_product_attention(*of_rank_5, enable_gqa=True)]
        return result, whole | {"out": out}

    fattn.cache_clear()
    for batch in (2, 3):
        if known:
            for call in calls(batch)[0]:
                call()
        now, whole = calls(batch)
        shrink(whole[name])
        for call in now:
            with pytest.raises(fattn.NullPointer, match=f"{'o' if name == 'out' else name} needs .* {GONE}"):
                call()
        assert (whole["out"].view(-1)[:-1] == 42).all()


def test_shrunk_storage_that_pytorch_would_copy():
    """Channels apart, types of autocast, a gradient that is not dense."""
    def apart():
        return torch.randn(2, 4, 8, 7).transpose(2, 3)

    for i, name in enumerate("qkv"):
        given = [apart() for _ in range(3)]
        fattn.torch.scaled_dot_product_attention(*given)
        shrink(given[i])
        with pytest.raises(fattn.NullPointer, match=f"{name} needs .* {GONE}"):
            fattn.torch.scaled_dot_product_attention(*given)
    given = [torch.randn(2, 4, 7, 8) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        fattn.torch.scaled_dot_product_attention(*given)
        shrink(given[1])
        with pytest.raises(fattn.NullPointer, match=f"k needs .* {GONE}"):
            fattn.torch.scaled_dot_product_attention(*given)
    given = [torch.randn(2, 4, 7, 8, requires_grad=True) for _ in range(3)]
    o, dout = fattn.torch.scaled_dot_product_attention(*given), apart()
    torch.autograd.grad(o, given, dout, retain_graph=True)
    shrink(dout)
    with pytest.raises(fattn.NullPointer, match=f"dout needs .* {GONE}"):
        torch.autograd.grad(o, given, dout)


@pytest.mark.parametrize("name", ("q", "k", "v", "o", "dout", "bias", "dlse"))
def test_shrunk_storage_in_backward(name):
    """Memory of saved tensors goes without a change of their versions."""
    for known in (False, True):
        fattn.cache_clear()
        q, k, v = tensors(dv=8)
        more = {"bias": torch.randn(2, 4, 7, 9)} if name == "bias" else {}
        o, lse = fattn.torch.attention(q, k, v, **more, return_lse=True)
        plain = fattn.torch.attention(q, k, v, **more)
        if name == "o":  # the other's results, which nobody saved twice
            o, plain = plain, o
        dout, dlse = torch.randn_like(o), torch.randn_like(lse)
        given = dict(q=q, k=k, v=v, o=plain, dout=dout, dlse=dlse, **more)
        calls = [] if name == "dlse" else [lambda: torch.autograd.grad(plain, (q, k, v), dout, retain_graph=True)]
        if name != "o":
            calls.append(lambda: torch.autograd.grad((o, lse), (q, k, v), (dout, dlse), retain_graph=True))
        if known:
            for call in calls:
                call()
        shrink(given[name])
        for call in calls:
            with pytest.raises(fattn.NullPointer, match=f"{name} needs .* {GONE}"):
                call()


def test_views_that_negate():
    """Their numbers lie in memory with the other sign, under the shape and strides of plans that are known."""
    given = tensors(dv=8)
    plain = [t.detach() for t in given]
    turned = [t.transpose(1, 2) for t in plain]
    for _ in range(2):
        for n in range(3):
            there = [torch._neg_view(t) if i == n else t for i, t in enumerate(turned)]
            expected = fattn.torch.scaled_dot_product_attention(*[t.resolve_neg() for t in there], enable_gqa=True)
            got = fattn.torch.scaled_dot_product_attention(*there, enable_gqa=True)
            assert torch.equal(got, expected)
            with pytest.raises(fattn.InvalidArgument, match="a view that negates"):
                fattn.attention(*[torch._neg_view(t) if i == n else t for i, t in enumerate(plain)])
        o = fattn.torch.attention(*given)
        dout = torch.randn_like(o)
        for negated, dense in zip(torch.autograd.grad(o, given, torch._neg_view(dout), retain_graph=True),
                                  torch.autograd.grad(o, given, -dout)):
            assert torch.equal(negated, dense)
        fattn.attention(*plain)


def test_plain_functions_refuse_gradients():
    q, k, v = tensors()
    for _ in range(2):
        with torch.no_grad():
            fattn.attention(q, k, v)
        with pytest.raises(fattn.InvalidArgument, match="requires a gradient"):
            fattn.attention(q, k, v)
    with pytest.raises(fattn.InvalidArgument, match="k is a numpy array, q a torch array"):
        fattn.attention(q.detach(), k.detach().numpy(), v.detach())


def test_meta_and_fake():
    q, k, v = (t.to("meta") for t in tensors(grad=False))
    with pytest.raises((NotImplementedError, fattn.Error)):
        fattn.attention(q, k, v)
    from torch._subclasses import FakeTensorMode
    with FakeTensorMode():
        o, lse = fattn.torch.attention(*tensors(grad=False), return_lse=True, layout="bhsd")
    assert o.shape == (2, 7, 4, 6) and lse.shape == (2, 7, 4)


def test_memory_does_not_grow():
    def resident():
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096

    given = tensors()

    def calls(n):
        for _ in range(n):
            fattn.torch.attention(*given, causal=True).sum().backward()
            for t in given:
                t.grad = None

    calls(300)
    before = resident()
    calls(3000)
    assert resident() - before < 2 << 20


def test_works_on_the_threads_of_torch():
    """Two pools would wait for one another's processors."""
    code = """
import os, torch, fattn
torch.set_num_threads(2)
tasks = lambda: len(os.listdir("/proc/self/task"))
a = torch.randn(4, 2048, 8, 64)
torch.exp(a)  # shared among threads
before = tasks()
fattn.attention(a, a, a)
assert fattn.info("cpu").units == 2
assert tasks() == before, (before, tasks())
"""
    if len(os.sched_getaffinity(0)) < 2 or "FATTN_NUM_THREADS" in os.environ:
        pytest.skip("one processor, or a number of threads of our own")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_scale_is_that_of_channels():
    q, k, v = tensors(grad=False)
    assert torch.equal(fattn.torch.attention(q, k, v), fattn.torch.attention(q, k, v,
                                                                             scale=1 / math.sqrt(8)))


def test_import_brings_no_compiler():
    """torch._dynamo takes a second, and DTensors half of one."""
    code = """
import sys, torch
before = set(sys.modules)
import fattn.torch
assert not {"torch._dynamo", "torch.distributed.tensor"} & (set(sys.modules) - before)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
