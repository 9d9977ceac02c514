"""Block sampling: exact expected counts in both scopes, summaries, updates, the layer."""

import copy
import math
import pickle

import pytest
import torch
from contract import SIGNIFICANCE, goodness_of_fit
from hypothesis import given, settings
from hypothesis import strategies as st

from manyclass import SampledSoftmax, ops, samplers
from manyclass.samplers import Blocks, blocks, systematic

SCOPES = ["example", "batch"]


def weights(n, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(5, d, generator=generator)
    return centres[torch.randint(5, (n,), generator=generator)] + 0.5 * torch.randn(n, d, generator=generator)


def batch(size, n, d, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, d, generator=generator), torch.randint(n, (size,), generator=generator)


def sampler_of(n=61, d=4, block_size=8, **options):
    sampler = Blocks(n, d, block_size, **options)
    sampler.update(weights(n, d))
    return sampler


@pytest.fixture(params=["one group", "four groups"])
def groups(request, monkeypatch):
    """A sampler of 8 blocks has one group, into which all examples look; or four, of which they look into two."""
    if request.param == "four groups":
        monkeypatch.setattr(blocks, "MIN_GROUP", 2)
        monkeypatch.setattr(blocks, "LOOK_INTO", {"batch": 2, "example": 2})
    return 4 if request.param == "four groups" else 1


@pytest.mark.parametrize("prediction", ["softmax", "absolute"])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("wanted", [1, 3, 8])
def test_the_partition_estimate_is_unbiased(scope, wanted, prediction, groups, backend):
    """By enumeration over the uniform number: the mean of Ẑ is Z without the positive, for every example."""
    sampler, (query, target) = sampler_of(scope=scope, prediction=prediction), batch(3, 61, 4)
    assert (sampler.blocks, sampler.groups) == (8, groups)
    outputs = (query @ weights(61, 4).T).double()
    outputs = outputs.abs() if prediction == "absolute" else outputs
    expected = outputs.exp().sum(-1) - outputs.gather(1, target[:, None]).squeeze(1).exp()
    grid, mean, counts = 2000, torch.zeros(3, dtype=torch.float64), torch.zeros(3, 61, dtype=torch.float64)
    claimed = torch.full((3, 61), math.nan, dtype=torch.float64)
    for point in range(grid):
        uniform = torch.full((1 if scope == "batch" else 3, 1), (point + 0.5) / grid, dtype=torch.float64)
        ids, log_count = sampler._draw_blocks(query, wanted, uniform, target)
        mean += (outputs.gather(1, ids) - log_count).exp().sum(-1) / grid
        taken = log_count < math.inf
        counts += torch.zeros_like(counts).scatter_add(1, ids, taken.double()) / grid
        claimed.scatter_(1, ids.where(taken, ids[:, :1]), log_count.where(taken, log_count[:, :1]))
    torch.testing.assert_close(mean, expected, rtol=3e-3, atol=0)
    assert (counts.gather(1, target[:, None]) == 0).all()
    # The reported expected count of each class is how often it came.
    others = torch.ones(3, 61, dtype=torch.bool).scatter(1, target[:, None], False)
    finite = others & claimed.isfinite()
    assert finite.sum() > 3 * 50
    torch.testing.assert_close(counts[finite], claimed.exp()[finite], rtol=0, atol=2 / grid)


def sampled_classes(sampler, query, target, wanted, outer=100, inner=50):
    """By enumeration of the uniform numbers: how often each class comes, its reported count, and the mean of Ẑ."""
    size, n = query.shape[0], sampler.num_classes
    queries, targets = query.repeat_interleave(inner, 0), target.repeat_interleave(inner)
    outputs = (queries @ weights(n, query.shape[1]).T).double()
    outputs = outputs.abs() if sampler.prediction == "absolute" else outputs
    counts, claimed = torch.zeros(2, size, n, dtype=torch.float64)
    mean = torch.zeros(size, dtype=torch.float64)
    uniform = torch.empty(size * inner, 1 + wanted, dtype=torch.float64)
    uniform[:, 1:] = ((torch.arange(inner) + 0.5) / inner).repeat(size)[:, None]
    for point in range(outer):
        uniform[:, 0] = (point + 0.5) / outer
        ids, log_count = sampler._draw_blocks(queries, wanted, uniform, targets)
        assert ids.shape == (size * inner, wanted)
        taken = log_count < math.inf
        assert (ids != targets[:, None])[taken].all()
        mean += (outputs.gather(1, ids) - log_count).exp().sum(-1).view(size, inner).mean(-1) / outer
        every = torch.zeros(size * inner, n, dtype=torch.float64).scatter_add(1, ids, taken.double())
        counts += every.view(size, inner, n).mean(1) / outer
        report = torch.zeros_like(every).scatter_add(1, ids, (log_count.exp() * taken).where(taken, 0.0))
        claimed = claimed.maximum(report.view(size, inner, n).amax(1))
    return counts, claimed, mean


@pytest.mark.parametrize("prediction", ["softmax", "absolute"])
@pytest.mark.parametrize("wanted", [1, 3, 8])
def test_one_class_per_block_comes_as_often_as_reported(wanted, prediction, groups, backend):
    """The class stands for its block: its count is exact, and Ẑ is unbiased."""
    sampler = sampler_of(scope="example", ending="class", prediction=prediction)
    query, target = batch(3, 61, 4)
    counts, claimed, mean = sampled_classes(sampler, query, target, wanted)
    came = claimed > 0
    assert came.sum() > 60  # the others are too rare for the grid
    torch.testing.assert_close(counts[came], claimed[came], rtol=0, atol=1 / 50 + 1 / 100)  # a step of each grid
    assert (counts[came] - claimed[came]).mean().abs() < 0.002
    outputs = (query @ weights(61, 4).T).double()
    outputs = outputs.abs() if prediction == "absolute" else outputs
    expected = outputs.exp().sum(-1) - outputs.gather(1, target[:, None]).squeeze(1).exp()
    torch.testing.assert_close(mean, expected, rtol=0.05, atol=0)


def test_a_wrong_share_of_a_class_would_be_found(monkeypatch):
    """The enumeration above must be able to fail: draw the class by a flatter distribution than is reported."""
    exp = torch.Tensor.exp
    right = sampled_classes(sampler_of(scope="example", ending="class"), *batch(3, 61, 4), 3, 20)
    monkeypatch.setattr(torch.Tensor, "exp", lambda self: exp(0.5 * self) if self.dim() == 3 else exp(self))
    wrong = sampled_classes(sampler_of(scope="example", ending="class"), *batch(3, 61, 4), 3, 20)
    came = (right[1] > 0) & (wrong[1] > 0)
    torch.testing.assert_close(wrong[1][came], right[1][came])  # reports the same
    with pytest.raises(AssertionError):
        test_one_class_per_block_comes_as_often_as_reported(3, "softmax", 1, "native")


@pytest.mark.parametrize("prediction", ["softmax", "absolute"])
def test_one_class_per_block_follows_log_prob(prediction, groups, backend):
    sampler, (query, target) = sampler_of(scope="example", ending="class", prediction=prediction), batch(3, 61, 4)
    everything = torch.arange(61).expand(3, -1)
    for exclude in (None, target):
        q = sampler.log_prob(query, everything, exclude=exclude).exp()
        torch.testing.assert_close(q.sum(-1), torch.ones(3, dtype=torch.float64), rtol=1e-6, atol=0)
        positives = None if exclude is None else exclude.repeat_interleave(20_000)
        generator = torch.Generator().manual_seed(3)
        draw = sampler.draw(query.repeat_interleave(20_000, 0), 1, exclude=positives, generator=generator)
        assert draw.ids.shape == (60_000, 1)
        for example, (ids, own) in enumerate(zip(draw.ids.view(3, -1), q, strict=True)):
            assert goodness_of_fit(ids.bincount(minlength=61), own * 20_000) > SIGNIFICANCE
            log_count = draw.log_count.view(3, -1)[example].exp().double()
            torch.testing.assert_close(log_count, own[ids], rtol=1e-5, atol=0)


def test_one_class_per_block_in_the_layer():
    """Follows the weights row by row, leaves a slot empty where the positive is alone, and learns as blocks do."""
    alone = Blocks(8, 4, 1, scope="example", ending="class")
    alone.update(weights(8, 4))
    draw = alone.draw(torch.ones(2, 4), 8, exclude=torch.tensor([3, 5]))
    assert draw.ids.shape == (2, 8)
    assert (draw.log_count == math.inf).sum(-1).tolist() == [1, 1]
    assert torch.equal(draw.ids[draw.log_count == math.inf], torch.tensor([3, 5]))
    sampler, weight = sampler_of(scope="example", ending="class"), weights(61, 4)
    weight[7] += 2
    sampler.update(weight, torch.tensor([7]))
    torch.testing.assert_close(sampler.weight, weight)
    torch.manual_seed(0)
    heads = [
        SampledSoftmax(4, 61, Blocks(61, 4, 8, scope="example", ending=ending, bias=True), 8 * unit, bias=True)
        for ending, unit in (("block", 8), ("class", 1))
    ]
    heads[1].load_state_dict(heads[0].state_dict(), strict=False)
    query, target = batch(6, 61, 4)
    # All blocks are drawn. The class of each block stands for its sum: the loss is the full one all the same.
    losses = [head(query, target) for head in heads]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses[1], heads[1].eval()(query, target), rtol=1e-4, atol=1e-5)
    grads = [torch.autograd.grad(loss, head.weight)[0] for loss, head in zip(losses, heads, strict=True)]
    assert len(grads[1].indices()[0]) < len(grads[0].indices()[0])
    # Its gradient is right in the mean.
    heads[1].train()
    total = sum(torch.autograd.grad(heads[1](query, target), heads[1].weight)[0].to_dense() for _ in range(400))
    torch.testing.assert_close(total / 400, grads[0].to_dense(), rtol=0, atol=0.04)


def test_a_wrong_inclusion_probability_would_be_found(monkeypatch):
    """The enumeration above must be able to fail: report other probabilities than those drawn by."""
    draw = systematic.draw

    def wrong(mass, count, wanted, uniform):
        cell, place, probability = draw(mass, count, wanted, uniform)
        return cell, place, 0.5 * probability + 0.5 * wanted / count.sum(-1, keepdim=True)

    monkeypatch.setattr(systematic, "draw", wrong)
    with pytest.raises(AssertionError):
        test_the_partition_estimate_is_unbiased("example", 3, "softmax", 1, "native")


@given(cells=st.integers(1, 99), wanted=st.integers(1, 40), rows=st.integers(1, 4), seed=st.integers(0, 999))
@settings(deadline=None, derandomize=True)
def test_inclusion_probabilities(cells, wanted, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    mass = (3 * torch.randn(rows, cells, generator=generator, dtype=torch.float64)).softmax(-1)
    count = torch.randint(0, 5, (rows, cells), generator=generator)
    count[:, 0] += 1
    wanted = min(wanted, int(count.sum(-1).min()))
    inclusion = systematic.inclusion(mass, count, wanted)
    real = count > 0
    assert ((inclusion > 0) & (inclusion <= 1))[real].all()
    expected = torch.full((rows,), float(wanted), dtype=torch.float64)
    torch.testing.assert_close((inclusion * count).sum(-1), expected)
    # Proportional to the mass where not certain, and nothing certain that has less mass than something that is not.
    ratio = torch.where((inclusion < 1) & real, inclusion / mass, torch.nan)
    for row in range(rows):
        inner = ratio[row][~ratio[row].isnan()]
        if len(inner):
            torch.testing.assert_close(inner, inner[:1].expand_as(inner))
            assert (mass[row][(inclusion[row] == 1) & real[row]] * inner[0] >= 1 - 1e-9).all()
    for number in (0.0, 0.5, 1 - 2**-53):
        uniform = torch.full((rows,), number, dtype=torch.float64)
        cell, place, probability = systematic.draw(mass, count, wanted, uniform)
        assert ((place >= 0) & (place < count.gather(1, cell))).all()
        assert torch.equal(probability, inclusion.gather(1, cell))
        for row in zip(cell.tolist(), place.tolist(), strict=True):
            assert len(set(zip(*row, strict=True))) == wanted


def test_items_of_a_cell_are_drawn_alike():
    """By enumeration of the uniform number: every item comes as often as its cell's probability says."""
    mass, count = torch.tensor([[0.05, 0.3, 0.1, 0.01]]), torch.tensor([[4, 1, 0, 7]])
    inclusion, grid, seen = systematic.inclusion(mass, count, 3), 10_000, torch.zeros(4, 7)
    for point in range(grid):
        uniform = torch.tensor([(point + 0.5) / grid], dtype=torch.float64)
        cell, place, _ = systematic.draw(mass, count, 3, uniform)
        seen[cell[0], place[0]] += 1 / grid
    for cell in range(4):
        assert (seen[cell, : count[0, cell]] - inclusion[0, cell]).abs().le(2 / grid).all()
        assert (seen[cell, count[0, cell] :] == 0).all()


def test_draws_follow_log_prob(groups, backend):
    """One block per example: its probability is what log_prob says of its classes."""
    n, repeats = 61, 20_000
    sampler, (query, target) = sampler_of(n=n, scope="example"), batch(1, 61, 4)
    exclude = target.expand(repeats)
    draw = sampler.draw(query.expand(repeats, -1), 8, exclude=exclude, generator=torch.Generator().manual_seed(0))
    assert not draw.shared
    q = sampler.log_prob(query, torch.arange(n).expand(1, -1), exclude=target).exp()[0]
    seen = draw.ids[draw.log_count < math.inf].bincount(minlength=n)
    assert seen[target] == q[target] == 0
    # Classes of one block come together: one of each block, not the positive, stands for it.
    free = torch.arange(n)[torch.arange(n) != target]
    pick = torch.stack([free[sampler.block_of[free] == block][0] for block in range(8)])
    assert goodness_of_fit(seen[pick], q[pick] * repeats) > SIGNIFICANCE


def test_a_pool_is_shared_and_never_holds_the_positive():
    sampler, (query, target) = sampler_of(scope="batch"), batch(50, 61, 4)
    for seed in range(20):
        draw = sampler.draw(query, 24, exclude=target, generator=torch.Generator().manual_seed(seed))
        assert draw.shared
        assert (draw.ids == draw.ids[:1]).all()
        assert not ((draw.ids == target[:, None]) & (draw.log_count < math.inf)).any()


def test_summaries_are_the_moments_of_the_blocks(backend):
    n, d, weight = 90, 5, weights(90, 5)
    sampler = Blocks(n, d, 12, rank=d)
    sampler.update(weight)
    for block in range(sampler.blocks):
        members = weight[sampler.block_of == block]
        torch.testing.assert_close(sampler.mean[block], members.mean(0), rtol=1e-4, atol=1e-5)
        covariance = (members - members.mean(0)).T @ (members - members.mean(0)) / len(members)
        found = sampler.directions[block].T @ sampler.directions[block] + sampler.spread[block] * torch.eye(d)
        torch.testing.assert_close(found, covariance, rtol=1e-2, atol=1e-3)


def test_a_lower_rank_finds_the_largest_directions(backend):
    weight = weights(400, 16) * torch.linspace(2, 0.1, 16)
    sampler = Blocks(400, 16, 25, rank=3)
    sampler.update(weight)
    for block in range(sampler.blocks):
        members = weight[sampler.block_of == block]
        values = torch.linalg.eigvalsh((members - members.mean(0)).T @ (members - members.mean(0)) / len(members))
        assert float(sampler.directions[block].square().sum()) > 0.8 * float(values[-3:].sum())
        torch.testing.assert_close(
            sampler.directions[block].square().sum() + 16 * sampler.spread[block], values.sum(), rtol=1e-3, atol=1e-3
        )


def test_masses_are_close_to_the_truth():
    n, d = 4000, 16
    weight, (query, _) = weights(n, d), batch(20, n, d)
    query = query / 2
    sampler = Blocks(n, d, scope="example")
    sampler.update(weight)
    truth = (query @ weight.T).double().softmax(-1)
    mass = torch.zeros(20, sampler.blocks, dtype=torch.float64).scatter_add(1, sampler.block_of.expand(20, -1), truth)
    uniform = sampler.log_size.exp() / n
    chi_square = [float((mass**2 / q).sum(-1).mean() - 1) for q in (sampler._mass(query), uniform)]
    assert chi_square[0] < 0.1 < 10 * chi_square[0] < chi_square[1]
    scattered = Blocks(n, d, rank=0)
    scattered.update(weight)
    scattered._deal(torch.arange(n))
    scattered._summarise(weight, None, torch.arange(scattered.blocks), 1)
    spread = [float(((weight - s.mean[s.block_of]) ** 2).mean()) for s in (sampler, scattered)]
    assert spread[0] < 0.5 * spread[1]


def test_a_group_is_looked_into_for_its_outlier(monkeypatch):
    """One class outweighs all others for a query; its group's mean and spread alone would not show it."""
    monkeypatch.setattr(blocks, "MIN_GROUP", 4)
    monkeypatch.setattr(blocks, "LOOK_INTO", {"batch": 2, "example": 2})
    n, d = 2048, 16
    weight = 0.1 * torch.randn(n, d, generator=torch.Generator().manual_seed(0))
    weight[:256] += 0.5  # four groups that have a larger mean
    weight[700] = 2.5
    sampler = Blocks(n, d, 8, scope="example")
    sampler._deal(torch.arange(n))  # not among the outliers of others
    everything = torch.arange(sampler.blocks)
    sampler._summarise(weight, None, everything, 4)
    sampler._summarise_groups(weight, None, everything)
    assert sampler.groups == 32
    query = 0.25 * torch.ones(1, d)  # the logit of class 700 is 10, of the others 2 or about 0
    share = float((weight[700] @ query[0]).exp() / (weight @ query[0]).exp().sum())
    assert share > 0.8
    found = float(sampler.log_prob(query, torch.tensor([[700]])).exp())
    assert found > 0.2
    sampler.group_outlier.zero_()
    assert float(sampler.log_prob(query, torch.tensor([[700]])).exp()) < 0.1 * found


def test_outliers_are_certain_in_a_pool(backend):
    """A class far from all others is in the first block, and the first of every eight blocks is always drawn."""
    weight = weights(512, 4)
    outliers = torch.tensor([3, 77, 300])
    weight[outliers] = 9 * torch.nn.functional.normalize(torch.randn(3, 4, generator=torch.Generator().manual_seed(5)))
    sampler = Blocks(512, 4, 8)
    sampler.update(weight)
    assert (sampler.block_of[outliers] == 0).all()
    distance = (weight - weight.mean(0)).norm(dim=1)
    assert distance[sampler.block_of == 0].min() >= distance[sampler.block_of > 0].max()
    assert distance[sampler.block_of == 1].min() >= distance[sampler.block_of > 1].max()
    query = torch.full((3, 4), 0.01)  # all masses are nearly equal: by its own the first block would come rarely
    assert sampler._pooled_mass(query)[0] < 0.05
    for seed in range(20):
        draw = sampler.draw(query, 64, generator=torch.Generator().manual_seed(seed))
        counts = dict(zip(draw.ids[0].tolist(), draw.log_count[0].tolist(), strict=True))
        assert all(counts[outlier] == 0 for outlier in outliers.tolist())
    each = Blocks(512, 4, 8, scope="example")
    each.update(weight)
    assert not torch.equal(each.order, sampler.order)


@pytest.mark.parametrize("n", [1, 2, 3, 31, 32, 33, 64, 1000, 1021])
def test_partition_is_balanced(n, backend):
    sampler = Blocks(n, 3, 8)
    sampler.update(weights(n, 3))
    sizes = sampler.block_of.bincount(minlength=sampler.blocks)
    assert int(sizes.max() - sizes.min()) <= 1
    assert int(sizes.max()) == sampler.block_size
    assert torch.equal(sampler.order.sort().values, torch.arange(n))
    classes, inside = sampler._members(torch.arange(sampler.blocks))
    assert torch.equal(classes[inside].sort().values, torch.arange(n))
    draw = sampler.draw(torch.ones(2, 3), sampler.blocks * sampler.block_size)
    assert torch.equal(draw.ids[0][draw.log_count[0] < math.inf].sort().values, torch.arange(n))
    assert draw.log_count[0][draw.log_count[0] < math.inf].abs().max() < 1e-5  # all blocks: certain, with weight 1


def test_update_of_rows_follows_means_and_rebuild_follows_all():
    weight = weights(61, 4)
    sampler = Blocks(61, 4, 8)
    sampler.update(weight)
    weight[5] += 3
    old = sampler.mean.clone()
    sampler.update(weight, torch.tensor([5, 5]))
    changed = (sampler.mean != old).any(1).nonzero().flatten().tolist()
    assert changed == [int(sampler.block_of[5])]
    order = sampler.order.clone()
    for step in range(2, blocks.REBUILD + 1):
        weight = weights(61, 4, seed=9)
        sampler.update(weight, torch.tensor([0]))
        assert torch.equal(sampler.order, order) == (step < blocks.REBUILD)
    fresh = Blocks(61, 4, 8)
    fresh.update(weight)
    assert torch.equal(sampler.order, fresh.order)
    torch.testing.assert_close(sampler.mean, fresh.mean)


@pytest.mark.parametrize("scope", SCOPES)
def test_state_and_shapes(scope):
    sampler, (query, target) = sampler_of(scope=scope), batch(6, 61, 4)
    loaded = Blocks(61, 4, 8, scope=scope)
    loaded.load_state_dict(sampler.state_dict())
    for other in (loaded, pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)):
        draws = [
            s.draw(query, 16, exclude=target, generator=torch.Generator().manual_seed(4)) for s in (sampler, other)
        ]
        assert torch.equal(draws[0].ids, draws[1].ids)
        assert torch.equal(draws[0].log_count, draws[1].log_count)
    shaped = sampler.draw(
        query.view(2, 3, 4), 16, exclude=target.view(2, 3), generator=torch.Generator().manual_seed(4)
    )
    assert shaped.ids.shape == (2, 3, 16)
    assert torch.equal(shaped.ids.reshape(6, -1), draws[0].ids)
    assert sampler.draw(query[:0], 16, exclude=target[:0]).ids.shape == (0, 16)
    assert sampler.draw(query[0], 16, exclude=target[0]).ids.shape == (16,)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("prediction", ["softmax", "absolute"])
def test_in_the_layer(scope, sparse, bias, prediction):
    torch.manual_seed(0)
    head = SampledSoftmax(4, 61, "blocks", 1000, scope=scope, sparse=sparse, bias=bias, prediction=prediction)
    (query, target), expected = batch(6, 61, 4), copy.deepcopy(head).eval()
    query.requires_grad_()
    # All blocks are drawn: the sampled loss is the full one, and so are its gradients.
    loss = head(query, target)
    full = expected(query, target)
    torch.testing.assert_close(loss, full)
    parameters = [query, *head.parameters()], [query, *expected.parameters()]
    grads = torch.autograd.grad(loss, parameters[0]), torch.autograd.grad(full, parameters[1])
    for grad, other in zip(*grads, strict=True):
        torch.testing.assert_close(grad.to_dense(), other, rtol=1e-4, atol=1e-6)
    assert grads[0][1].is_sparse == sparse


@pytest.mark.parametrize("scope", SCOPES)
def test_tied_weights(scope):
    """Gradients of the input and the output side add up; all blocks drawn: those of the full softmax."""
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(61, 4, sparse=True)
    head = SampledSoftmax(4, 61, "blocks", 1000, scope=scope, embedding=embedding)
    target = batch(6, 61, 4)[1]
    losses = [head.train(training)(embedding(target.flip(0)), target) for training in (True, False)]
    torch.testing.assert_close(*losses)
    sampled, full = (torch.autograd.grad(loss, embedding.weight)[0].to_dense() for loss in losses)
    torch.testing.assert_close(sampled, full, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scope", SCOPES)
def test_training_with_blocks_comes_close_to_the_full_softmax(scope):
    """Learn to name 300 clusters; a few blocks per step end near the loss of training on all classes."""
    torch.manual_seed(0)
    n, d = 300, 8
    truth = 3 * torch.nn.functional.normalize(torch.randn(n, d), dim=1)
    losses = {}
    for name in ("blocks", "all"):
        torch.manual_seed(1)
        options = {"scope": scope, "block_size": 8} if name == "blocks" else {}
        sampler = "blocks" if name == "blocks" else "uniform"
        head = SampledSoftmax(d, n, sampler, 64 if scope == "batch" else 16, **options).train(name != "all")
        optimizer = torch.optim.Adagrad(head.parameters(), lr=0.5)
        for _ in range(300):
            target = torch.randint(n, (64,))
            optimizer.zero_grad()
            head(truth[target] + 0.3 * torch.randn(64, d), target).backward()
            optimizer.step()
        target = torch.arange(n).repeat(5)
        torch.manual_seed(2)
        losses[name] = float(head.eval()(truth[target] + 0.3 * torch.randn(5 * n, d), target).detach())
    assert losses["all"] < 2.5 < math.log(n)
    assert losses["blocks"] < 1.25 * losses["all"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Blocks(0, 4), "num_classes must be at least 1, got 0"),
        (lambda: Blocks(9, 4, 0), "block_size must be at least 1, got 0"),
        (lambda: Blocks(9, 4, rank=-1), "rank must be at least 0, got -1"),
        (lambda: Blocks(9, 4, scope="x"), "scope must be one of 'example', 'batch', got 'x'"),
        (lambda: Blocks(9, 4, ending="x"), "ending must be one of 'block', 'class', got 'x'"),
        (lambda: Blocks(9, 4, ending="class"), "ending='class' needs scope='example'"),
        (lambda: Blocks(9, 4, prediction="x"), "prediction must be one of"),
        (lambda: Blocks(9, 4).update(torch.ones(9, 3)), r"weight must have shape \(9, 4\), got \(9, 3\)"),
        (lambda: Blocks(9, 4).update(torch.ones(9, 4), bias=torch.ones(9)), "bias must be None"),
        (lambda: sampler_of().draw(torch.ones(2, 4), 0), "num_samples must be at least 1, got 0"),
        (lambda: sampler_of().draw(torch.ones(2, 3), 8), r"query must have shape \(\*batch, 4\)"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_weights_that_are_not_finite_are_refused():
    sampler, weight = Blocks(61, 4, 8, rank=0), weights(61, 4)
    weight[3, 1] = math.nan
    sampler.update(weight)
    with pytest.raises(ValueError, match="class weights must be finite"):
        sampler.draw(torch.ones(2, 4), 8)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 4, 9])
def test_native_summaries_equal_the_reference(rank, bias):
    n, d = 203, 9
    weight, offsets = weights(n, d), torch.randn(n, generator=torch.Generator().manual_seed(0)) if bias else None
    native = Blocks(n, d, 6, rank, bias=bias)
    native._deal(torch.randperm(n, generator=torch.Generator().manual_seed(1)))
    reference = copy.deepcopy(native)
    for step in range(2):  # the second starts from the directions of the first, for some of the blocks
        picked = torch.arange(native.blocks)[:: step + 1]
        native._summarise(weight * (step + 1), offsets, picked, 3)
        reference._summarise_reference(weight * (step + 1), offsets, picked, 3)
        torch.testing.assert_close(native.mean, reference.mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(native.spread, reference.spread, rtol=1e-3, atol=1e-4)
        assert torch.equal(native.farthest, reference.farthest)
        torch.testing.assert_close(native.reach, reference.reach)
        forms = [s.directions.mT @ s.directions for s in (native, reference)]
        torch.testing.assert_close(forms[0], forms[1], rtol=1e-2, atol=2e-3)


def test_groups_have_the_moments_of_their_classes(groups):
    weight = weights(64, 5)
    sampler = Blocks(64, 5, 8, rank=1)
    sampler.update(weight)
    assert sampler.groups == groups
    weight[3] += 1
    sampler.update(weight, torch.tensor([3]))
    for group in range(groups):
        members = weight[sampler.block_of // sampler.group == group]
        torch.testing.assert_close(sampler.group_mean[group], members.mean(0), rtol=1e-4, atol=1e-5)
        longest = members[members.square().sum(1).argmax()]
        assert torch.equal(sampler.group_outlier[group], longest)
        variance = members.var(0, unbiased=False).mean()
        torch.testing.assert_close(sampler.group_spread[group], variance, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prediction", ["softmax", "absolute"])
@pytest.mark.parametrize("rank", [0, 3])
def test_native_masses_equal_the_reference(rank, prediction, monkeypatch):
    monkeypatch.setattr(blocks, "MIN_GROUP", 4)
    sampler, query = sampler_of(n=1021, d=7, rank=rank, prediction=prediction), batch(5, 1021, 7)[0]
    best = torch.randint(sampler.groups, (5, 3), generator=torch.Generator().manual_seed(0))
    native = sampler._look_into(query, best)
    mass = sampler._mass(query)
    monkeypatch.setattr(ops, "_NATIVE", False)
    torch.testing.assert_close(native, sampler._look_into(query, best), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mass, sampler._mass(query), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(mass.sum(-1), torch.ones(5))


def test_opcheck():
    sampler = Blocks(50, 4, 8)
    masses = (torch.randn(3, 4), torch.zeros(3, 1, dtype=torch.long), *sampler._summaries(), 4, False)
    torch.library.opcheck(torch.ops.manyclass.block_masses.default, masses)
    with pytest.raises(RuntimeError, match=r"groups must be in \[0, 1\)"):
        torch.ops.manyclass.block_masses(masses[0], masses[1] + 1, *masses[2:5], 8, False)
    summaries = (sampler.mean, sampler.directions, sampler.spread, sampler.farthest, sampler.reach)
    arguments = (*summaries, weights(50, 4), torch.empty(0), sampler.order)
    torch.library.opcheck(torch.ops.manyclass.summarise_.default, (*arguments, torch.tensor([0, 3]), 2))
    with pytest.raises(RuntimeError, match="blocks out of range"):
        torch.ops.manyclass.summarise_(*arguments, torch.tensor([8]), 2)
    torch.library.opcheck(torch.ops.manyclass.bisect.default, (weights(50, 4), 3, True))
    with pytest.raises(RuntimeError, match="levels must leave a class for each block"):
        torch.ops.manyclass.bisect(weights(50, 4), 6, False)


def test_by_name():
    head = SampledSoftmax(4, 500, "blocks", 64, block_size=16, rank=2, scope="example", prediction="absolute")
    assert isinstance(head.sampler, samplers.Blocks)
    assert head.sampler.prediction == "absolute"
    assert "× the class weights" in repr(head)
