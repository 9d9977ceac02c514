"""In-batch and mixed negatives, the streaming frequency, and several targets of one example."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from manyclass import ArcFace, Cosine, FullSoftmax, SampledSoftmax, functional, samplers
from manyclass.samplers.in_batch import StreamingFrequency

N, D = 40, 5
SAMPLERS = {
    "blocks": {"own": 4, "probe": 2},
    "uniform": {},
    "unigram": {"counts": torch.arange(N) + 1, "scope": "batch"},
    "quadratic": {},
    "softmax": {},
    "in_batch": {"uniform": 9},
}


def fixed(seed=3):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("wrong", "uniform"), [(False, 0), (True, 0), (False, 1)])
def test_the_count_is_the_expected_one_by_enumeration(wrong, uniform):
    """All batches of three targets from q: the mean estimate for the first example is the sum over other classes."""
    n, size = 4, 3
    counts = torch.tensor([4, 3, 2, 1])
    q, outputs = counts.double() / counts.sum(), torch.tensor([0.3, -1.0, 2.0, 0.7], dtype=torch.float64)
    sampler = samplers.create("in_batch", n, D, counts=counts, uniform=uniform)
    query = torch.zeros(size, D, dtype=torch.float64)
    mean = torch.zeros((), dtype=torch.float64)
    for others in itertools.product(range(n), repeat=size - 1):
        target = torch.tensor([1, *others])
        sampler.begin(target)
        parts = []
        for seed in range(200 if uniform else 1):
            draw = sampler.draw(query, 100, exclude=target, generator=fixed(seed))
            log_count = draw.pool_log_count + (math.log(size / (size - 1)) if wrong else 0)  # b·q, not (b − 1)·q
            terms = (outputs[draw.pool] - log_count).exp()
            parts.append((terms * ~draw.hidden_mask()[0]).sum())
        mean += q[list(others)].prod() * torch.stack(parts).mean()
    truth = outputs.exp().sum() - outputs[1].exp()
    assert torch.isclose(mean, truth, rtol=1e-9 if not uniform else 0.05) == (not wrong)


def test_a_part_of_a_large_batch_and_a_batch_of_one():
    sampler = samplers.create("in_batch", N, D, counts=torch.ones(N))
    target = torch.arange(30)
    sampler.begin(target)
    assert sampler.numbers(8) == (0, 8)
    draws = torch.stack([sampler.draw(torch.zeros(1, D), 8, generator=fixed(seed)).pool for seed in range(300)])
    assert all(len(pool.unique()) == 8 for pool in draws)
    counts = draws.flatten().bincount(minlength=30)[:30].double()
    assert ((counts - 80).square() / 80).sum() < 70  # chi-square, 29 degrees of freedom
    log_count = sampler.draw(torch.zeros(1, D), 8).pool_log_count
    torch.testing.assert_close(log_count, torch.full((8,), 8 * 29 / 30 / N).log())
    head = SampledSoftmax(D, N, "in_batch")
    query = torch.randn(1, D, requires_grad=True)
    loss = head(query, torch.tensor([3]))  # nothing to compare with
    loss.backward()
    assert float(loss.detach()) == 0
    assert float(query.grad.abs().sum()) == 0


def test_the_streaming_frequency_finds_the_frequencies():
    generator = fixed()
    q = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.015, 0.005], dtype=torch.float64)
    stream = StreamingFrequency(len(q) + 1)
    means = []
    for step in range(3000):
        stream.update(torch.multinomial(q, 16, replacement=True, generator=generator))
        if step >= 1000:
            means.append(torch.stack([stream.number, stream.interval]))
    number, interval = torch.stack(means).mean(dim=0)[:, : len(q)].double()
    torch.testing.assert_close(number / interval, q, rtol=0.1, atol=0)
    assert float(stream.probability(torch.tensor(len(q)))) == 0
    for _ in range(1500):  # the other way round
        stream.update(torch.multinomial(q.flip(0), 16, replacement=True, generator=generator))
    found = stream.probability(torch.arange(len(q)))
    assert 0.3 < found[-1] < 0.7
    assert found[0] < 0.03


def test_the_layer_trains_with_counts_or_a_stream_and_resumes():
    counts = torch.arange(N) + 1

    def train(head, seed, steps=6):
        optimizer, losses = torch.optim.SGD(head.parameters(), lr=0.1), []
        for step in range(steps):
            generator = fixed(seed + step)
            query = torch.randn(16, D, generator=generator)
            target = torch.multinomial(counts.double(), 16, replacement=True, generator=generator)
            loss = head(query, target, generator=generator)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    for options in ({"counts": counts}, {}, {"uniform": 20}):
        head, other = (SampledSoftmax(D, N, "in_batch", **options) for _ in range(2))
        train(head, 0)
        other.load_state_dict(head.state_dict())
        assert train(head, 10) == train(other, 10)
        found = head.diagnostics()
        assert found.pool == 16 + options.get("uniform", 0)
        assert math.isfinite(found.bias)
    assert abs(found.bias) < 0.5


def test_mixed_negatives_are_nearly_unbiased_where_targets_follow_the_counts():
    counts = torch.arange(N) + 1
    head = SampledSoftmax(D, N, "in_batch", counts=counts, uniform=2000, reduction="none")
    query, target = torch.randn(64, D), torch.multinomial(counts.double(), 64, replacement=True, generator=fixed())
    losses = head(query, target, generator=fixed())
    exact = functional.full_softmax_loss(query, head.weight, target, reduction="none")
    assert (losses - exact).abs().mean() < 0.1


def labels(size=9, k=3, seed=0):
    """Distinct labels of each example, padded anywhere; one example has none."""
    generator = fixed(seed)
    chosen = torch.stack([torch.randperm(N, generator=generator)[:k] for _ in range(size)])
    chosen = chosen.masked_fill(torch.rand(size, k, generator=generator) < 0.3, -100)
    chosen[2] = -100
    return torch.randn(size, D, generator=generator, requires_grad=True), chosen


def losses_of(outputs, target, shift=lambda positive: positive):
    """From the definition: each label against all classes that are no label of its example."""
    found = torch.zeros(target.shape)
    for example, row in enumerate(target.tolist()):
        mine = [label for label in row if label >= 0]
        rest = [label for label in range(N) if label not in mine]
        for place, label in enumerate(row):
            if label >= 0:
                positive = shift(outputs[example, label])
                found[example, place] = torch.cat([positive[None], outputs[example, rest]]).logsumexp(0) - positive
    return found


@pytest.mark.parametrize("bias", [False, True])
def test_exact_losses_of_several_targets(bias):
    query, target = labels()
    head = SampledSoftmax(D, N, bias=bias, reduction="none").eval()
    outputs = F.linear(query, head.weight, head.bias)
    expected = losses_of(outputs, target)
    torch.testing.assert_close(head(query, target), expected)
    full = FullSoftmax(D, N, bias=bias)
    full.load_state_dict({name: value for name, value in head.state_dict().items() if "embedding" in name})
    for reduction, value in (("sum", expected.sum()), ("mean", expected.sum() / (target >= 0).sum())):
        head.reduction = full.reduction = reduction
        torch.testing.assert_close(head(query, target), value)
        torch.testing.assert_close(full(query, target), value)
    one = target[:, :1].clone()
    one[2] = 5
    head.reduction = "none"
    chosen = one.clamp(min=0).squeeze(1)
    torch.testing.assert_close(head(query, chosen.unsqueeze(1)).squeeze(1), head(query, chosen))


def test_gradcheck_of_several_targets():
    weight = torch.randn(7, D, dtype=torch.float64, requires_grad=True)
    query = torch.randn(2, D, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[0, 3, -1], [6, -1, -1]])
    assert torch.autograd.gradcheck(lambda q, w: functional.full_softmax_loss(q, w, target), (query, weight))


@pytest.mark.parametrize("source", ["table", "encoder", "margin"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_no_target_of_an_example_is_a_negative_for_it(name, source, backend):
    torch.manual_seed(0)
    options = {
        "table": {},
        "encoder": {"classes": torch.nn.Embedding(N, D)},
        "margin": {"cosine": Cosine(4, margin=ArcFace(0.3))},
    }[source]
    head = SampledSoftmax(D, N, name, 12, reduction="none", **options, **SAMPLERS[name])
    query, target = labels()
    losses = head(query, target, generator=fixed())
    kept = (target >= 0).any(dim=1)
    asked = query if source != "margin" else head.cosine(query)
    draw = head.sampler.draw(asked[kept].detach(), 12, generator=fixed())
    rows = head.weight if source != "table" else head.embedding.weight
    outputs = (asked[kept] @ rows.T).detach()
    slots = torch.cat([draw.ids, draw.pool.expand(len(outputs), -1)], dim=1)
    counts = torch.cat([draw.log_count, draw.pool_log_count.expand(len(outputs), -1)], dim=1)
    hidden = F.pad(draw.hidden_mask(), (draw.ids.shape[1], 0))
    corrected = (outputs.gather(1, slots) - counts).masked_fill(hidden, -math.inf)
    for example, row in enumerate(target[kept].tolist()):
        allowed = torch.tensor([slot not in row for slot in slots[example].tolist()])
        for place, label in enumerate(row):
            if label >= 0:
                positive = outputs[example, label]
                positive = positive if source != "margin" else head.cosine.shifted(positive)
                truth = torch.cat([positive[None], corrected[example][allowed]]).logsumexp(0) - positive
                torch.testing.assert_close(losses[kept][example, place], truth, rtol=1e-4, atol=1e-5)
    losses.sum().backward()
    assert torch.isfinite(query.grad).all()
    assert (losses[target < 0] == 0).all()


@pytest.mark.parametrize("source", ["table", "encoder"])
def test_several_targets_with_softmax_draws_have_nearly_the_full_loss_and_gradient(source):
    torch.manual_seed(0)
    classes = torch.nn.Embedding(N, D) if source == "encoder" else None
    head = SampledSoftmax(D, N, "softmax", 4000, classes=classes)
    query, target = labels()
    loss = head(query, target, generator=fixed())
    weight = head.embedding.weight if classes is None else classes.weight
    exact = functional.full_softmax_loss(query, weight, target.where(target >= 0, -1))
    torch.testing.assert_close(loss, exact, rtol=0.01, atol=0)
    for one, other in zip(*(torch.autograd.grad(value, [query, weight]) for value in (loss, exact)), strict=True):
        assert (one.to_dense() - other).norm() < 0.1 * other.norm()
    assert abs(head.diagnostics().bias) < 0.02


def test_shapes_of_several_targets():
    head = SampledSoftmax(D, N, "uniform", 7, reduction="none")
    for shape, k in (((), 2), ((4,), 0), ((0,), 3), ((2, 3), 2)):
        target = torch.randint(N, (*shape, k))
        for mode in (True, False):
            losses = head.train(mode)(torch.randn(*shape, D), target)
            assert losses.shape == target.shape
            assert (losses > 0).all()
    with pytest.raises(ValueError, match=r"target must have shape \(2,\) or \(2, k\), got \(3, 2\)"):
        head(torch.randn(2, D), torch.zeros(3, 2, dtype=torch.long))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: samplers.create("in_batch", N, D, uniform=-1), ValueError, "uniform must be at least 0, got -1"),
        (
            lambda: samplers.create("in_batch", N, D, counts=torch.ones(3)),
            ValueError,
            r"counts must have shape \(40,\)",
        ),
        (
            lambda: samplers.create("in_batch", N, D).draw(torch.zeros(1, D), 3),
            ValueError,
            r"call begin\(target\) first",
        ),
        (
            lambda: samplers.create("in_batch", N, D, part=samplers.Part(0, 20, N, 2)),
            ValueError,
            "InBatch cannot be sharded",
        ),
    ],
)
def test_wrong_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
