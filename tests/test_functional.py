"""The loss, and the paper's theorem about it."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from manyclass import FullSoftmax, chunks, functional, samplers

PREDICTIONS = ["softmax", "absolute"]


def problem(batch=6, n=11, d=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, d, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(n, d, dtype=torch.float64, generator=generator, requires_grad=True)
    bias = torch.randn(n, dtype=torch.float64, generator=generator, requires_grad=True)
    return query, weight, bias, torch.randint(n, (batch,), generator=generator)


def full_loss_by_hand(query, weight, bias, target, prediction, reduction="mean"):
    logits = F.linear(query, weight, bias)
    return F.cross_entropy(logits.abs() if prediction == "absolute" else logits, target, reduction=reduction)


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_classes_enumerated_is_the_full_softmax(prediction, reduction):
    query, weight, bias, target = problem()
    logits = F.linear(query, weight, bias)
    others = torch.stack([torch.tensor([c for c in range(11) if c != y]) for y in target.tolist()])
    positive, negative = logits.gather(1, target[:, None]).squeeze(1), logits.gather(1, others)
    loss = functional.sampled_softmax_loss(positive, negative, torch.zeros(6, 10), reduction, prediction=prediction)
    expected = full_loss_by_hand(query, weight, bias, target, prediction, reduction)
    torch.testing.assert_close(loss, expected)
    grads = torch.autograd.grad(loss.sum(), (query, weight, bias))
    torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), (query, weight, bias)))


@given(batch=st.integers(0, 4), m=st.integers(1, 6), scale=st.sampled_from([1e-3, 1.0, 1e4]), seed=st.integers(0, 99))
@settings(deadline=None, derandomize=True, max_examples=50)
def test_sampled_loss_is_equation_2_and_3(batch, m, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    positive = scale * torch.randn(batch, dtype=torch.float64, generator=generator)
    negative = scale * torch.randn(batch, m, dtype=torch.float64, generator=generator)
    log_count = torch.randn(batch, m, dtype=torch.float64, generator=generator)
    adjusted = torch.cat([positive[:, None], negative - log_count], 1)
    expected = -adjusted.log_softmax(1)[:, 0]
    torch.testing.assert_close(functional.sampled_softmax_loss(positive, negative, log_count, "none"), expected)


def test_empty_slots_contribute_nothing():
    positive, negative = torch.randn(3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    log_count = torch.randn(3, 4)
    log_count[:, 2:] = math.inf
    loss = functional.sampled_softmax_loss(positive, negative, log_count)
    torch.testing.assert_close(loss, functional.sampled_softmax_loss(positive, negative[:, :2], log_count[:, :2]))
    loss.backward()
    assert negative.grad is not None
    assert (negative.grad[:, 2:] == 0).all()
    assert (negative.grad[:, :2] > 0).all()
    empty = functional.sampled_softmax_loss(positive, negative, torch.full((3, 4), math.inf))
    assert empty == 0


def test_mean_of_nothing_is_zero():
    loss = functional.sampled_softmax_loss(torch.empty(0), torch.empty(0, 3), torch.empty(0, 3))
    assert loss == 0


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("max_logits", [1 << 24, 20, 1])
def test_full_softmax_in_chunks(prediction, with_bias, max_logits, monkeypatch):
    monkeypatch.setattr(chunks, "MAX_LOGITS", max_logits)
    monkeypatch.setattr(chunks, "MAX_QUERIES", 4)
    query, weight, bias, target = problem()
    offset = bias if with_bias else None
    inputs = (query, weight, bias) if with_bias else (query, weight)
    loss = functional.full_softmax_loss(query, weight, target, offset, prediction=prediction)
    expected = full_loss_by_hand(query, weight, offset, target, prediction)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs))
    log_prob = functional.log_prob(query, weight, offset, prediction=prediction)
    torch.testing.assert_close(log_prob.gather(1, target[:, None]).mean(), -expected)
    values, ids = functional.topk(query, weight, 5, offset, prediction=prediction)
    log_z = functional.log_partition(query, weight, offset, prediction=prediction)
    best = log_prob.topk(5)
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(values - log_z[:, None], best.values)
    torch.testing.assert_close(functional.best(query, weight, 5, offset, prediction), (values, ids, log_z))
    single = functional.best(query[0], weight, 5, offset, prediction)
    torch.testing.assert_close(single, (values[0], ids[0], log_z[0]))


def test_the_best_classes_and_their_probabilities_take_one_pass(monkeypatch):
    passes, linear = [], functional.linear
    monkeypatch.setattr(functional, "linear", lambda *tables: passes.append(tables) or linear(*tables))
    FullSoftmax(4, 30).topk(torch.randn(3, 4), 5)
    assert len(passes) == 1


def test_full_softmax_memory_is_bounded(monkeypatch):
    """No tensor of the computation, forward or backward, may hold more than MAX_LOGITS logits."""
    monkeypatch.setattr(chunks, "MAX_LOGITS", 1000)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape[-1:] != (2,):
                largest = max(largest, result.numel())
            return result

    query, weight = torch.randn(10, 2, requires_grad=True), torch.randn(5000, 2, requires_grad=True)
    with Watch():
        functional.full_softmax_loss(query, weight, torch.arange(10)).backward()
    assert 500 < largest <= 1000


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_gradcheck(prediction):
    query, weight, bias, target = problem(3, 5, 2)

    def full(query, weight, bias):
        return functional.full_softmax_loss(query, weight, target, bias, "none", prediction=prediction)

    fixed = torch.tensor([0.3, -1.0, 0.7, math.inf], dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda q, w: functional.sampled_softmax_loss(
            (q @ w.T)[:, 0], (q @ w.T)[:, 1:], fixed, "none", prediction=prediction
        ),
        (query, weight),
    )
    assert torch.autograd.gradcheck(full, (query, weight, bias))


# --- Theorem 2.1: the sampled gradient is unbiased if and only if q = p ----------------------------------------------


def gradient_error(sampler, prediction, m, examples=200_000, n=9):
    """Mean sampled gradient minus the full gradient, and its standard error, per logit of one problem."""
    weight = torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    query, target = torch.tensor([[1.2, -0.7]]), 4
    if sampler.adaptive:
        sampler.update(weight)
    logits = (query @ weight.T).double()
    per_example = logits.expand(examples, n).clone().requires_grad_()
    exclude = torch.full((examples,), target)
    draw = sampler.draw(query.expand(examples, -1), m, exclude=exclude, generator=torch.Generator().manual_seed(m))
    functional.sampled_softmax_loss(
        per_example[:, target], per_example.gather(1, draw.ids), draw.log_count, "sum", prediction=prediction
    ).backward()
    full = logits.clone().requires_grad_()
    outputs = full.abs() if prediction == "absolute" else full
    F.cross_entropy(outputs, torch.tensor([target])).backward()
    assert per_example.grad is not None
    assert full.grad is not None
    error = per_example.grad.mean(0) - full.grad[0]
    return error, per_example.grad.std(0) / math.sqrt(examples)


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("m", [1, 2, 8])
def test_softmax_sampling_is_unbiased(prediction, m):
    error, standard_error = gradient_error(samplers.Softmax(prediction), prediction, m)
    # 54 comparisons at 4.5 standard errors: a false alarm has probability 4e-4, and the seed is fixed. What does not
    # vary, the gradient of the positive (eq. 13 of the appendix), has to agree to rounding.
    assert (error.abs() <= 4.5 * standard_error + 1e-6).all()


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_uniform_sampling_is_biased_and_less_so_with_more_samples(prediction):
    sizes = {}
    for m in (1, 8, 64):
        error, standard_error = gradient_error(samplers.Uniform(9), prediction, m, examples=400_000 // m)
        sizes[m] = float(error.abs().max())
        if m < 64:
            assert (error.abs() > 8 * standard_error + 1e-6).any()
    assert sizes[1] > 2 * sizes[8] > 4 * sizes[64]


def test_the_wrong_prediction_is_biased():
    error, standard_error = gradient_error(samplers.Softmax("softmax"), "absolute", 2)
    assert (error.abs() > 8 * standard_error + 1e-6).any()
