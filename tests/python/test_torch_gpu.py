# SPDX-License-Identifier: Apache-2.0
"""fattn.torch on a GPU: agreement with the CPU, streams, graphs, compilation."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU that PyTorch can use", allow_module_level=True)

import fattn.torch  # noqa: E402

OPTIONS = {"plain": {}, "causal": {"causal": True}, "window": {"window": (40, 0)}, "softcap": {"softcap": 8.0}}


def tensors(dtype=torch.bfloat16, n=300, grad=True):
    torch.manual_seed(3)
    return [torch.randn(2, n, heads, 64, device="cuda", dtype=dtype, requires_grad=grad)
            for heads in (4, 2, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_as_on_a_cpu(name, dtype):
    given = tensors(dtype)
    other = [t.detach().cpu().float().requires_grad_() for t in given]
    o = fattn.torch.attention(*given, **OPTIONS[name])
    wanted = fattn.torch.attention(*other, **OPTIONS[name])
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(o.cpu().float(), wanted, rtol=tolerance, atol=tolerance)
    dout = torch.randn_like(o)
    for a, b in zip(torch.autograd.grad(o, given, dout),
                    torch.autograd.grad(wanted, other, dout.cpu().float())):
        torch.testing.assert_close(a.cpu().float(), b, rtol=2 * tolerance, atol=2 * tolerance)


def test_current_stream():
    """Work is queued behind what makes its inputs, on the stream that is current: forward, and backward on the
    stream of its forward."""
    q, k, v = tensors()
    wanted = fattn.torch.attention(q, k, v, causal=True)
    gradients = torch.autograd.grad(wanted.sum(), (q, k, v))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = [torch.zeros_like(t).copy_(t.detach()).requires_grad_() for t in (q, k, v)]
        o = fattn.torch.attention(*late, causal=True)
        got = torch.autograd.grad(o.sum(), late)
    assert not stream.query()  # the host did not wait
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(o, wanted, rtol=0, atol=0)
    for a, b in zip(got, gradients):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_graph():
    """Forward and backward are captured once, and replayed for other numbers."""
    given = tensors()
    dout = torch.randn_like(given[0])

    def step():
        o = fattn.torch.attention(*given, causal=True)
        return o, torch.autograd.grad(o, given, dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, gradients = step()
    with torch.no_grad():
        for t in given:
            t.copy_(torch.randn_like(t))
    graph.replay()
    wanted, other = step()
    torch.testing.assert_close(o, wanted, rtol=0, atol=0)
    for a, b in zip(gradients, other):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_compiled():
    given = tensors()
    run = torch.compile(lambda *args: fattn.torch.attention(*args, causal=True).square().sum(), fullgraph=True)
    wanted = fattn.torch.attention(*given, causal=True).square().sum()
    got = run(*given)
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)
    for a, b in zip(torch.autograd.grad(got, given), torch.autograd.grad(wanted, given)):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_devices_do_not_mix():
    q, k, v = tensors(grad=False)
    with pytest.raises(fattn.InvalidArgument, match="k is on device cpu"):
        fattn.torch.attention(q, k.cpu(), v)
