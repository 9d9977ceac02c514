"""The estimated bias against the true one, and the layer that adapts its sample to a wanted bias."""

import math

import pytest
import torch

from manyclass import SampledSoftmax, kernels, samplers
from manyclass.diagnostics import estimate

CLASSES, FEATURES, EXAMPLES = 512, 8, 64


def problem():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(20, FEATURES, generator=generator)
    weight = centres[torch.randint(20, (CLASSES,), generator=generator)]
    weight = weight + 0.5 * torch.randn(CLASSES, FEATURES, generator=generator)
    query = torch.randn(EXAMPLES, FEATURES, generator=generator)
    return weight, query, torch.randint(CLASSES, (EXAMPLES,), generator=generator)


def measured(sampler, num_samples, repeats=400):
    """The mean error of the log-partition, its standard error, and the mean of the estimates of it."""
    weight, query, target = problem()
    sampler.update(weight)
    logits = query @ weight.T
    exact, positive = logits.logsumexp(-1), logits.gather(1, target[:, None]).squeeze(1)
    generator, errors, estimates = torch.Generator().manual_seed(1), [], []
    for _ in range(repeats):
        draw = sampler.draw(query, num_samples, exclude=target, generator=generator)
        negative = logits.gather(1, draw.ids)
        log_z = torch.logaddexp(positive, (negative - draw.log_count).logsumexp(-1))
        errors.append((log_z - exact).mean())
        estimates.append(estimate(positive, negative, draw.log_count, sampler.unit, sampler.distinct).bias.mean())
    error = torch.stack(errors)
    return float(error.mean()), float(error.std() / math.sqrt(repeats)), float(torch.stack(estimates).mean())


SAMPLERS = {
    "quadratic": (lambda: samplers.Kernel(kernels.Quadratic()), 96),
    "quadratic leaves": (lambda: samplers.KernelTree(kernels.Quadratic(), CLASSES, FEATURES, 8, ending="leaf"), 64),
    "uniform": (lambda: samplers.Uniform(CLASSES), 2000),
    "uniform pool": (lambda: samplers.Uniform(CLASSES, scope="batch"), 2000),
    "blocks, 4 each": (lambda: samplers.Blocks(CLASSES, FEATURES, 8, scope="example"), 32),
    "blocks, 8 each": (lambda: samplers.Blocks(CLASSES, FEATURES, 8, scope="example"), 64),
    "blocks, pool of 32": (lambda: samplers.Blocks(CLASSES, FEATURES, 8), 256),
}


@pytest.mark.parametrize(("make", "num_samples"), SAMPLERS.values(), ids=SAMPLERS.keys())
def test_the_estimated_bias_is_the_true_one(make, num_samples):
    true, error, estimated = measured(make(), num_samples)
    assert -0.05 < true < -0.002  # where people train
    assert abs(estimated - true) < 0.2 * abs(true) + 3 * error


def test_the_comparison_can_fail():
    """Draws without replacement that are taken for draws with it miss the truth."""
    sampler = SAMPLERS["blocks, 8 each"][0]()
    sampler.distinct = False
    true, error, estimated = measured(sampler, 64)
    assert abs(estimated - true) > 2 * abs(true) + 3 * error


def test_too_few_draws_are_not_said_to_be_good():
    true, _, estimated = measured(samplers.Uniform(CLASSES), 16)
    assert true < -0.5
    assert estimated < -0.1


def test_softmax_draws_have_no_bias_and_all_blocks_neither():
    weight, query, target = problem()
    for sampler, num_samples in ((samplers.Softmax(), 16), (samplers.Blocks(CLASSES, FEATURES, 8), CLASSES)):
        sampler.update(weight)
        draw = sampler.draw(query, num_samples, exclude=target)
        logits = query @ weight.T
        positive, negative = logits.gather(1, target[:, None]).squeeze(1), logits.gather(1, draw.ids)
        found = estimate(positive, negative, draw.log_count, sampler.unit, sampler.distinct)
        assert found.bias.abs().max() < 1e-6
        assert found.chi_square.abs().max() < 1e-4
        torch.testing.assert_close(found.effective_samples, torch.full_like(found.bias, draw.ids.shape[1]))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sampler", ["blocks", "uniform"])
@pytest.mark.parametrize("prediction", ["softmax", "absolute"])
def test_diagnostics_of_a_step(sampler, prediction, bias):
    weight, query, target = problem()
    head = SampledSoftmax(FEATURES, CLASSES, sampler, 128, prediction=prediction, bias=bias)
    with torch.no_grad():
        head.weight.copy_(weight)
    with pytest.raises(ValueError, match="diagnostics need a training step"):
        head.diagnostics()
    for _ in range(3):
        loss = head(query, target, generator=torch.Generator().manual_seed(0))
        loss.backward()
    found = head.diagnostics()
    assert found.num_samples == 128
    assert 0 < found.sampling_share < 1
    assert found.stale_steps == 0
    assert found.chi_square > 0
    assert 1 <= found.effective_samples < 128
    exact = head.eval()(query, target)
    assert -1 < found.bias < 0
    assert abs(float(loss.detach() - exact.detach()) - found.bias) < 0.5


def test_stale_steps_are_those_without_a_refresh():
    _, query, target = problem()
    head = SampledSoftmax(FEATURES, CLASSES, "blocks", 64, sparse=False)
    stale = []
    for _ in range(7):
        head(query, target)
        stale.append(head.diagnostics().stale_steps)
    assert stale == [0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize(("sampler", "target_bias"), [("blocks", 0.02), ("blocks", 0.002), ("uniform", 0.05)])
def test_the_layer_reaches_a_target_bias(sampler, target_bias):
    weight, query, target = problem()
    torch.manual_seed(0)
    head = SampledSoftmax(FEATURES, CLASSES, sampler, target_bias=target_bias)
    with torch.no_grad():
        head.weight.copy_(weight)
    errors, exact = [], head.eval()(query, target).detach()
    head.train()
    for step in range(400):
        loss = head(query, target).detach()
        if step >= 50:
            errors.append(loss - exact)
    bias = float(torch.stack(errors).mean())
    assert -2.5 * target_bias < bias < -0.25 * target_bias
    assert head.num_samples != 64 * head.sampler.unit
    other = SampledSoftmax(FEATURES, CLASSES, sampler, target_bias=target_bias)
    other.load_state_dict(head.state_dict())
    assert other.num_samples == head.num_samples


def test_defaults():
    head = SampledSoftmax(FEATURES, 4 * CLASSES)
    assert isinstance(head.sampler, samplers.Blocks)
    assert (head.sampler.scope, head.num_samples) == ("batch", 4096)
    assert SampledSoftmax(FEATURES, CLASSES, "uniform").num_samples == 64


def test_the_number_of_samples_stays_in_its_bounds():
    _, query, target = problem()
    for sampler, target_bias, expected in (("uniform", 1e-9, CLASSES), ("softmax", 0.1, 8), ("blocks", 9.0, 8 * 16)):
        head = SampledSoftmax(FEATURES, CLASSES, sampler, target_bias=target_bias)
        for _ in range(12):
            head(query, target)
        assert head.num_samples == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 5, "target_bias": 0.1}, "give num_samples=5 or target_bias=0.1, not both"),
        ({"target_bias": 0.0}, "target_bias must be positive, in nats, got 0.0"),
        ({"target_bias": math.nan}, "target_bias must be positive"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SampledSoftmax(4, 50, "uniform", **arguments)
