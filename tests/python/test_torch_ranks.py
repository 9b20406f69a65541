# SPDX-License-Identifier: Apache-2.0
"""fattn.torch in models whose parameters are replicated or sharded over processes: the same gradients.

Processes are forked before fattn or PyTorch have threads, for on a busy machine importing them anew takes minutes.
"""

import multiprocessing
import os
import traceback
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("PyTorch has no gloo", allow_module_level=True)

import fattn.torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

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


def replicated(rank):
    whole = torch.nn.parallel.DistributedDataParallel(model())
    whole(batch()[rank:rank + 1]).square().mean().backward()
    return [p.grad for p in whole.module.parameters()]


def sharded(rank):
    whole = model()
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for part in (*whole, whole):
        fully_shard(part, mesh=mesh)
    whole(batch()[rank:rank + 1]).square().mean().backward()
    return [p.grad.full_tensor() for p in whole.parameters()]


def compare(rank, way):
    alone = model()
    alone(batch()).square().mean().backward()
    with fattn.torch.sdpa():
        gradients = way(rank)
    for a, p in zip(gradients, alone.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-4, atol=1e-6)


def work(rank, way, folder, pipe):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS,
                                timeout=timedelta(seconds=100))
        compare(rank, way)
        pipe.send("right")
        dist.barrier()
    except BaseException:
        pipe.send(traceback.format_exc())
    os._exit(0)


@pytest.mark.parametrize("way", [replicated, sharded])
def test_gradients_over_ranks(way, tmp_path):
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(RANKS):
        here, there = context.Pipe(duplex=False)
        processes.append(context.Process(target=work, args=(rank, way, str(tmp_path), there)))
        processes[-1].start()
        there.close()
        pipes.append(here)
    told = [pipe.recv() if pipe.poll(120) else "hangs" for pipe in pipes]
    for process in processes:
        process.kill()
        process.join()
    assert told == ["right"] * RANKS, "\n".join(told)
