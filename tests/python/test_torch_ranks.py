# SPDX-License-Identifier: Apache-2.0
"""fattn.torch over processes: models whose parameters are replicated or sharded have the same gradients, and of DTensors
each process computes its part."""

import os
import traceback
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("PyTorch has no gloo", allow_module_level=True)

import fattn  # noqa: E402
import fattn.torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from processes import context  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402

RANKS = 2


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(Attention(), Attention())


def batch():
    torch.manual_seed(2)
    return torch.randn(RANKS, 9, 16)


def compare(gradients):
    alone = model()
    alone(batch()).square().mean().backward()
    for a, p in zip(gradients, alone.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-4, atol=1e-6)


def replicated(rank):
    whole = torch.nn.parallel.DistributedDataParallel(model())
    with fattn.torch.sdpa():
        whole(batch()[rank:rank + 1]).square().mean().backward()
    compare([p.grad for p in whole.module.parameters()])


def sharded(rank):
    whole = model()
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for part in (*whole, whole):
        fully_shard(part, mesh=mesh)
    with fattn.torch.sdpa():
        whole(batch()[rank:rank + 1]).square().mean().backward()
    compare([p.grad.full_tensor() for p in whole.parameters()])


# Heads of q and of k, what else there is, its shape, and how its gradient is placed where the batch is divided, and
# where the heads are.
TENSORS = [(4, 4, None, (), None, None), (4, 2, None, (), None, None), (4, 1, None, (), None, None),
           (4, 2, "bias", (2, 4, 5, 6), Shard(0), Shard(1)), (4, 2, "bias", (4, 5, 6), Partial(), Shard(0)),
           (4, 2, "bias", (2, 1, 5, 6), Shard(0), Partial()), (4, 2, "sink", (4,), Partial(), Shard(0)),
           (4, 2, "mask", (2, 1, 1, 6), None, None), (4, 4, "alibi_slopes", (2, 4), None, None),
           (4, 4, "seqused_k", (2,), None, None)]


def divided(rank):
    """Nothing is sent where batch or heads are divided."""
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    everywhere = [Replicate()]
    for heads, heads_k, name, shape, *of_gradient in TENSORS:
        torch.manual_seed(1)
        given = {"q": torch.randn(2, 5, heads, 8), "k": torch.randn(2, 6, heads_k, 8), "v": torch.randn(2, 6, heads_k, 8)}
        dout = torch.randn(2, 5, heads, 8)
        if name is not None:
            given[name] = {"mask": lambda s: torch.rand(s) < 0.7, "seqused_k": lambda s: torch.tensor([6, 2], dtype=torch.int32)
                           }.get(name, torch.randn)(shape)
        learnt = [n for n in given if n in ("q", "k", "v", "bias", "sink")]
        alone = {n: t.clone().requires_grad_(n in learnt) for n, t in given.items()}
        o = fattn.torch.attention(**alone)
        gradients = torch.autograd.grad(o, [alone[n] for n in learnt], dout)
        for axis, placed in zip((0, 2), of_gradient):
            parts = {n: distribute_tensor(t, mesh, [Shard(axis)] if n in "qkv" and t.shape[axis] > 1 else everywhere)
                     .requires_grad_(n in learnt) for n, t in given.items()}
            part_of_dout = distribute_tensor(dout, mesh, [Shard(axis)])
            with CommDebugMode() as sent:
                part = fattn.torch.attention(**parts)
                of_parts = torch.autograd.grad(part, [parts[n] for n in learnt], part_of_dout)
            assert sent.get_total_counts() == 0, (heads, heads_k, name, axis)
            assert part.placements == (Shard(axis),)
            torch.testing.assert_close(part.full_tensor(), o, rtol=1e-5, atol=1e-5)
            for n, a, b in zip(learnt, of_parts, gradients, strict=True):
                assert placed is None or n != name or a.placements == (placed,), (a.placements, placed)
                torch.testing.assert_close(a.full_tensor(), b, rtol=1e-4, atol=1e-5)


def divided_in_eight_bits(rank):
    """A cache of e4m3 is divided with its factors, and nothing is sent."""
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, n, heads, 8) for n, heads in ((5, 4), (6, 2), (6, 2)))
    given = {"q": q, "k": k.to(torch.float8_e4m3fn), "v": v.to(torch.float8_e4m3fn)}
    for shape, axis_of in (((2, 2), {0: 0, 2: 1}), ((2,), {2: 0}), ((2, 1), {0: 0})):
        factors = {name: torch.rand(shape) + 0.5 for name in ("k_descale", "v_descale")}
        o = fattn.torch.attention(**given, **factors)
        for axis in (0, 2):
            placed = [Shard(axis_of[axis])] if axis in axis_of else [Replicate()]
            # Gloo sends no e4m3.
            parts = {n: DTensor.from_local(t.chunk(RANKS, axis)[rank], mesh, [Shard(axis)]) for n, t in given.items()}
            of_parts = {n: distribute_tensor(t, mesh, placed) for n, t in factors.items()}
            with CommDebugMode() as sent:
                part = fattn.torch.attention(**parts, **of_parts)
            assert sent.get_total_counts() == 0 and part.placements == (Shard(axis),)
            torch.testing.assert_close(part.full_tensor(), o)
    number = dict(v_descale=0.5)
    part = fattn.torch.attention(**parts, k_descale=of_parts["k_descale"], **number)
    torch.testing.assert_close(part.full_tensor(), fattn.torch.attention(**given, k_descale=factors["k_descale"], **number))


def divided_otherwise(rank):
    """Rows, three heads of k by two processes, and dropout: tensors are gathered, and the result is right."""
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, heads, 5, 8) for heads in (6, 3, 3))
    sdpa, seed = fattn.torch.scaled_dot_product_attention, torch.tensor([1, 2])
    for axis in (1, 2):
        parts = [distribute_tensor(t, mesh, [Shard(axis)]) for t in (q, k, v)]
        torch.testing.assert_close(sdpa(*parts, enable_gqa=True).full_tensor(), sdpa(q, k, v, enable_gqa=True))
    parts, whole = [distribute_tensor(t, mesh, [Shard(0)]) for t in (q, k, v)], dict(dropout_p=0.5, layout="bhsd")
    o = fattn.torch.attention(*parts, **whole, seed=distribute_tensor(seed, mesh))
    torch.testing.assert_close(o.full_tensor(), fattn.torch.attention(q, k, v, **whole, seed=seed))
    torch.manual_seed(rank)  # the first process draws the seed
    o = sdpa(*parts, dropout_p=0.5, enable_gqa=True).full_tensor()
    torch.manual_seed(0)
    torch.testing.assert_close(o, sdpa(q, k, v, dropout_p=0.5, enable_gqa=True))
    try:
        fattn.attention(*parts)
    except fattn.Unsupported as error:
        assert "q is a DTensor" in str(error)
    else:
        raise AssertionError("fattn.attention reads a DTensor")


def work(rank, case, folder, pipe):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS,
                                timeout=timedelta(seconds=100))
        case(rank)
        pipe.send("right")
        dist.barrier()
    except BaseException:
        pipe.send(traceback.format_exc())
    os._exit(0)


@pytest.mark.parametrize("case", [replicated, sharded, divided, divided_in_eight_bits, divided_otherwise])
def test_over_ranks(case, tmp_path):
    pipes, processes = [], []
    for rank in range(RANKS):
        here, there = context.Pipe(duplex=False)
        processes.append(context.Process(target=work, args=(rank, case, str(tmp_path), there)))
        processes[-1].start()
        there.close()
        pipes.append(here)
    told = [pipe.recv() if pipe.poll(120) else "hangs" for pipe in pipes]
    for process in processes:
        process.kill()
        process.join()
    assert told == ["right"] * RANKS, "\n".join(told)
