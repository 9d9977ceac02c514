"""The native step against the PyTorch formula: values, gradients, determinism, bad input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyclass import functional, fused
from manyclass.samplers import Draw


def problem(batch, n, d, own, shared, bias, seed=0, dtype=torch.float32):
    """Queries, tables, targets (some of them elsewhere), and a draw whose pool holds classes twice and empty slots."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    query, weight = normal(batch, d).requires_grad_(), normal(n, d).requires_grad_()
    offsets = normal(n).requires_grad_() if bias else None
    target = torch.randint(-1 if seed % 2 else 0, n, (batch,), generator=generator)
    log_count, pool_log_count = normal(batch, own), normal(shared)
    log_count[torch.rand(batch, own, generator=generator) < 0.1] = math.inf
    hidden = (torch.rand(batch, shared, generator=generator) < 0.1).nonzero().T
    ids, pool = (torch.randint(n, shape, generator=generator) for shape in ((batch, own), (shared,)))
    return query, weight, offsets, target, Draw(ids, log_count, pool, pool_log_count, hidden)


def formula(query, weight, offsets, target, draw, prediction):
    """The loss and the positive's output from the logits of all classes, example by example."""
    logits = query @ weight.T + (0 if offsets is None else offsets)
    outputs = functional.output(logits, prediction)
    losses, positives = [], []
    for row in range(len(query)):
        count = draw.pool_log_count.clone()
        count[draw.hidden[1][draw.hidden[0] == row]] = math.inf
        terms = torch.cat([outputs[row, draw.ids[row]] - draw.log_count[row], outputs[row, draw.pool] - count])
        terms = terms[terms > -math.inf]
        positive = outputs[row, target[row]] if target[row] >= 0 else None
        if positive is not None:
            terms = torch.cat([terms, positive[None]])
        losses.append(
            (terms.logsumexp(0) if len(terms) else query.sum() * 0 - 1e30) - (0 if positive is None else positive)
        )
        positives.append(query.sum() * 0 if positive is None else positive)
    empty = query.sum(-1)[:0]
    return torch.stack(losses) if losses else empty, torch.stack(positives) if positives else empty


@given(
    sizes=st.tuples(st.integers(0, 7), st.integers(2, 300), st.integers(1, 70)),
    own=st.integers(0, 40),
    shared=st.integers(0, 60),
    bias=st.booleans(),
    prediction=st.sampled_from(["softmax", "absolute"]),
    sparse=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(deadline=None, derandomize=True, max_examples=150)
def test_both_implementations_are_the_formula(sizes, own, shared, bias, prediction, sparse, seed):
    arguments = problem(*sizes, own, shared, bias, seed)
    query, weight, offsets, target, draw = arguments
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(2, len(query), generator=generator)
    inputs = [leaf for leaf in (query, weight, offsets) if leaf is not None]
    exact = [leaf.detach().double().requires_grad_() for leaf in inputs]
    double = draw._replace(log_count=draw.log_count.double(), pool_log_count=draw.pool_log_count.double())
    tables = (*exact[:2], exact[2] if bias else None)
    truth = formula(*tables, target, double, prediction)
    wanted = torch.autograd.grad(truth, exact, list(upstream.double()), allow_unused=True)
    options = {"prediction": prediction, "sparse": sparse}
    found = {
        "native": (fused.sampled_loss(*arguments, **options), inputs, upstream),
        "reference": (fused.reference_loss(*tables, target, double, **options), exact, upstream.double()),
    }
    for name, (results, leaves, slopes) in found.items():
        for result, expected in zip(results, truth, strict=True):
            torch.testing.assert_close(
                result.double(), expected, rtol=1e-5, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
            )
        for grad, expected in zip(torch.autograd.grad(results, leaves, list(slopes)), wanted, strict=True):
            expected = torch.zeros_like(grad.to_dense().double()) if expected is None else expected
            torch.testing.assert_close(grad.to_dense().double(), expected, rtol=1e-4, atol=1e-4)
            assert grad.is_sparse == (sparse and grad.shape != query.shape) or grad.shape == query.shape
            if grad.is_sparse:
                assert grad.is_coalesced()


def test_rows_without_a_slope_get_no_gradient():
    """An empty slot, or a positive elsewhere, must not touch a row: an optimizer with momentum would move it."""
    query, weight = torch.randn(2, 3), torch.randn(20, 3, requires_grad=True)
    counts = torch.tensor([[0.0, math.inf], [0.0, 0.0]])
    draw = Draw.each(torch.tensor([[4, 5], [6, 7]]), counts)
    loss, _ = fused.sampled_loss(query, weight, None, torch.tensor([-1, 9]), draw, prediction="softmax", sparse=True)
    loss.sum().backward()
    assert weight.grad._indices().flatten().tolist() == [4, 6, 7, 9]


def test_an_example_without_anything_has_no_gradient():
    query, weight = torch.randn(1, 3, requires_grad=True), torch.randn(20, 3, requires_grad=True)
    draw = Draw.each(torch.tensor([[4]]), torch.tensor([[math.inf]]))
    for leaf in (query, weight):
        for dtype in (torch.float32, torch.float64):
            tables = (query.to(dtype), weight.to(dtype), None, torch.tensor([-1]), draw)
            loss, positive = fused.sampled_loss(*tables, prediction="softmax", sparse=False)
            assert float(loss.detach()) == pytest.approx(-1e30)
            assert float(positive.detach()) == 0
            assert (torch.autograd.grad(loss.sum(), leaf)[0] == 0).all()


def test_exponentials_are_exact_to_rounding():
    """A pool of two classes, one with logit 0: slopes are softmax probabilities, over the whole range of float32."""
    logit = torch.linspace(0, -120, 2401)
    slopes, query, weight = torch.stack([torch.zeros(2401), logit]), torch.zeros(2401, 1), torch.zeros(1, 1)
    classes, hidden = torch.full((2401, 1), -1), torch.zeros(2, 0, dtype=torch.long)
    nothing = torch.zeros(2401, 0)
    factors = torch.ops.manyclass.sampled_loss_(
        slopes, query, weight, torch.zeros(0), classes, nothing, torch.zeros(2), hidden, False
    )[2]
    slopes = (slopes * factors).double()
    torch.testing.assert_close(slopes[0], (-logit.double()).sigmoid(), rtol=5e-7, atol=1e-37)
    torch.testing.assert_close(slopes[1], logit.double().sigmoid(), rtol=5e-7, atol=1e-37)
    assert (slopes[1, logit < -90] == 0).all()


def loss_of(arguments, **options):
    return fused.sampled_loss(*arguments, **{"prediction": "softmax", "sparse": True, **options})[0]


def test_the_native_kernel_is_the_one_in_use(monkeypatch):
    monkeypatch.setattr(fused, "reference_loss", None)
    loss_of(problem(3, 20, 4, 5, 6, False))
    with pytest.raises(TypeError):  # double precision is the reference's
        loss_of(problem(3, 20, 4, 5, 6, False, dtype=torch.float64))


def test_extreme_logits_are_stable(backend):
    query, weight = torch.full((1, 1), 1e4), torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    draw = Draw.each(torch.tensor([[0, 2]]), torch.zeros(1, 2))
    loss = loss_of((query, weight, None, torch.tensor([1]), draw), sparse=False)
    assert float(loss.detach()) == 2e4
    loss.sum().backward()
    torch.testing.assert_close(weight.grad, torch.tensor([[1e4], [-1e4], [0.0]]))


def test_a_positive_that_takes_nearly_all_keeps_its_gradient(backend):
    """Its probability is 1 to rounding; what is left of it is not 0."""
    query, weight = torch.ones(1, 1), torch.tensor([[30.0], [0.0]], requires_grad=True)
    draw = Draw.each(torch.tensor([[1]]), torch.zeros(1, 1))
    loss = loss_of((query, weight, None, torch.tensor([0]), draw), sparse=False)
    (grad,) = torch.autograd.grad(loss.sum(), weight)
    torch.testing.assert_close(grad.flatten(), torch.tensor([-1.0, 1.0]) * math.exp(-30), rtol=1e-5, atol=0)


def test_results_do_not_depend_on_threads():
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            query, weight, offsets, *rest = problem(64, 50, 33, 40, 0, True)
            losses = loss_of((query, weight, offsets, *rest))
            losses.sum().backward()
            results.append([losses, query.grad, weight.grad.to_dense(), offsets.grad.to_dense()])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_opcheck():
    arguments = problem(4, 30, 5, 6, 7, True)
    query, weight, offsets = (leaf.detach() for leaf in arguments[:3])
    target, draw = arguments[3:]
    classes = torch.cat([target[:, None], draw.ids], 1)
    counts = (draw.log_count, draw.pool_log_count, draw.hidden)
    native, tables = torch.ops.manyclass, (query, weight, offsets)
    torch.library.opcheck(native.sampled_loss_.default, (torch.randn(7, 4), *tables, classes, *counts, True))
    rows = (draw.log_count, draw.pool, draw.pool_log_count, torch.randn(7, 5), torch.randn(7), 30)
    torch.library.opcheck(native.row_gradients.default, (query, torch.rand(4, 7), classes, *rows))
    for bad in (-2, 30):
        wrong = torch.full_like(classes, bad)
        with pytest.raises(ValueError, match=r"classes must be in \[-1, 30\)"):
            native.sampled_loss_(torch.randn(7, 4), *tables, wrong, *counts, False)
        with pytest.raises(ValueError, match=r"classes must be in \[-1, 30\)"):
            native.row_gradients(query, torch.rand(4, 7), wrong, *rows)
    with pytest.raises(ValueError, match=r"hidden must hold examples and slots of the pool, got \(0, 7\)"):
        native.sampled_loss_(torch.randn(7, 4), *tables, classes, *counts[:2], torch.tensor([[0], [7]]), False)


def test_weights_changed_between_forward_and_backward_do_not_matter():
    """The slopes were found in the forward pass: an optimizer may step before an old graph is used."""
    arguments = problem(3, 20, 4, 5, 6, False)
    loss = loss_of(arguments, sparse=False).sum()
    (expected,) = torch.autograd.grad(loss, arguments[0], retain_graph=True)
    with torch.no_grad():
        arguments[1].mul_(2)
    torch.testing.assert_close(torch.autograd.grad(loss, arguments[0])[0], expected)
