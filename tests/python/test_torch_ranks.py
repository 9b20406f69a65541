# SPDX-License-Identifier: Apache-2.0
"""fattn.torch in models whose parameters are replicated or sharded over processes: the same gradients."""

import pytest

torch = pytest.importorskip("torch")

import fattn.torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402

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
    from torch.distributed.fsdp import fully_shard
    whole = model()
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for part in (*whole, whole):
        fully_shard(part, mesh=mesh)
    whole(batch()[rank:rank + 1]).square().mean().backward()
    return [p.grad.full_tensor() for p in whole.parameters()]


def work(rank, way, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    with fattn.torch.sdpa():
        torch.save(globals()[way](rank), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("way", ["replicated", "sharded"])
def test_gradients_over_ranks(way, tmp_path):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("PyTorch without gloo")
    torch.multiprocessing.spawn(work, (way, str(tmp_path)), nprocs=RANKS)
    alone = model()
    alone(batch()).square().mean().backward()
    for rank in range(RANKS):
        for a, p in zip(torch.load(tmp_path / f"{rank}.pt"), alone.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad, rtol=1e-4, atol=1e-6)
