"""Checks of the sharded layer; each runs on every rank of a process group, and compares with the unsharded layer."""

import copy
import math
import os
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import sharded_encoded
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from contract import SIGNIFICANCE, goodness_of_fit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from manyclass import SampledSoftmax, clip_grad_norm_, ops, optim, samplers
from manyclass.distributed import ShardedSampledSoftmax, data_parallel
from manyclass.shard import Examples
from manyclass.train.processes import leave

N, D = 61, 5
#: Examples of each rank: uneven, and none on one of them.
SIZES = (7, 0, 3, 5)


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, D, generator=generator), torch.randn(N, generator=generator)


def examples(ranks, seed=1):
    """Of all ranks; every rank takes its part."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [SIZES[rank % len(SIZES)] for rank in range(ranks)]
    query, target = (
        torch.randn(sum(sizes), D, generator=generator),
        torch.randint(N, (sum(sizes),), generator=generator),
    )
    return query, target, sizes


def sharded(sampler="blocks", num_samples=None, **options):
    """A layer with the weights above."""
    head = ShardedSampledSoftmax(D, N, sampler, num_samples, **options)
    fill(head, head.shard.first, head.shard.last)
    return head


def fill(head, first=0, last=N):
    weight, bias = weights()
    with torch.no_grad():
        head.weight.copy_(weight[first:last])
        if head.bias_embedding is not None:
            head.bias_embedding.weight.copy_(bias[first:last, None])
    return head


def expected(query, target, **options):
    """Loss and gradients of one process that has everything."""
    head = fill(SampledSoftmax(D, N, "uniform", sparse=False, **options)).eval()
    query = query.clone().requires_grad_()
    loss = head(query, target)
    return loss.detach(), *torch.autograd.grad(loss, [query, *head.parameters()]), head


def equals_one_process(head, query, target, mine, loss, query_grad, grads):
    """A step with this rank's examples: the mean over ranks of losses and gradients is what one process has."""
    ranks = dist.get_world_size()
    own = query[mine].clone().requires_grad_()
    part = head(own, target[mine])
    part.backward()
    total = part.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total / ranks, loss)
    torch.testing.assert_close(own.grad / ranks, query_grad[mine], rtol=1e-4, atol=1e-6)
    for parameter, grad in zip(head.parameters(), grads, strict=True):
        found = parameter.grad.to_dense()
        torch.testing.assert_close(found, grad[head.shard.first : head.shard.last], rtol=1e-4, atol=1e-6)


def check_exact_loss_and_gradients(rank, ranks):
    """In eval mode, and in training with a draw of all classes: the full softmax, exactly, with ignored targets."""
    native = ops._NATIVE
    query, target, sizes = examples(ranks)
    target[1] = target[-1] = -100
    begin = sum(sizes[:rank])
    mine = slice(begin, begin + sizes[rank])
    for prediction in ("softmax", "absolute"):
        for bias in (False, True):
            options = {"prediction": prediction, "bias": bias}
            loss, query_grad, *grads, _ = expected(query, target, **options)
            kinds = ("exact", "pool", "own", "pool, reference", "own, reference")
            for kind in kinds:
                training = kind != "exact"
                ops._NATIVE = native and not kind.endswith("reference")
                for split in ("even", "mass"):
                    samples = {"own": 1000 * N, "probe": 1000 * N} if kind.startswith("own") else {}
                    number = 10 if samples else 1000 * N
                    head = sharded(num_samples=number, split=split, block_size=4, **samples, **options).train(training)
                    equals_one_process(head, query, target, mine, loss, query_grad, grads)
                    assert all(parameter.grad.is_sparse == training for parameter in head.parameters())
    ops._NATIVE = native
    head = sharded(reduction="none").eval()
    losses = head(query[mine], target[mine])
    truth = fill(SampledSoftmax(D, N, "uniform", reduction="none")).eval()(query, target)
    torch.testing.assert_close(losses, truth[mine])


def check_all_targets_of_one_rank_are_ignored(rank, ranks):
    query, target, sizes = examples(ranks)
    target[: sizes[0]] = -100
    begin = sum(sizes[:rank])
    mine = slice(begin, begin + sizes[rank])
    if ranks == 2:  # the other has none
        target[0] = 3
    loss, query_grad, weight_grad, _ = expected(query, target)
    for training in (True, False):
        head = sharded(num_samples=1000 * N, block_size=4).train(training)
        equals_one_process(head, query, target, mine, loss, query_grad, [weight_grad])


def check_nobody_has_examples(rank, ranks):
    for sampler in ("blocks", "uniform", "softmax"):
        for training in (True, False):
            head = sharded(sampler, 8).train(training)
            query = torch.empty(0, 3, D, requires_grad=True)
            loss = head(query, torch.empty(0, 3, dtype=torch.long))
            assert float(loss.detach()) == 0
            loss.backward()
            assert float(head.weight.grad.to_dense().abs().sum()) == 0
    query = torch.randn(2, D, requires_grad=True)
    loss = sharded()(query, torch.tensor([-100, -100]))
    loss.backward()
    assert float(loss.detach()) == 0
    assert float(query.grad.abs().sum()) == 0


class Ramp(samplers.Sampler):
    """A sampler of a user: q_i ∝ slope_i, drawn by inversion; a rank has the slopes of its classes."""

    def __init__(self, num_classes, slope):
        super().__init__()
        self.num_classes = num_classes
        self.register_buffer("mass", slope.double())

    @classmethod
    def restrict(cls, options, part):
        return cls, {**options, "slope": options["slope"][part.first : part.last]}

    def log_total(self, query):
        return self.mass.sum().log().to(query.dtype).expand(len(query))

    def _without(self, query, exclude):
        mass = self.mass.repeat(len(query), 1)
        return mass if exclude is None else mass.scatter(1, exclude[:, None], 0.0)

    def _draw(self, query, uniform, exclude, context):
        total = self._without(query, exclude).cumsum(-1)
        ids = torch.searchsorted(total, uniform[..., 0] * total[:, -1:], right=True)
        return ids, self._log_prob(query, ids, exclude, context)

    def _log_prob(self, query, ids, exclude, context):
        mass = self._without(query, exclude)
        return (mass.gather(-1, ids) / mass.sum(-1, keepdim=True)).log()


class RampPool(Ramp):
    """The same for one pool of the batch."""

    scope = "batch"


SLOPE = torch.arange(1, N + 1) ** 2
SAMPLERS = {
    "uniform": {},
    "log_uniform": {},
    "unigram": {"counts": torch.arange(1, N + 1)},
    "bigram": {"pairs": torch.stack([torch.arange(500) % 7, torch.arange(500) * 11 % N], 1)},
    "quadratic": {},
    "quartic": {},
    "softmax": {},
    "blocks": {"own": 8, "probe": 8, "block_size": 2},
    Ramp: {"slope": SLOPE},
}


def check_draws_follow_their_stratum(rank, ranks):
    """The classes that a rank draws come as often as their log-counts say; the positive never comes."""
    query, target, _ = examples(4)
    query, target = query[:1], target[:1]
    for name, options in SAMPLERS.items():
        for split in ("even",) if name == "bigram" else ("even", "mass"):
            head = sharded(name, 8, split=split, **options)
            head.refresh()
            shard = head.shard
            local = torch.where((target >= shard.first) & (target < shard.last), target - shard.first, -1)
            repeats = 4000
            context = torch.full((repeats,), 3)
            many = query.expand(repeats, -1), local.expand(repeats), context
            draw = shard.draw(head.sampler, Examples(*many, []), head.num_samples, torch.Generator().manual_seed(rank))
            taken = draw.log_count < math.inf
            assert not ((draw.ids == local) & taken).any()
            size = shard.last - shard.first
            observed = draw.ids[taken].bincount(minlength=size)
            count = torch.zeros(size, dtype=torch.float64)
            count[draw.ids[taken]] = draw.log_count[taken].double().exp()
            if name == "blocks":  # each example draws a class once at most
                error = (observed / repeats - count).abs() / (count * (1 - count) / repeats).clamp(min=1e-9).sqrt()
                assert error[count > 0].max() < 4.5
                assert len(draw.pool) == (4 if ranks == 2 else 2) or split == "mass"
                assert draw.ids.shape[1] == 8 // ranks
                continue
            every = torch.arange(size).expand(1, -1)
            exclude = local if int(local) >= 0 else None
            q = head.sampler.log_prob(query, every, exclude=exclude, context=context[:1])[0].exp()
            numbers = int(taken[0].sum())
            torch.testing.assert_close(count[count > 0], (numbers * q)[count > 0], rtol=1e-4, atol=0)
            assert goodness_of_fit(observed, q * int(taken.sum())) > SIGNIFICANCE, (name, split)
            if split == "even":
                total = torch.tensor(draw.ids.shape[1])
                dist.all_reduce(total)
                assert int(total) == 8


def check_partition_is_unbiased_and_gradient_means_are_right(rank, ranks):
    """Ẑ is Z in the mean for every sampler. Softmax sampling has no bias, so its mean gradient is the full one."""
    query, target, sizes = examples(ranks)
    begin = sum(sizes[:rank])
    mine = slice(begin, begin + sizes[rank])
    *_, full = expected(query, target)
    with torch.no_grad():
        outputs = query @ full.weight.T
        positive = outputs.gather(1, target[:, None]).squeeze(1)
        log_z = outputs.logsumexp(-1)
    torch.manual_seed(rank)
    many = query[mine].repeat(400, 1), target[mine].repeat(400)
    for name, options in SAMPLERS.items():
        if name == "bigram":
            continue
        for split in ("even", "mass"):
            head = sharded(name, 24, split=split, reduction="none", **options)
            with torch.no_grad():
                if name == "blocks":  # examples that share a pool do not err independently: a pool for each repeat
                    repeats = [head(query[mine], target[mine]) for _ in range(150)]
                    losses = torch.stack(repeats).double()
                else:
                    losses = head(*many).double().view(400, sizes[rank])
            if not sizes[rank]:
                continue
            ratio = (losses + positive[mine] - log_z[mine]).exp()
            error = (ratio.mean(0) - 1).abs() / (ratio.std(0) / math.sqrt(len(ratio)) + 1e-4)
            assert error.max() < 5, (name, split, error)
    _, query_grad, weight_grad, _ = expected(query, target)
    head = sharded("softmax", 2 * ranks)
    own = many[0].requires_grad_()
    for _ in range(4):
        head(own, many[1]).backward()
    found = own.grad.view(400, *query[mine].shape).sum(0) / 4
    torch.testing.assert_close(found / ranks, query_grad[mine], rtol=0, atol=0.02)
    found = head.weight.grad.to_dense() / 4
    torch.testing.assert_close(found, weight_grad[head.shard.first : head.shard.last], rtol=0, atol=0.02)


def check_samplers_of_users(rank, ranks):
    """As a class that restricts itself, as an object for this rank's classes, and subclasses of named samplers."""
    query, target, sizes = examples(ranks)
    begin = sum(sizes[:rank])
    mine = slice(begin, begin + sizes[rank])
    first = sharded(Ramp, 8, slope=SLOPE).shard.first
    last = sharded(Ramp, 8, slope=SLOPE).shard.last
    made = Ramp(last - first, SLOPE[first:last])
    losses = []
    for sampler, options in ((Ramp, {"slope": SLOPE}), (made, {})):
        head = sharded(sampler, 8, **options)
        assert torch.equal(head.sampler.mass, SLOPE[first:last].double())
        loss = head(query[mine], target[mine], generator=torch.Generator().manual_seed(rank))
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] == losses[1]
    pool = sharded(RampPool, 8, slope=SLOPE)
    examples_of_all = Examples(query, torch.full_like(target, -1), None, sizes)
    assert len(pool.shard.draw(pool.sampler, examples_of_all, 8, None).pool) == 8 // ranks

    class Steeper(samplers.LogUniform):
        """A subclass of a sampler that restricts itself to another class."""

    class Even(samplers.Unigram):
        """A subclass that has its counts from elsewhere."""

        def __init__(self, num_classes):
            super().__init__(torch.ones(num_classes))

    class Narrow(samplers.Blocks):
        """A subclass with other options."""

        def __init__(self, num_classes, in_features, **more):
            super().__init__(num_classes, in_features, **{**more, "probe": 4})

    for kind in (Steeper, Even, Narrow):
        head = sharded(kind, 8)
        assert type(head.sampler) is kind
        head(query[mine], target[mine]).backward()
    with pytest.raises(ValueError, match=f"sampler Ramp must have num_classes = {last - first}, .*got {N}"):
        sharded(Ramp(N, SLOPE), 8)


def check_predictions(rank, ranks):
    """Of all classes, on every rank for its own queries, and with a gradient for log_prob."""
    query, target, sizes = examples(ranks)
    begin = sum(sizes[:rank])
    mine = slice(begin, begin + sizes[rank])
    for prediction in ("softmax", "absolute"):
        options = {"prediction": prediction, "bias": True}
        head, full = sharded(**options).eval(), expected(query, target, **options)[-1]
        for k in (1, 7, N):
            assert head.topk(query[0], k)[1].shape == (k,)
            values, ids = head.topk(query[mine].view(1, -1, D), k)
            wanted = full.topk(query[mine].view(1, -1, D), k)
            torch.testing.assert_close(values, wanted[0])
            assert torch.equal(ids, wanted[1])
        assert torch.equal(head.predict(query[mine]), full.predict(query[mine]))
        own = query[mine].clone().requires_grad_()
        log_prob = head.log_prob(own)
        torch.testing.assert_close(log_prob, full.log_prob(query[mine]))
        (log_prob * torch.linspace(0, 1, N)).sum().backward()
        everyone = query.clone().requires_grad_()
        (full.log_prob(everyone) * torch.linspace(0, 1, N)).sum().backward()
        torch.testing.assert_close(own.grad, everyone.grad[mine], rtol=1e-4, atol=1e-5)
        wanted = full.weight.grad[head.shard.first : head.shard.last] / ranks
        torch.testing.assert_close(head.weight.grad, wanted, rtol=1e-4, atol=1e-5)


def check_weights_do_not_depend_on_the_number_of_ranks(rank, ranks):
    torch.manual_seed(5)
    head = ShardedSampledSoftmax(3, 10_001, bias=True)
    after = torch.rand(())
    single = dist.new_group([rank], use_local_synchronization=True)
    torch.manual_seed(5)
    alone = ShardedSampledSoftmax(3, 10_001, bias=True, mesh=single)
    assert torch.equal(after, torch.rand(()))  # and torch's generator goes on alike
    assert torch.equal(head.weight, alone.weight[head.shard.first : head.shard.last])
    assert torch.equal(head.bias, alone.bias[head.shard.first : head.shard.last])
    assert len(alone.weight.unique(dim=0)) == 10_001
    assert 0.9 < float(alone.weight.detach().abs().max()) * math.sqrt(3) <= 1


def check_a_mesh_of_data_and_classes(rank, ranks):
    """Replicas of a shard see other data and get the same gradient: the mean over all ranks."""
    if ranks != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "classes"))
    query, target, sizes = examples(4)
    begin = sum(sizes[:rank])
    mine = slice(begin, begin + sizes[rank])
    loss, query_grad, *grads, _ = expected(query, target, bias=True)
    for training, sparse in ((False, True), (True, True), (True, False)):
        head = sharded(num_samples=1000 * N, bias=True, sparse=sparse, block_size=4, mesh=mesh).train(training)
        assert (head.shard.first, head.shard.last) == ((0, 31), (31, 61))[rank % 2]
        equals_one_process(head, query, target, mine, loss, query_grad, grads)
    # With a data parallel trunk over all four: the same weights as one process gets.
    model = data_parallel(Model(sharded(num_samples=1000 * N, block_size=4, mesh=mesh)))
    trains_as_one_process(model, query, target, mine)
    # A few draws that differ between replicas: weights and statistics stay the same.
    torch.manual_seed(rank)
    head = sharded(num_samples=16, block_size=4, mesh=mesh)
    optimizer = torch.optim.Adagrad(head.parameters(), lr=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        head(query[mine], target[mine]).backward()
        optimizer.step()
    head.refresh()
    for value in (head.weight.detach(), head.sampler.partition.mean.code):
        both = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(both, value.contiguous(), group=mesh.get_group(0))
        assert torch.equal(*both)
    fresh = copy.deepcopy(head.sampler.partition)
    codes = copy.deepcopy(head.sampler.codes)
    fresh.summarise(head.weight.detach(), None, torch.arange(fresh.blocks), codes)
    assert torch.equal(head.sampler.partition.mean.code, fresh.mean.code)  # rows that other replicas touched, too
    assert torch.equal(head.sampler.codes.code, codes.code)


class Model(nn.Module):
    def __init__(self, head):
        super().__init__()
        torch.manual_seed(3)
        self.trunk, self.head = nn.Linear(D, D), head

    def forward(self, query, target):
        return self.head(self.trunk(query), target)


def trains_as_one_process(model, query, target, mine, kinds=(torch.optim.SGD, torch.optim.SGD), **options):
    """Some steps with clipped gradients, of this rank's examples and of one process with all: the same weights."""
    single, head = Model(fill(SampledSoftmax(D, N, "uniform")).eval()), model.module.head
    optimizers = [kind(m.parameters(), lr=0.5, **options) for kind, m in zip(kinds, (model, single), strict=True)]
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(query[mine], target[mine]).backward()
        single(query, target).backward()
        norms = [clip_grad_norm_(m.parameters(), 0.5) for m in (model, single)]
        torch.testing.assert_close(*norms, rtol=1e-4, atol=1e-6)
        assert float(norms[0]) > 0.5
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(model.module.trunk.weight, single.trunk.weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        head.weight, single.head.weight[head.shard.first : head.shard.last], rtol=1e-4, atol=1e-5
    )
    return single


def check_data_parallel_training_equals_one_process(rank, ranks):
    """With a draw of all classes: the same weights after some steps, gradients clipped, as one process has."""
    query, target, sizes = examples(ranks)
    begin = sum(sizes[:rank])
    mine = slice(begin, begin + sizes[rank])
    head = sharded(num_samples=1000 * N, block_size=4)
    model = data_parallel(Model(head))
    single = trains_as_one_process(model, query, target, mine)
    # An unsharded layer: no rank sends its sampler's statistics around, and the weights stay the same.
    torch.manual_seed(rank)
    whole = data_parallel(Model(fill(SampledSoftmax(D, N, num_samples=16, block_size=4))))
    assert "head.sampler.partition.mean.code" in whole.parameters_to_ignore
    assert "head.embedding.weight" not in whole.parameters_to_ignore
    rate = torch.optim.SGD(whole.parameters(), lr=0.5)
    for _ in range(3):
        rate.zero_grad()
        whole(query[mine], target[mine]).backward()
        rate.step()
    every = [torch.empty(N, D) for _ in range(ranks)]
    dist.all_gather(every, whole.module.head.weight.detach())
    assert all(torch.equal(one, every[0]) for one in every)
    for norm_type in (1.0, math.inf):
        norms = [clip_grad_norm_(m.parameters(), 1e9, norm_type) for m in (model, single)]
        torch.testing.assert_close(*norms, rtol=1e-4, atol=1e-6)
    wrong = DistributedDataParallel(Model(nn.Linear(D, D)))
    wrong.module.head = head  # as if it had been there when DDP was made
    with pytest.raises(ValueError, match="wrap the trunk only"):
        wrong(query[mine], target[mine])


def check_diagnostics_and_tolerance(rank, ranks):
    """The measured bias is near the true one, the same on all ranks, and what the tolerance adapts to."""
    torch.manual_seed(rank)
    query, target, _ = examples(ranks)
    query, target = (part.repeat(30, *[1] * (part.dim() - 1)) for part in (query, target))
    truth = fill(SampledSoftmax(D, N, "uniform", reduction="none")).eval()(query, target).detach()
    small = {"own": 4, "probe": 4, "block_size": 2}
    for name, options, number in (("uniform", {}, 100), ("quartic", {}, 24), ("blocks", small, 8)):
        head = sharded(name, number, reduction="none", **options)
        with torch.no_grad():
            true = torch.stack([(head(query, target) - truth).mean() for _ in range(40)]).mean()
            found = [head.diagnostics(400) for _ in range(10) if head(query, target) is not None]
        dist.all_reduce(true)
        measured = sum(one.bias for one in found) / 10
        assert (found[0].own, found[0].pool) == ((4, 8) if name == "blocks" else (number, 0))
        assert abs(measured - float(true / ranks)) < 0.3 * abs(float(true / ranks)) + 0.01, (
            name,
            measured,
            true / ranks,
        )
        every = [None] * ranks
        dist.all_gather_object(every, found[0].bias)
        assert len(set(every)) == 1
    head = sharded("uniform", tolerance=0.05)
    with torch.no_grad():
        for _ in range(100):
            head(query, target)
    every = [None] * ranks
    dist.all_gather_object(every, head.num_samples)
    assert len(set(every)) == 1
    head = sharded("uniform", head.num_samples, reduction="none")
    with torch.no_grad():
        true = -torch.stack([(head(query, target) - truth).mean() for _ in range(20)]).mean()
    assert 0.015 < float(true) < 0.13


def check_refused(rank, ranks):
    embedding = nn.Embedding(N, D, sparse=True)
    for call, message in (
        (lambda: ShardedSampledSoftmax(D, ranks * 2 - 1), "num_classes must leave 2 classes"),
        (lambda: ShardedSampledSoftmax(D, N, "uniform", ranks - 1), "num_samples must be 1 or more for each of"),
        (lambda: ShardedSampledSoftmax(D, N, embedding=embedding), "tied weights cannot be sharded"),
        (lambda: ShardedSampledSoftmax(D, N, split="odd"), "split must be one of 'even', 'mass', got 'odd'"),
        (lambda: ShardedSampledSoftmax(D, N, "unigram", counts=torch.ones(3)), f"counts must have shape \\({N},\\)"),
        (lambda: sharded("bigram", 8, **SAMPLERS["bigram"]).sampler.log_total(torch.ones(1, D)), "use split='even'"),
        (lambda: sharded()(torch.ones(2, D), torch.tensor([0, N])), f"target must be in \\[0, {N}\\)"),
        (lambda: sharded().topk(torch.ones(2, D), N + 1), "k must be at most"),
        (lambda: ShardedSampledSoftmax(D, N, mesh="world"), "mesh must be a DeviceMesh"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()


def check_adamw_trains_as_one_process(rank, ranks):
    """Sparse gradients of shards and dense ones of the trunk in one optimiser; and of a layer that each rank has."""
    query, target, sizes = examples(ranks)
    begin = sum(sizes[:rank])
    mine = slice(begin, begin + sizes[rank])
    model = data_parallel(Model(sharded(num_samples=1000 * N, block_size=4)))
    kinds = (optim.AdamW, torch.optim.AdamW)
    trains_as_one_process(model, query, target, mine, kinds, eps=0.1, weight_decay=0.1)
    assert model.module.head.weight.grad.is_sparse
    torch.manual_seed(rank)
    whole = data_parallel(Model(fill(SampledSoftmax(D, N, num_samples=16, block_size=4))))
    optimizer = optim.AdamW(whole.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        whole(*(part.tensor_split(ranks)[rank] for part in (query, target))).backward()
        optimizer.step()
    optimizer.flush()
    for parameter in whole.parameters():
        everyone = [torch.empty_like(parameter) for _ in range(ranks)]
        dist.all_gather(everyone, parameter.detach())
        assert all(torch.equal(parameter, other) for other in everyone)


def check_training_learns_as_one_process_does(rank, ranks):
    """Learn to name clusters from a few blocks; held-out loss near that of one process with the same batches."""
    generator = torch.Generator().manual_seed(0)
    truth = 3 * nn.functional.normalize(torch.randn(N, D, generator=generator), dim=1)
    single = dist.new_group([rank], use_local_synchronization=True)
    losses = []
    for mesh, parts, own in ((None, ranks, rank), (single, 1, 0)):
        torch.manual_seed(7)
        head = ShardedSampledSoftmax(D, N, num_samples=32, block_size=4, mesh=mesh)
        torch.manual_seed(rank)
        optimizer = torch.optim.Adagrad(head.parameters(), lr=0.5)
        data = torch.Generator().manual_seed(1)
        for _ in range(150):
            target = torch.randint(N, (32,), generator=data)
            query = truth[target] + 0.3 * torch.randn(32, D, generator=data)
            optimizer.zero_grad()
            head(query.tensor_split(parts)[own], target.tensor_split(parts)[own]).backward()
            optimizer.step()
        target = torch.arange(N).repeat(5)
        query = truth[target] + 0.3 * torch.randn(5 * N, D, generator=data)
        losses.append(float(head.eval()(query, target).detach()))
    assert losses[1] < 0.7 * math.log(N)
    assert abs(losses[0] / losses[1] - 1) < 0.15, losses


def check_checkpoint_is_written(rank, ranks, folder):
    """With torch's own means; `check_checkpoint_is_loaded` reads it on other numbers of ranks."""
    head = sharded(bias=True, num_samples=16, block_size=4)
    query, target, _ = examples(ranks)
    head(query, target).backward()
    assert not any(key.startswith("sampler.") for key in head.state_dict())
    dcp.save({"head": head.state_dict()}, checkpoint_id=folder / f"of-{ranks}")
    exact = ShardedSampledSoftmax(D, N, bias=True, num_samples=16, block_size=4)
    exact.load_state_dict(head.state_dict())
    exact.load_shard_state(head.shard_state())
    exact.sampler.attach(exact.weight, exact.bias)  # as its first step would
    draws = [one.sampler.draw(query, 16, generator=torch.Generator().manual_seed(2)) for one in (head, exact)]
    assert torch.equal(draws[0].ids, draws[1].ids)
    assert torch.equal(head.get_extra_state(), exact.get_extra_state())


def check_checkpoint_is_loaded(rank, ranks, folder):
    for saved in (2, 4):
        if not (folder / f"of-{saved}").exists():
            continue
        head = ShardedSampledSoftmax(D, N, bias=True, num_samples=16, block_size=4)
        before = head.weight.detach().clone()
        state = head.state_dict()
        dcp.load({"head": state}, checkpoint_id=folder / f"of-{saved}")
        head.load_state_dict(state)
        assert not torch.equal(head.weight, before)
        weight, bias = weights()
        assert torch.equal(head.weight, weight[head.shard.first : head.shard.last])
        assert torch.equal(head.bias, bias[head.shard.first : head.shard.last])
        assert int(head.step) == 1
        query, target, _ = examples(ranks)
        head(query, target).backward()
        tree = head.sampler.partition
        ids, inside = tree.members(torch.arange(tree.blocks))
        rows = head.weight.detach()[ids] * inside.unsqueeze(-1)
        expected_mean = rows.sum(1) / inside.sum(-1, keepdim=True)
        leaves = tree.mean.read(torch.arange(tree.firsts[-1], len(tree.spread)))
        torch.testing.assert_close(leaves[:, :D], expected_mean, rtol=0, atol=0.02)
    # Class weights of an unsharded layer are dealt out.
    head = ShardedSampledSoftmax(D, N, bias=True)
    head.load_state_dict(fill(SampledSoftmax(D, N, bias=True)).state_dict())
    assert torch.equal(head.weight, weights()[0][head.shard.first : head.shard.last])


CHECKS = [
    value
    for module in (globals(), vars(sharded_encoded))
    for name, value in list(module.items())
    if name.startswith("check_")
]


def run(rank: int, ranks: int, folder: str) -> None:
    """All checks on one rank; their errors go to a file."""
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    warnings.simplefilter("error")
    store = f"file://{folder}/store-{ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    errors = {}
    for check in CHECKS:
        arguments = (Path(folder),) if "checkpoint" in check.__name__ else ()
        try:
            check(rank, ranks, *arguments)
        except Exception:
            errors[check.__name__] = traceback.format_exc()
            break  # the others are somewhere else now
    torch.save(errors, f"{folder}/errors-{ranks}-{rank}.pt")
    if errors:
        os._exit(0)  # the errors are in the file; nobody waits for the others
    leave(0)


def spawn(ranks: int, folder: Path) -> dict[str, str]:
    """Run all checks on so many processes; the errors by the name of the check."""
    mp.start_processes(run, (ranks, str(folder)), nprocs=ranks, start_method="spawn")
    found = [error for rank in range(ranks) for error in torch.load(folder / f"errors-{ranks}-{rank}.pt").items()]
    # Those who lost contact with the one that failed come first, so that it has the last word.
    return dict(sorted(found, key=lambda error: "LostContactError" not in error[1]))
