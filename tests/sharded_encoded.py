"""Checks of sharded layers with an encoder, cosines or several targets; each runs on every rank of a process group."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from manyclass import ArcFace, CosFace, Cosine, FullSoftmax
from manyclass.distributed import ShardedSampledSoftmax, data_parallel
from manyclass.distributed.head import ShardedFullSoftmax

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


def several_targets(ranks, generator):
    """From one to three targets for each example of all ranks, distinct."""
    target = torch.rand(4 * ranks, N, generator=generator).argsort(dim=1)[:, :3]
    drop = torch.rand(4 * ranks, 3, generator=generator) < 0.4
    drop[:, 0] = False
    return target.masked_fill(drop, -100)


def trains_as_one_process(rank, ranks, rest, several=False, sampler=("blocks", {"block_size": 4}), **options):
    """With a draw of all classes: after some steps the same parameters, apart from those of the shards, ``rest``."""
    generator = torch.Generator().manual_seed(1)
    query, target = torch.randn(4 * ranks, D, generator=generator), torch.randint(N, (4 * ranks,), generator=generator)
    target = several_targets(ranks, generator) if several else target
    mine = slice(rank, None, ranks)
    make = {key: copy.deepcopy(value) for key, value in options.items()}
    name, how = sampler
    sharded = ShardedSampledSoftmax(D, N, name, 1000 * N, **how, **make)
    single = Model(FullSoftmax(D, N, **copy.deepcopy(options)))
    rest(sharded, single.head)
    model = data_parallel(Model(sharded))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model, single)]
    for _ in range(4):
        losses = model(query[mine], target[mine]), single(query, target)
        mean = losses[0].detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / ranks, losses[1].detach(), rtol=1e-4, atol=1e-5)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = dict(single.named_parameters())
    for name, parameter in model.module.named_parameters():
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


def same_table(sharded, single):
    with torch.no_grad():
        sharded.embedding.weight.copy_(single.embedding.weight[sharded.shard.first : sharded.shard.last])


def check_several_targets_train_as_in_one_process(rank, ranks):
    torch.manual_seed(5)
    encoder = {"classes": Tower(), "chunk_size": 8}
    for split in ("even", "mass"):
        trains_as_one_process(rank, ranks, same_table, True, ("blocks", {"block_size": 4, "split": split}))
    trains_as_one_process(rank, ranks, lambda sharded, single: None, True, **encoder)
    trains_as_one_process(rank, ranks, same_table, True, cosine=Cosine(6, margin=ArcFace(0.4)))


def check_losses_of_several_targets(rank, ranks):
    """Exact in evaluation, whatever widths ranks have; in training no target is a negative."""
    generator = torch.Generator().manual_seed(2)
    query, target = torch.randn(4 * ranks, D, generator=generator), several_targets(ranks, generator)
    mine = slice(4 * rank, 4 * rank + 4)
    wide = torch.cat([target[mine], torch.full((4, rank), -100)], dim=1)  # rank r has 3 + r columns
    for kind in (ShardedFullSoftmax, ShardedSampledSoftmax):
        sharded, single = kind(D, N, reduction="none"), FullSoftmax(D, N, reduction="none")
        same_table(sharded, single)
        truth = single(query, target)[mine]
        found = sharded.eval()(query[mine], wide)
        torch.testing.assert_close(found[:, :3], truth)
        assert not found[:, 3:].any()
    sampled = ShardedSampledSoftmax(D, N, "uniform", 8 * ranks, reduction="none")  # a draw for each example
    same_table(sampled, single)
    with torch.no_grad():  # exp(loss) − 1 is the sum over negatives, divided by what the target has
        sums = torch.stack([sampled(query[mine], wide)[:, 0].expm1() for _ in range(300)])
    torch.testing.assert_close(sums.mean(dim=0) / truth[:, 0].expm1(), torch.ones(4), rtol=0, atol=0.04)


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
