"""Data parallel training on two gloo processes, with sparse gradients."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from manyclass import SampledSoftmax
from manyclass.distributed import collectives, data_parallel
from manyclass.train.processes import leave

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
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = data_parallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    query, target, generator = data(rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(query, target, generator).backward()
        assert model.module.head.weight.grad.is_sparse
        optimizer.step()
    torch.save(model.module.state_dict(), f"{folder}/{rank}.pt")
    accumulate(rank)
    leave(0)


def accumulate(rank: int) -> None:
    """Two backward passes, the second of which exchanges: the mean of the sums, also where a rank has no rows."""
    exchanged = set()
    collectives.observer = lambda what, size: exchanged.add(what)
    inputs = [[[5, 1, 1], []], [[5, 2], []]]  # of both passes, of both ranks
    model = data_parallel(nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2)))
    single = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2))
    single.load_state_dict(model.module.state_dict())

    def step(module: nn.Module, ids: list[int]) -> None:
        module(torch.tensor(ids, dtype=torch.long)).sum().backward()

    with model.no_sync():
        step(model, inputs[0][rank])
    assert "sparse gradients" not in exchanged
    step(model, inputs[1][rank])
    assert "sparse gradients" in exchanged  # not by torch, whose way can crash
    for ids in [*inputs[0], *inputs[1]]:
        step(single, ids)
    found = model.module[0].weight.grad
    assert found.is_coalesced()
    assert found.indices().tolist() == [[1, 2, 5]]
    torch.testing.assert_close(found.to_dense(), single[0].weight.grad / 2)
    torch.testing.assert_close(model.module[1].weight.grad, single[1].weight.grad / 2)


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
