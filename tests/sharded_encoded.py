"""Checks of sharded layers with an encoder, or with cosines; each runs on every rank of a process group."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from manyclass import ArcFace, CosFace, Cosine, FullSoftmax
from manyclass.distributed import ShardedSampledSoftmax, data_parallel

N, D = 37, 5


class Tower(nn.Module):
    """Features of each class through two layers."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("features", torch.randn(N, 6, generator=generator))
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, D))
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, ids):
        return self.layers(self.features[ids])


class Model(nn.Module):
    """A trunk of one matrix."""

    def __init__(self, head):
        super().__init__()
        self.trunk = nn.Linear(D, D, bias=False)
        nn.init.eye_(self.trunk.weight)
        self.head = head

    def forward(self, query, target):
        return self.head(self.trunk(query), target)


def trains_as_one_process(rank, ranks, rest, **options):
    """With a draw of all classes: after some steps the same parameters, apart from those of the shards, ``rest``."""
    generator = torch.Generator().manual_seed(1)
    query, target = torch.randn(4 * ranks, D, generator=generator), torch.randint(N, (4 * ranks,), generator=generator)
    mine = slice(rank, None, ranks)
    make = {key: copy.deepcopy(value) for key, value in options.items()}
    sharded = ShardedSampledSoftmax(D, N, "blocks", 1000 * N, block_size=4, **make)
    single = Model(FullSoftmax(D, N, **copy.deepcopy(options)))
    rest(sharded, single.head)
    several = data_parallel(Model(sharded))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (several, single)]
    for _ in range(4):
        losses = several(query[mine], target[mine]), single(query, target)
        mean = losses[0].detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / ranks, losses[1].detach(), rtol=1e-4, atol=1e-5)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = dict(single.named_parameters())
    for name, parameter in several.module.named_parameters():
        truth = found[name]
        if hasattr(parameter, "shard_group"):
            truth = truth[sharded.shard.first : sharded.shard.last]
        torch.testing.assert_close(parameter, truth, rtol=1e-3, atol=1e-4)
    sharded.refresh()
    for layer in (sharded, single.head):
        layer.eval()
    torch.testing.assert_close(sharded.topk(query, 3), single.head.topk(query, 3), rtol=1e-3, atol=1e-4)
    return sharded, query, target


def check_an_encoder_trains_as_in_one_process(rank, ranks):
    trains_as_one_process(rank, ranks, lambda sharded, single: None, classes=Tower(), chunk_size=8)


def check_an_encoder_and_offsets_train_as_in_one_process(rank, ranks):
    def same(sharded, single):
        with torch.no_grad():
            single.bias_embedding.weight.copy_(torch.arange(N).unsqueeze(-1) / N)
            sharded.bias_embedding.weight.copy_(single.bias_embedding.weight[sharded.shard.first : sharded.shard.last])

    trains_as_one_process(rank, ranks, same, classes=Tower(), bias=True)


def check_cosines_with_a_margin_train_as_in_one_process(rank, ranks):
    def same(sharded, single):
        with torch.no_grad():
            sharded.embedding.weight.copy_(single.embedding.weight[sharded.shard.first : sharded.shard.last])

    torch.manual_seed(3)
    trains_as_one_process(rank, ranks, same, cosine=Cosine(6, margin=ArcFace(0.4)))
    trains_as_one_process(rank, ranks, same, cosine=Cosine(6, learn_scale=True))
    trains_as_one_process(
        rank, ranks, lambda sharded, single: None, cosine=Cosine(6, margin=CosFace(0.2)), classes=Tower()
    )
    with pytest.raises(ValueError, match="a margin with a learned scale cannot be sharded"):
        ShardedSampledSoftmax(D, N, cosine=Cosine(6, learn_scale=True, margin=CosFace(0.2)))


def check_a_checkpoint_of_a_cache_is_loaded(rank, ranks, folder):
    head = ShardedSampledSoftmax(D, N, "blocks", 16, classes=Tower())
    query, target = torch.randn(3, D), torch.randint(N, (3,))
    head(query, target).backward()
    head.refresh()
    dcp.save({"head": head.state_dict()}, checkpoint_id=folder / f"cache-of-{ranks}")
    other = ShardedSampledSoftmax(D, N, "blocks", 16, classes=Tower(1))
    state = other.state_dict()
    dcp.load({"head": state}, checkpoint_id=folder / f"cache-of-{4 if ranks == 2 else ranks}")
    other.load_state_dict(state)
    other.load_shard_state(head.shard_state())
    torch.testing.assert_close(other.weight, head.weight)
    other.eval().topk(query, 3)  # without a warning: the cache is fresh
