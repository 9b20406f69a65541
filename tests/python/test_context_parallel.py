# SPDX-License-Identifier: Apache-2.0
"""fattn.torch.context_parallel: gloo processes against one process, errors, and a small GPT.

For each number of ranks, each process runs every case and sends back what it found.
"""

import gc
import os
import signal
import socket
import time
import traceback
import weakref
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("PyTorch has no gloo", allow_module_level=True)

import fattn  # noqa: E402
import fattn.torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from fattn.torch._process_group import ProcessGroup  # noqa: E402
from processes import context  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.nn.attention.bias import causal_lower_right  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def begin(rank, ranks, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks,
                            timeout=timedelta(seconds=60))


def tell(cases, rank, ranks, port, pipe):
    """Runs cases in a process: {name: None, or what went wrong}."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    told = {}
    try:
        begin(rank, ranks, port)
        for case in cases:
            torch.manual_seed(3)
            try:
                told[case.__name__] = case(rank, ranks)
            except BaseException:
                told[case.__name__] = traceback.format_exc()
                break  # the others are elsewhere
    except BaseException:
        told["begin"] = traceback.format_exc()
    pipe.send(told)
    pipe.close()
    os._exit(0)  # pending receives of reasons have no end


def run(cases, ranks, seconds=120):
    """What each rank says of each case; None of one that died."""
    port, pipes, processes = free_port(), [], []
    for rank in range(ranks):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=tell, args=(cases, rank, ranks, port, there))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    results = []
    end = time.monotonic() + seconds
    for pipe in pipes:
        try:
            results.append(pipe.recv() if pipe.poll(max(end - time.monotonic(), 0)) else {"end": "hangs"})
        except EOFError:
            results.append(None)
    for process in processes:
        process.kill()
        process.join()
    return results


def assert_all(results, names):
    for rank, told in enumerate(results):
        assert told is not None, f"rank {rank} died"
        assert {n: told.get(n, "was not run") for n in names} == dict.fromkeys(names), f"rank {rank}"


# --- Results --------------------------------------------------------------------------------------


def close(a, b, what):
    torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5, msg=lambda m: f"{what}: {m}")


def compare(ranks_of, length, causal, hq, hk, ranks, **options):
    """Rows and gradients of shares against PyTorch's of the undivided problem."""
    whole = [torch.randn(2, length, h, 8, requires_grad=True) for h in (hq, hk, hk)]
    dout = torch.randn(2, length, hq, 8)
    bias = options.get("bias")
    o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in whole), is_causal=causal,
                                       enable_gqa=hq != hk,
                                       attn_mask=bias).transpose(1, 2)
    o.backward(dout)
    shares = [ranks_of.shard(t.detach(), 1).requires_grad_() for t in whole]
    if bias is not None:
        options["bias"] = ranks_of.shard(bias, -2)
    own = ranks_of.attention(*shares, causal=causal, **options)
    close(own, ranks_of.shard(o.detach(), 1), "o")
    own.backward(ranks_of.shard(dout, 1))
    for name, share, t in zip("qkv", shares, whole):
        close(share.grad, ranks_of.shard(t.grad, 1), f"d{name}")
    close(ranks_of.unshard(own, 1), o.detach(), "unshard")


def equal_shares(rank, ranks):
    for split in ("zigzag", "contiguous", "striped"):
        over = fattn.torch.context_parallel(split=split)
        for causal, hq, hk in ((False, 2, 2), (True, 4, 2)):
            compare(over, 8 * ranks, causal, hq, hk, ranks)


def unequal_shares(rank, ranks):
    for length in (8 * ranks + 3, ranks - 1):
        compare(fattn.torch.context_parallel(length=length), length, True, 4, 2, ranks)


def heads(rank, ranks):
    compare(fattn.torch.context_parallel(scheme="heads"), 8 * ranks, True, 8, 4, ranks)
    # Heads for contiguous shares, a ring for zigzag ones; and fewer rows than ranks.
    compare(fattn.torch.context_parallel(scheme="auto", split="contiguous"), 8 * ranks, True, 8, 4, ranks)
    compare(fattn.torch.context_parallel(scheme="auto"), 8 * ranks, True, 8, 4, ranks)
    compare(fattn.torch.context_parallel(scheme="auto", split="contiguous", length=ranks - 1), ranks - 1, True, 8, 4,
            ranks)


def saved(rank, ranks):
    """Backward of exchanged heads takes what forward received: it needs the tensors no more, and works twice."""
    over = fattn.torch.context_parallel(scheme="heads", split="contiguous")
    torch.manual_seed(3)
    x, w = torch.randn(2, 8 * ranks, 8, 16), torch.randn(16, 16)
    dout = torch.randn(2, 8 * ranks, 8, 16)
    q, k, v = ((x * n).requires_grad_() for n in (1, 2, 3))
    torch.autograd.backward(fattn.torch.attention(q, k, v, causal=True), dout)
    wanted = q.grad + 2 * k.grad + 3 * v.grad

    share = over.shard(x, 1).requires_grad_()
    made = [share * n for n in (1, 2, 3)]
    gone = [weakref.ref(t) for t in made]
    o = over.attention(*made, causal=True)
    del made
    assert not any(t() is not None for t in gone)
    assert over.attention(share.detach(), share, share).grad_fn is not None
    with torch.no_grad():
        over.attention(share, share, share)
    for n in range(2):
        got, = torch.autograd.grad(o, share, over.shard(dout, 1), retain_graph=n == 0)
        close(got, over.shard(wanted, 1), f"gradient {n}")

    with torch.autograd.graph.save_on_cpu():
        o = over.attention(share, 2 * share, 3 * share, causal=True)
    close(torch.autograd.grad(o, share, over.shard(dout, 1))[0], over.shard(wanted, 1), "offloaded")

    y = share @ w.requires_grad_()
    first, = torch.autograd.grad(over.attention(y, y, y).sum(), share, create_graph=True)
    expect(fattn.Unsupported, ["second derivatives"], lambda: first.square().sum().backward())


def no_memory(rank, ranks):
    """What autograd keeps does not fit into the memory of one rank: the others hear it."""
    over = fattn.torch.context_parallel(fresh(ranks), scheme="heads", timeout=20)
    x, empty = torch.randn(1, 4, 4, 8, requires_grad=True), torch.empty
    words, kind = ([f"rank {ranks - 1} gave up: no room"], fattn.RankLost)
    if rank == ranks - 1:
        def full(*shape, **options):
            if options.get("dtype") == torch.uint8 and shape[0] > 1:
                raise MemoryError("no room")
            return empty(*shape, **options)
        torch.empty, words, kind = full, ["no room"], MemoryError
    try:
        expect(kind, words, lambda: over.attention(x, x, x))
    finally:
        torch.empty = empty


def biased(rank, ranks):
    compare(fattn.torch.context_parallel(), 8 * ranks, False, 2, 2, ranks,
            bias=torch.randn(2, 1, 8 * ranks, 8 * ranks))


def packed(rank, ranks):
    """Documents of any length, each divided by itself: one is empty, one has fewer rows than there are ranks."""
    cu = [0, 8 * ranks + 3, 8 * ranks + 3, 8 * ranks + 4, 13 * ranks + 4]
    for split, cu_of in (("zigzag", lambda: torch.tensor(cu, dtype=torch.int32)), ("contiguous", lambda: cu),
                         ("striped", lambda: tuple(cu))):
        over = fattn.torch.context_parallel(split=split)
        whole = [torch.randn(cu[-1], h, 8, requires_grad=True) for h in (4, 2, 2)]
        dout = torch.randn(cu[-1], 4, 8)
        o = fattn.torch.attention_varlen(*whole, cu_seqlens_q=torch.tensor(cu, dtype=torch.int32),
                                         cu_seqlens_k=torch.tensor(cu, dtype=torch.int32), causal=True,
                                         max_seqlen_q=max(cu), max_seqlen_k=max(cu))
        o.backward(dout)
        for a, b in zip(cu, cu[1:]):  # fattn's own is held against PyTorch's
            q, k, v = (t.detach()[a:b].transpose(0, 1)[None] for t in whole)
            if b > a:
                close(o[a:b].transpose(0, 1)[None],
                      F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), "whole")
        shares = [over.shard(t.detach(), 0, cu_seqlens=cu).requires_grad_() for t in whole]
        own, lse = over.attention_varlen(*shares, cu_seqlens_q=cu_of(), cu_seqlens_k=cu_of(), causal=True,
                                         return_lse=True)
        assert lse.shape == (4, len(shares[0])) and torch.equal(over.rows(cu_seqlens=cu), over.rows(cu_seqlens=cu_of()))
        close(own, over.shard(o.detach(), 0, cu_seqlens=cu), "o")
        own.backward(over.shard(dout, 0, cu_seqlens=cu))
        for name, share, t in zip("qkv", shares, whole):
            close(share.grad, over.shard(t.grad, 0, cu_seqlens=cu), f"d{name}")
        close(over.unshard(own, 0, cu_seqlens=cu), o.detach(), "unshard")
    over = fattn.torch.context_parallel()
    q, k, v = (over.shard(t.detach(), 0, cu_seqlens=cu) for t in whole)
    twice = [over.attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, window=(3, 0)) for _ in range(2)]
    assert torch.equal(*twice)


def reduced(rank, ranks):
    over = fattn.torch.context_parallel(scheme="reduce", split="contiguous")
    q, k, v = (torch.randn(2, n, 4, 8) for n in (1, 8 * ranks, 8 * ranks))
    with torch.no_grad():
        o = over.attention(q, over.shard(k, 1), over.shard(v, 1))
    close(o, F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2), "o")


def dropped(rank, ranks):
    """The mask of one process, and one seed for all that is drawn."""
    over = fattn.torch.context_parallel()
    x = torch.randn(1, 8 * ranks, 2, 8)
    seed = torch.tensor([7, 3])
    one, lse = fattn.torch.attention(x, x, x, causal=True, dropout_p=0.5, seed=seed, return_lse=True)
    own, own_lse = over.attention(*[over.shard(x, 1)] * 3, causal=True, dropout_p=0.5, seed=seed,
                                  return_lse=True)
    close(own, over.shard(one, 1), "o")
    close(own_lse, over.shard(lse, 2), "lse")
    torch.manual_seed(rank)
    values = over.attention(*[over.shard(x, 1)] * 3, dropout_p=0.5)
    assert values.isfinite().all()


def routed(rank, ranks):
    """scaled_dot_product_attention within the context, and after it."""
    before = F.scaled_dot_product_attention
    q, k, v = (torch.randn(3, h, 4 * ranks, 8) for h in (4, 2, 2))
    mask = torch.rand(4 * ranks, 4 * ranks) < 0.7
    wanted = [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
              F.scaled_dot_product_attention(q, q, q, attn_mask=mask),
              F.scaled_dot_product_attention(q[:, 0], q[:, 0], q[:, 0])]
    whole = q.clone()
    with fattn.torch.context_parallel(buffers=(q, k, v, mask), seq_dims=(2, 2, 2, 0)) as over:
        got = [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
               F.scaled_dot_product_attention(q, q, q, attn_mask=mask),
               F.scaled_dot_product_attention(q[:, 0], q[:, 0], q[:, 0])]
        assert q.shape[2] == 4
    assert F.scaled_dot_product_attention is before
    assert torch.equal(q, whole)
    for n, (a, b) in enumerate(zip(got, wanted)):
        close(a, over.shard(b, 1 if n == 2 else 2), f"call {n}")


def told_of_masks(rank, ranks):
    """Causal biases have no numbers in their memory; masks of integers and numbers with gradients are refused."""
    q = torch.randn(1, 2, 4, 8)
    with fattn.torch.context_parallel(split="contiguous") as over:
        o = F.scaled_dot_product_attention(q, q, q, attn_mask=causal_lower_right(4 * ranks, 4 * ranks))
        close(o, F.scaled_dot_product_attention(q, q, q, is_causal=True), "causal bias")
        expect(RuntimeError, ["torch.int64"], lambda: F.scaled_dot_product_attention(
            q, q, q, attn_mask=torch.ones(4, 4 * ranks, dtype=torch.int64)))
    expect(TypeError, ["CausalBias"], lambda: over.attention(q, q, q, bias=causal_lower_right(4, 4)))
    expect(TypeError, ["scale is a tensor"], lambda: over.attention(q, q, q, scale=torch.ones(1, requires_grad=True)))


def differentiated_once(rank, ranks):
    """A second derivative is an error, also if the gradient of the result is a constant."""
    x, w = torch.randn(1, 4, 2, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    y = x @ w
    first, = torch.autograd.grad(fattn.torch.context_parallel().attention(y, y, y).sum(), x, create_graph=True)
    expect(fattn.Unsupported, ["second derivatives"], lambda: first.square().sum().backward())


def planned_once(rank, ranks):
    over = fattn.torch.context_parallel()
    x = torch.randn(1, 4, 2, 8)
    for _ in range(3):
        over.attention(x, x, x)
        over.attention(x[..., ::2], x[..., ::2], x[..., ::2])
    assert len(over._plans) == 2
    for n in range(5, 23):
        over.attention(*[torch.randn(1, n, 2, 8)] * 3)
    assert len(over._plans) == 16


def growing(rank, ranks):
    """Decoding with a cache that grows, by the code of docs/DISTRIBUTED.md."""
    page = os.path.join(os.path.dirname(__file__), "..", "..", "docs", "DISTRIBUTED.md")
    with open(page, encoding="utf-8") as file:
        code = file.read().partition("```python\n")[2].partition("```")[0]
    names = {"fattn": fattn, "torch": torch, "dist": dist}
    exec(code, names)
    k, v = torch.zeros(1, 8, 2, 8), torch.zeros(1, 8, 2, 8)
    whole = torch.randn(2, 1, 7, 2, 8)
    used = torch.zeros(1, dtype=torch.int32)
    for n in range(7):
        if n % ranks == rank:
            k[:, used[0]], v[:, used[0]] = whole[:, :, n]
            used += 1
        q = torch.randn(1, 1, 4, 8)
        wanted = fattn.torch.attention(q, *whole[:, :, :n + 1])
        close(names["attend"](None, q, k, v, used), wanted, f"{n + 1} keys")


# --- A model --------------------------------------------------------------------------------------

SYMBOLS, DIM, CONTEXT, STEPS = 11, 16, 24, 20


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q, self.kv = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.project, self.mlp = nn.Linear(DIM, DIM), nn.Sequential(
            nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        b, s, _ = x.shape
        y = self.norm1(x)
        q = self.q(y).view(b, s, 4, 4).transpose(1, 2)
        k, v = self.kv(y).view(b, s, 2, 2, 4).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.project(o.transpose(1, 2).reshape(b, s, -1))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(SYMBOLS, DIM), nn.Embedding(CONTEXT, DIM)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(DIM, SYMBOLS)

    def forward(self, ids, places, targets):
        logits = self.head(self.blocks(self.token(ids) + self.place(places)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (3 * CONTEXT)


def train(context, wrap=lambda model: model):
    torch.manual_seed(1)
    model, losses = wrap(GPT()), []
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        text = (torch.randint(SYMBOLS, (3, 1)) + 3 * torch.arange(CONTEXT + 1)) % SYMBOLS
        batch = text[:, :-1].clone(), torch.arange(CONTEXT)[None].expand(3, -1).clone(), text[:, 1:].clone()
        optimiser.zero_grad()
        losses.append(context(model, batch))
        optimiser.step()
    return losses


def alone(model, batch):
    loss = model(*batch)
    loss.backward()
    return loss.item()


def divided(model, batch):
    with fattn.torch.context_parallel(buffers=batch, seq_dims=(1, 1, 1)):
        loss = model(*batch)
        loss.backward()
    total = loss.detach().clone()
    for t in (total, *(p.grad for p in model.parameters())):
        dist.all_reduce(t)
    return total.item()


def wrapped(ranks):
    """As divided(), where the model adds gradients itself and takes their mean; attention has a group of its own."""
    group = dist.new_group(list(range(ranks)))

    def step(model, batch):
        with fattn.torch.context_parallel(group, buffers=batch, seq_dims=(1, 1, 1)):
            loss = model(*batch)
            (ranks * loss).backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item()
    return step


def fsdp(model):
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss_curve(rank, ranks):
    one = torch.tensor(train(alone))
    assert one[-1] < one[0] - 0.1
    for many in (train(divided), train(wrapped(ranks), DistributedDataParallel), train(wrapped(ranks), fsdp)):
        torch.testing.assert_close(torch.tensor(many), one, rtol=1e-4, atol=0)


# --- Errors ---------------------------------------------------------------------------------------


def fresh(ranks):
    return dist.new_group(list(range(ranks)), timeout=timedelta(seconds=20))


def expect(kind, words, call):
    try:
        call()
    except kind as error:
        assert any(w in str(error) for w in words), str(error)
    else:
        raise AssertionError(f"no {kind}")


def disagree(rank, ranks):
    group = fresh(ranks)
    over, x = fattn.torch.context_parallel(group), torch.randn(1, 4, 2, 8)
    expect(fattn.RanksDisagree, ["another problem"],
           lambda: over.attention(x, x, x, scale=1.0 + (rank == ranks - 1)))
    over.attention(x, x, x)  # the group is good


def other_lengths(rank, ranks):
    """Shares of different numbers of rows, without their length."""
    x = torch.randn(1, 4 + (rank == 0), 2, 8)
    expect(fattn.RanksDisagree, ["context_parallel takes length="],
           lambda: fattn.torch.context_parallel(fresh(ranks)).attention(x, x, x))


def released(rank, ranks):
    """A context that is given up takes its transport along at once, and with it the group's sockets and threads."""
    gc.disable()
    try:
        over, x = fattn.torch.context_parallel(fresh(ranks)), torch.randn(1, 4, 2, 8, requires_grad=True)
        over.attention(x, x, x).sum().backward()
        transports = [weakref.ref(transport) for transport in over._transports.values()]
        del over
        assert transports and not any(transport() for transport in transports), "a transport is in a cycle"
    finally:
        gc.enable()


def refused_early(rank, ranks):
    """An error of the last rank alone, before the library is called, reaches the others, and the group is good."""
    group = fresh(ranks)
    over, x = fattn.torch.context_parallel(group, length=4 * ranks, timeout=20), torch.randn(1, 4, 2, 8)
    for words, wrong in ((["x is a list", "rows: rank", "q is a"], lambda: over.attention([x], x, x)),
                         (["rows: rank"], lambda: over.attention(x[:, 1:], x, x)),
                         (["v has heads 2, k 1"], lambda: over.attention(x, x[:, :, :1], x)),
                         (["3 axes: 4 are needed"], lambda: over.attention(x[0], x, x)),
                         (["layout"], lambda: over.attention(x, x, x, layout="sbhd")),
                         (["dtype int32"], lambda: over.attention(x.int(), x, x)),
                         (["sink is a list"], lambda: over.attention(x, x, x, sink=[0.0, 0.0])),
                         (["on device meta"], lambda: over.attention(x, x.to("meta"), x)),
                         (["together"], lambda: over.scaled_dot_product_attention(x, x, x, x, is_causal=True)),
                         (["dropout_p is 2"], lambda: over.attention(x, x, x, dropout_p=2.0))):
        if rank == ranks - 1:
            expect(Exception, words, wrong)
        else:
            expect(fattn.RankLost, [f"rank {ranks - 1} cannot plan: FATTN_INVALID_ARGUMENT"],
                   lambda: over.attention(x, x, x, dropout_p=0.5))
    over.attention(x, x, x)


def few_rows(rank, ranks):
    """Biases and masks where some ranks have one row or none, and where they are broadcast along rows."""
    for split in ("contiguous", "zigzag"):
        for length in (1, 2, 3, 5):
            over = fattn.torch.context_parallel(split=split, length=length)
            x = torch.randn(1, length, 2, 8)
            q = over.shard(x, 1)
            for rows in {1, length}:
                bias, mask = torch.randn(1, 2, rows, length), torch.rand(1, 1, rows, length) < 0.7
                own = (bias, mask) if rows < length else (over.shard(bias, 2), over.shard(mask, 2))
                wanted = fattn.torch.attention(x, x, x, bias=bias, mask=mask)
                close(over.attention(q, q, q, bias=own[0], mask=own[1]), over.shard(wanted, 1), f"{length} rows")
            leaf, own = bias.requires_grad_(), over.shard(bias.detach(), 2).requires_grad_()
            fattn.torch.attention(x, x, x, bias=leaf).square().sum().backward()
            over.attention(q, q, q, bias=own).square().sum().backward()
            close(own.grad, over.shard(leaf.grad, 2), f"dbias of {length} rows")


def compiled(rank, ranks):
    """torch.compile breaks the graph where ranks meet."""
    x = torch.randn(1, 8 * ranks, 2, 8)
    wanted = fattn.torch.attention(x, x, x, causal=True)
    over = fattn.torch.context_parallel(fresh(ranks))

    def method(q):
        return over.attention(q * 1.0, q, q, causal=True) + 1

    def function(q):
        q = q.transpose(1, 2)
        return F.scaled_dot_product_attention(q * 1.0, q, q, is_causal=True).transpose(1, 2) + 1

    for call in (method, function):
        own = over.shard(x, 1).requires_grad_()
        with over:
            o = torch.compile(call, backend="eager")(own)
        close(o - 1, over.shard(wanted, 1), call.__name__)
        o.sum().backward()
        plain = over.shard(x, 1).requires_grad_()
        over.attention(plain, plain, plain, causal=True).sum().backward()
        close(own.grad, plain.grad, f"gradients of {call.__name__}")


def unlike(rank, ranks):
    expect(fattn.InvalidShape, ["rows: rank"], lambda: fattn.torch.context_parallel(
        length=12 * ranks).attention(*[torch.randn(1, 4, 2, 8)] * 3))
    for wrong in (dict(split="diagonal"), dict(scheme="rings"), dict(seq_dims=(1,)),
                  dict(buffers=(torch.randn(3, requires_grad=True),), seq_dims=(0,)),
                  dict(buffers=(torch.zeros(8 * ranks + 1), torch.zeros(8 * ranks)), seq_dims=(0, 0))):
        expect(fattn.InvalidArgument, ["split", "scheme", "seq_dims", "gradient", "lengths"],
               lambda wrong=wrong: fattn.torch.context_parallel(**wrong))


def gives_up(rank, ranks):
    """The last rank fails in a callback; the others hear why, also the first, which begins later, and a new group
    works."""
    group = fresh(ranks)
    over, x = fattn.torch.context_parallel(group, timeout=20), torch.randn(1, 4, 2, 8)
    over.attention(x, x, x)
    begin = time.monotonic()
    if rank == ranks - 1:
        transport = over._transport(x.device)

        def fails(size, address):
            raise ValueError("the test says so")
        transport._bytes = fails
        expect(fattn.RankLost, ["the test says so"], lambda: over.attention(x, x, x))
    else:
        time.sleep(1 if rank == 0 else 0)
        expect(fattn.RankLost, ["the test says so"], lambda: over.attention(x, x, x))
        expect(fattn.RankLost, ["failed before"], lambda: over.attention(x, x, x))
    assert time.monotonic() - begin < 5
    dist.barrier()
    again = fattn.torch.context_parallel(fresh(ranks))
    again.attention(x, x, x)


def patient(rank, ranks):
    """For ever is a long time, also for the backend."""
    over, x = fattn.torch.context_parallel(fresh(ranks), timeout=float("inf")), torch.randn(1, 4, 2, 8)
    assert torch.isfinite(over.unshard(over.attention(x, x, x, dropout_p=0.1), 1)).all()


def silent(rank, ranks):
    group = fresh(ranks)
    over, x = fattn.torch.context_parallel(group, timeout=0.5), torch.randn(1, 4, 2, 8)
    over.attention(x, x, x)
    if rank != ranks - 1:
        begin = time.monotonic()
        expect((fattn.RankTimeout, fattn.RankLost), ["did not answer in 0.5 s", "Connection"],
               lambda: over.attention(x, x, x))
        assert time.monotonic() - begin < 5
    dist.barrier()


def ahead(rank, ranks):
    """A plan runs ahead of its messages, and is made and compared without."""
    over, x, seen = fattn.torch.context_parallel(), torch.randn(1, 6, 2, 8), []
    wait = ProcessGroup._wait
    ProcessGroup._wait = lambda self, *of: (seen.append(self.runs_ahead), wait(self, *of))[1]
    try:
        over.attention(x, x, x)
        made = len(seen)
        over.attention(x, x, x)
    finally:
        ProcessGroup._wait = wait
    assert not seen[0] and seen[made - 1] and all(seen[made:]) and seen == sorted(seen), seen


def late(rank, ranks):
    """The last rank begins when the others have given up and closed their connections."""
    group = fresh(ranks)
    over, x = fattn.torch.context_parallel(group, timeout=0.5), torch.randn(1, 4, 2, 8)
    dist.barrier(group)
    if rank == ranks - 1:
        time.sleep(4)
    for call in (lambda: over.attention(x, x, x), lambda: over.unshard(x, 1),
                 lambda: over.attention(x, x, x, dropout_p=0.5)):
        expect((fattn.RankTimeout, fattn.RankLost), ["rank", "failed before"], call)
    dist.barrier()


def killed(rank, ranks):
    over, x = fattn.torch.context_parallel(timeout=20), torch.randn(1, 4, 2, 8)
    over.attention(x, x, x)
    if rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    expect(fattn.RankLost, [f"rank {ranks - 1}", "Connection", "gave up"],
           lambda: over.attention(x, x, x))
    assert time.monotonic() - begin < 10


RESULTS = [equal_shares, unequal_shares, heads, saved, biased, packed, reduced, dropped, routed, told_of_masks,
           differentiated_once, planned_once, ahead, few_rows, compiled, patient, growing]
ERRORS = [no_memory, disagree, other_lengths, released, refused_early, unlike, gives_up, silent, late]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks(ranks):
    cases = RESULTS + ([loss_curve] if ranks == 2 else []) + ERRORS
    cases = [case for case in cases if case not in (heads, saved, no_memory) or 4 % ranks == 0]
    assert_all(run(cases, ranks), [case.__name__ for case in cases])


def test_killed():
    results = run([killed], 3)
    assert results[2] is None
    assert_all(results[:2], ["killed"])


class Work:
    """A message over a backend that is polled: done once it has been asked `polls` times."""

    def __init__(self, polls):
        self.polls, self.waits = polls, 0

    def is_completed(self):
        self.polls -= 1
        return self.polls <= 0

    def wait(self):
        self.waits += 1


def test_one_group_late():
    """Over memory of a GPU the host waits for messages one group late while a plan runs, and at once while it is made."""
    never, soon = Work(1 << 60), Work(3)
    group = object.__new__(ProcessGroup)
    vars(group).update(device=torch.device("cuda"), is_gloo=False, broken=False, error=None, works=[], before=[],
                       runs_ahead=False, can_run_ahead=True, reasons={})

    def wait(work, seconds=20.0):
        group.works = [(work, "rank 1")]
        return group._wait(0, None, 0, seconds)

    with group.running_ahead():
        assert wait(soon) == 0 and soon.polls == 3 and soon.waits == 1  # kernels wait for it, the host does not
        assert wait(never) == 0 and soon.polls == 0
        assert not group.broken
        assert wait(Work(0), 0.01) == fattn.RankTimeout.status and group.broken
    group.broken, group.before = False, []
    assert wait(never, 0.01) == fattn.RankTimeout.status  # where a plan is made
    group.broken, group.before, group.can_run_ahead = False, [], False
    with group.running_ahead():
        assert wait(never, 0.01) == fattn.RankTimeout.status  # over other backends
    group.catch_up(20)  # nothing to wait for, since the group has failed


def test_wait_after_giving_up():
    """A rank that could not compute gives up between a group's start and its wait, which then fails at once."""
    group = object.__new__(ProcessGroup)
    vars(group).update(is_gloo=False, broken=False, error=None, works=[(Work(1 << 60), "rank 1")], before=[],
                       runs_ahead=False, can_run_ahead=True, reasons={})
    group._abort(0, b"no memory")
    assert group._wait(0, None, 0, 20.0) == fattn.RankLost.status
