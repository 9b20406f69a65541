# SPDX-License-Identifier: Apache-2.0
"""fattn.torch.context_parallel over NCCL: a process for each GPU, against one GPU.

Messages run on NCCL's own streams, behind kernels that are still queued, and the host waits for them late. So what can
go wrong here is order: every case repeats its calls, with lengths at which a run has one turn and several.
"""

import os
import traceback
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.device_count() < 2 or not torch.distributed.is_nccl_available():
    pytest.skip("no two GPUs with NCCL", allow_module_level=True)

import fattn.torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from processes import context  # noqa: E402
from test_context_parallel import expect, free_port  # noqa: E402

RANKS = 2
TIMES = 3


def tell(case, rank, port, pipe):
    """Runs a case in a process and sends None, or what went wrong."""
    try:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS,
                                timeout=timedelta(seconds=60))
        torch.manual_seed(3)
        case(rank)
        torch.cuda.synchronize()
        pipe.send(None)
    except BaseException:
        pipe.send(traceback.format_exc())
    pipe.close()
    os._exit(0)


def close(a, b, what):
    """bf16 against bf16 of another order of sums. A row of gradients may be a sum over all rows of queries."""
    error = (a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-9)
    assert a.shape == b.shape and error < 1e-2, f"{what}: relative error {error:.2e}"
    torch.testing.assert_close(a.float(), b.float(), rtol=0.05, atol=0.05, msg=lambda m: f"{what}: {m}")


def compare(over, length, hq, hk, d, causal):
    whole = [torch.randn(2, length, h, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (hq, hk, hk)]
    dout = torch.randn(2, length, hq, d, device="cuda", dtype=torch.bfloat16)
    o = fattn.torch.attention(*whole, causal=causal)
    o.backward(dout)
    shares = [over.shard(t.detach(), 1).requires_grad_() for t in whole]
    wanted = [over.shard(t, 1) for t in (o.detach(), *[t.grad for t in whole])]
    for turn in range(TIMES):
        # As in a model: the call's inputs are still being computed when it is queued, and are overwritten after it.
        given = [t * 1 for t in shares]
        own = over.attention(*given, causal=causal)
        got = [own.detach().clone(), *torch.autograd.grad(own, shares, over.shard(dout, 1))]
        del given
        for name, a, b in zip(("o", "dq", "dk", "dv"), got, wanted):
            close(a, b, f"{name} of {length} rows, turn {turn}")


def lengths(scheme, split, saves=True):
    def case(rank):
        over = fattn.torch.context_parallel(scheme=scheme, split=split, saves=saves)
        for length in (2, 66, 1024, 8192):
            for causal in (False, True):
                compare(over, length, 8, 4, 64, causal)
        compare(over, 4096, 16, 2, 128, True)
    return case


def packed(rank):
    """Sequences of any length, forward and backward: one is empty, one shorter than the number of ranks."""
    torch.manual_seed(3)
    cu = [0, 1027, 1027, 1028, 3000, 3512, 8000]
    for scheme, split, saves in (("heads", "zigzag", False), ("heads", "zigzag", True), ("ring", "zigzag", False),
                                 ("ring", "striped", False), ("auto", "contiguous", True)):
        over = fattn.torch.context_parallel(scheme=scheme, split=split, saves=saves)
        whole = [torch.randn(cu[-1], h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (8, 4, 4)]
        dout = torch.randn(cu[-1], 8, 64, device="cuda", dtype=torch.bfloat16)
        on_gpu = torch.tensor(cu, dtype=torch.int32, device="cuda")
        longest = max(b - a for a, b in zip(cu, cu[1:]))
        o = fattn.torch.attention_varlen(*whole, cu_seqlens_q=on_gpu, cu_seqlens_k=on_gpu, max_seqlen_q=longest,
                                         max_seqlen_k=longest, causal=True)
        o.backward(dout)
        shares = [over.shard(t.detach(), 0, cu_seqlens=cu).requires_grad_() for t in whole]
        for turn in range(TIMES):
            own = over.attention_varlen(*shares, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
            got = [own.detach(), *torch.autograd.grad(own, shares, over.shard(dout, 0, cu_seqlens=cu))]
            for name, a, b in zip(("o", "dq", "dk", "dv"), got, (o.detach(), *[t.grad for t in whole])):
                close(a, over.shard(b, 0, cu_seqlens=cu), f"{name}, {scheme} over {split}, turn {turn}")
        close(over.unshard(own.detach(), 0, cu_seqlens=cu), o.detach(), "unshard")


def layers(rank):
    """Layers that follow one another, and a second stream."""
    over = fattn.torch.context_parallel(scheme="auto")
    x = torch.randn(1, 4096, 8, 64, device="cuda", dtype=torch.bfloat16)

    def model(attend, x):
        for _ in range(4):
            x = x + attend(x, 2 * x, x, causal=True)
        return x

    wanted = over.shard(model(fattn.torch.attention, x), 1)
    share = over.shard(x, 1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for turn in range(TIMES):
        close(model(over.attention, share), wanted, f"turn {turn}")
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            late = share.clone()
            got = model(over.attention, late)
        torch.cuda.current_stream().wait_stream(stream)
        close(got, wanted, f"other stream, turn {turn}")


def disagree(rank):
    over = fattn.torch.context_parallel()
    x = torch.randn(1, 64, 2 + 2 * rank, 64, device="cuda", dtype=torch.bfloat16)
    expect(fattn.RanksDisagree, ["another problem"], lambda: over.attention(x, x, x))


CASES = {
    "ring": lengths("ring", "zigzag"), "striped ring": lengths("ring", "striped"),
    "heads": lengths("heads", "zigzag"), "heads, nothing saved": lengths("heads", "contiguous", saves=False),
    "auto": lengths("auto", "zigzag"), "packed": packed, "layers": layers, "disagree": disagree,
}


def run(name, rank, port, pipe):
    tell(CASES[name], rank, port, pipe)


@pytest.mark.parametrize("name", CASES)
def test_over_nccl(name):
    port, results = free_port(), []
    for rank in range(RANKS):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=run, args=(name, rank, port, there))
        process.start()
        there.close()
        results.append((here, process))
    try:
        for rank, (pipe, _) in enumerate(results):
            told = "hangs"
            try:
                if pipe.poll(180):
                    told = pipe.recv()
            except EOFError:
                told = "died"
            assert told is None, f"rank {rank}: {told}"
    finally:
        for _, process in results:
            process.kill()
            process.join()
