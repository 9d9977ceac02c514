"""The measured bias against the truth, and the layer that adapts its sample to a tolerated bias."""

import copy
import math

import pytest
import torch

from manyclass import SampledSoftmax, budget, diagnostics, kernels, samplers
from manyclass.diagnostics import steady_bias

CLASSES, FEATURES, EXAMPLES = 512, 8, 64


def problem():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(20, FEATURES, generator=generator)
    weight = centres[torch.randint(20, (CLASSES,), generator=generator)]
    weight = weight + 0.5 * torch.randn(CLASSES, FEATURES, generator=generator)
    query = torch.randn(EXAMPLES, FEATURES, generator=generator)
    return weight, query, torch.randint(CLASSES, (EXAMPLES,), generator=generator)


def layer(sampler, num_samples=None, **options):
    weight, *_ = problem()
    torch.manual_seed(0)
    found = SampledSoftmax(FEATURES, CLASSES, sampler, num_samples, **options)
    with torch.no_grad():
        found.weight.copy_(weight)
    return found


SAMPLERS = {
    "quadratic": (lambda: samplers.Kernel(kernels.Quadratic()), 16, {}),
    "quadratic leaves": (lambda: samplers.KernelTree(kernels.Quadratic(), CLASSES, FEATURES, 8, ending="leaf"), 64, {}),
    "uniform": (lambda: "uniform", 64, {}),
    "uniform pool": (lambda: "uniform", 64, {"scope": "batch"}),
    "blocks": (lambda: "blocks", 32, {"own": 4, "probe": 4}),
}


@pytest.mark.parametrize("prediction", ["softmax", "absolute"])
@pytest.mark.parametrize(("make", "number", "options"), SAMPLERS.values(), ids=SAMPLERS.keys())
def test_the_measured_bias_is_the_true_one(make, number, options, prediction):
    """Over all examples and many draws; the measurement sees the truth because it computes it."""
    found = layer(make(), number, prediction=prediction, reduction="none", **options)
    _, query, target = problem()
    exact = found.eval()(query, target).detach()
    found.train()
    with torch.no_grad():
        losses = torch.stack([found(query, target) for _ in range(400)])
    true = float((losses - exact).mean())
    error = float((losses - exact).square().mean().sqrt())
    measured = []
    for step in range(12):
        found.step = step  # what it draws depends on the step alone
        measured.append(found.diagnostics(EXAMPLES))
    assert sum(one.bias for one in measured) / 12 == pytest.approx(true, abs=0.2 * abs(true) + 0.01)
    assert sum(one.error for one in measured) / 12 == pytest.approx(error, rel=0.2)
    assert all(one.bias_error > 0 for one in measured)


def test_what_is_never_drawn_is_seen():
    """One class holds nearly all mass and is hardly ever drawn: an estimate from the draw alone would be near 0."""
    found = layer("uniform", 4, scope="batch")
    _, query, _ = problem()
    with torch.no_grad():
        found.weight[7] = 0
        query[:, 0], found.weight[7, 0] = 1.0, 12.0
    found(query, torch.zeros(EXAMPLES, dtype=torch.long))
    assert found.diagnostics().bias < -3


def test_exact_sampling_has_no_bias_and_exact_gradients():
    for sampler, number in (("blocks", CLASSES), ("softmax", 16)):
        found = layer(sampler, number)
        found(*problem()[1:])
        measured = found.diagnostics()
        assert abs(measured.bias) < 1e-5
        assert measured.error < 1e-5
        assert sampler == "softmax" or measured.gradient_error < 1e-4


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sampler", ["blocks", "uniform"])
def test_diagnostics_change_nothing(sampler, bias):
    _, query, target = problem()
    plain, asked = (layer(sampler, 64, bias=bias) for _ in range(2))
    with pytest.raises(ValueError, match="diagnostics need a training step"):
        asked.diagnostics()
    for step in range(12):
        losses = [h(query, target, generator=torch.Generator().manual_seed(step)) for h in (plain, asked)]
        assert torch.equal(*losses)
        state = torch.get_rng_state()
        found = asked.diagnostics()
        assert torch.equal(torch.get_rng_state(), state)
    assert (found.own, found.pool) == ((32, 64) if sampler == "blocks" else (64, 0))
    assert 0 < found.sampling_share < 1
    assert found.gradient_error > 0
    for name, value in plain.state_dict().items():
        assert name.endswith("_extra_state") or torch.equal(value, asked.state_dict()[name])
    with pytest.raises(ValueError, match="examples must be at least 1, got 0"):
        asked.diagnostics(0)


def new_step(layer, query, target):
    """A training step on weights that count as changed."""
    with torch.no_grad():
        layer.weight.mul_(1.0)
    return layer(query, target)


def test_stale_steps_of_a_tree_without_sparse_gradients():
    _, query, target = problem()
    sampler = samplers.KernelTree(kernels.Quadratic(), CLASSES, FEATURES)
    found, stale = SampledSoftmax(FEATURES, CLASSES, sampler, 64, sparse=False), []
    optimizer = torch.optim.SGD(found.parameters(), lr=0.1)
    for _ in range(7):
        found(query, target).backward()
        optimizer.step()
        stale.append(found.diagnostics().stale_steps)
    assert stale == [0, 1, 2, 3, 4, 0, 1]
    for _ in range(9):  # nothing changes, so nothing grows stale
        found(query, target)
    assert found.diagnostics().stale_steps == 2


@pytest.mark.parametrize(("sampler", "tolerance"), [("blocks", 0.02), ("blocks", 0.002), ("uniform", 0.05)])
def test_the_layer_keeps_within_its_tolerance(sampler, tolerance, monkeypatch):
    monkeypatch.setattr(budget, "MEASURING", 1.0)  # so small a problem would hardly ever be measured
    _, query, target = problem()
    found = layer(sampler, tolerance=tolerance)
    errors, exact = [], found.eval()(query, target).detach()
    found.train()
    for step in range(400):
        loss = new_step(found, query, target).detach()
        if step >= 100:
            errors.append(loss - exact)
    bias = float(torch.stack(errors).mean())
    assert -2 * tolerance < bias < 0.25 * tolerance
    assert found.num_samples < CLASSES
    if sampler == "blocks":
        assert found.sampler.own == max(1, round(32 / 4096 * found.num_samples))
    other = SampledSoftmax(FEATURES, CLASSES, sampler, tolerance=tolerance)
    other.load_state_dict(found.state_dict())
    assert other.num_samples == found.num_samples
    assert getattr(other.sampler, "own", 0) == getattr(found.sampler, "own", 0)


def test_measuring_takes_a_small_part_of_the_work(monkeypatch):
    """Multiplications of the exact losses against those of the sampled ones, over many steps."""
    _, query, target = problem()
    found, measured = layer("uniform", tolerance=0.05), []
    measure = found._measure
    monkeypatch.setattr(found, "_measure", lambda *a: (measured.append(found.num_samples), measure(*a))[1])
    work = 0
    for _ in range(600):
        new_step(found, query, target)
        work += EXAMPLES * found.num_samples * 3
    assert len(measured) > 6
    assert (len(measured) - 4) * 3 * diagnostics.MEASURED * CLASSES < 1.5 * budget.MEASURING * work


def test_the_steady_bias_is_the_mean():
    """Of lognormal ratios with the mean 1, small and large; with far less noise for small ones."""
    generator = torch.Generator().manual_seed(0)
    for sigma in (0.02, 0.2, 1.0):
        difference = sigma * torch.randn(4_000_000, generator=generator, dtype=torch.float64) - sigma**2 / 2
        assert steady_bias(difference) == pytest.approx(-(sigma**2) / 2, rel=0.02)
    few = 0.02 * torch.randn(200, 32, generator=generator) - 0.0002
    assert torch.tensor([steady_bias(row) for row in few]).std() < 0.05 * few.mean(dim=1).std()
    assert math.isnan(steady_bias(torch.tensor([math.nan, 0.0])))


def test_a_batch_that_tells_nothing_changes_nothing():
    """Half of all targets in one class: some draws are empty. Their NaN must not double the samples for ever."""
    counts = torch.ones(20_000)
    torch.manual_seed(0)
    found = SampledSoftmax(8, 20_000, "unigram", counts=counts, scope="batch", tolerance=0.5)
    for step in range(40):
        target = torch.where(torch.rand(32) < 0.5, 3, torch.randint(20_000, (32,)))
        loss = new_step(found, torch.randn(32, 8), target)
        assert torch.isfinite(loss)
        if step == 5:
            before = found.num_samples
            found._measure = lambda *a: diagnostics.Measured(torch.full((2, 4), math.nan), torch.zeros(2, 4))
    assert found.num_samples == before <= 512


def test_defaults():
    found = SampledSoftmax(FEATURES, 4 * CLASSES)
    assert isinstance(found.sampler, samplers.Blocks)
    assert (found.sampler.own, found.sampler.probe, found.num_samples) == (32, 96, 4096)
    assert SampledSoftmax(FEATURES, CLASSES, "uniform").num_samples == 64
    assert SampledSoftmax(FEATURES, CLASSES, "uniform", scope="batch").num_samples == 4096


def test_the_number_of_samples_stays_in_its_bounds(monkeypatch):
    monkeypatch.setattr(budget, "MEASURING", 1e9)
    _, query, target = problem()
    for sampler, tolerance, expected in (("uniform", 1e-9, CLASSES), ("softmax", 0.1, 16), ("blocks", 9.0, 16)):
        found = SampledSoftmax(FEATURES, CLASSES, sampler, tolerance=tolerance)
        for _ in range(12):
            new_step(found, query, target)
        assert found.num_samples == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 5, "tolerance": 0.1}, "give num_samples=5 or tolerance=0.1, not both"),
        ({"tolerance": 0.0}, "tolerance must be positive, in nats, got 0.0"),
        ({"tolerance": math.nan}, "tolerance must be finite, got nan"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SampledSoftmax(4, 50, "uniform", **arguments)


def test_copies_have_their_own_measurements():
    _, query, target = problem()
    found = layer("blocks", 64)
    found(query, target)
    other = copy.deepcopy(found)
    with torch.no_grad():
        other.weight.mul_(3)
    assert abs(other.diagnostics().error) != abs(found.diagnostics().error)


def test_a_batch_of_one_example_has_an_error(recwarn):
    """One example shows no spread over examples: its error is that of the draws, not NaN."""
    sampled, (_, query, target) = layer("uniform", 8), problem()
    sampled(query[:1], target[:1])
    assert 0 < sampled.diagnostics().bias_error < math.inf
