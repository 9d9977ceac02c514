"""Data parallel training on two gloo processes, with sparse gradients."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from manyclass import SampledSoftmax
from manyclass.processes import leave

N, D = 40, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Linear(D, D), SampledSoftmax(D, N, "softmax", 5, bias=True)

    def forward(self, query, target, generator):
        return self.head(self.trunk(query), target, generator=generator)


def data(rank: int):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(8, D, generator=generator), torch.randint(N, (8,), generator=generator), generator


def train(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    query, target, generator = data(rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(query, target, generator).backward()
        assert model.module.head.weight.grad.is_sparse
        optimizer.step()
    torch.save(model.module.state_dict(), f"{folder}/{rank}.pt")
    leave(0)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
def test_data_parallel_equals_one_process(tmp_path):
    mp.start_processes(train, (str(tmp_path),), nprocs=2, start_method="spawn")
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    parts = [data(0), data(1)]
    for _ in range(3):
        optimizer.zero_grad()
        (sum(model(*part) for part in parts) / 2).backward()
        optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(ranks[0][name], ranks[1][name])
        torch.testing.assert_close(ranks[0][name], value.detach())
