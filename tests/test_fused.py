"""The native step against the PyTorch formula: values, gradients, determinism, bad input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyclass import functional, fused


def problem(batch, n, d, m, bias, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, d, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(n, d, generator=generator, dtype=dtype, requires_grad=True)
    offsets = torch.randn(n, 1, generator=generator, dtype=dtype, requires_grad=True) if bias else None
    target = torch.randint(n, (batch,), generator=generator)
    ids = torch.randint(n, (batch, m), generator=generator)
    log_count = torch.randn(batch, m, generator=generator, dtype=dtype)
    log_count[torch.rand(batch, m, generator=generator) < 0.1] = math.inf
    return query, weight, offsets, target, ids, log_count


@given(
    sizes=st.tuples(st.integers(0, 9), st.integers(2, 3000), st.integers(1, 70), st.integers(1, 40)),
    bias=st.booleans(),
    prediction=st.sampled_from(["softmax", "absolute"]),
    sparse=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(deadline=None, derandomize=True, max_examples=120)
def test_native_equals_reference(sizes, bias, prediction, sparse, seed):
    batch, n, d, m = sizes
    query, weight, offsets, target, ids, log_count = problem(batch, n, d, m, bias, seed)
    upstream = torch.randn(batch, generator=torch.Generator().manual_seed(seed))
    options = {"prediction": prediction, "sparse": sparse}
    inputs = [query, weight] if offsets is None else [query, weight, offsets]

    native = fused.sampled_losses(query, weight, offsets, target, ids, log_count, **options)
    native_grads = torch.autograd.grad(native, inputs, upstream)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    classes = torch.cat([target[:, None], ids], 1)
    reference = fused.reference_losses(
        exact[0], exact[1], exact[2] if bias else None, classes, log_count.double(), **options
    )
    torch.testing.assert_close(native.double(), reference, rtol=1e-5, atol=1e-4)
    for grad, expected in zip(native_grads, torch.autograd.grad(reference, exact, upstream.double()), strict=True):
        assert grad.is_sparse == expected.is_sparse
        torch.testing.assert_close(grad.to_dense().double(), expected.to_dense(), rtol=1e-4, atol=1e-4)
    if sparse:
        assert native_grads[1].is_coalesced()
        assert torch.equal(native_grads[1].indices()[0], classes.unique())


@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(2, 300), st.integers(1, 70), st.integers(1, 300)),
    bias=st.booleans(),
    prediction=st.sampled_from(["softmax", "absolute"]),
    sparse=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(deadline=None, derandomize=True, max_examples=120)
def test_native_pool_equals_reference(sizes, bias, prediction, sparse, seed):
    """The pool holds classes twice, and positives, which do not count for their own example."""
    batch, n, d, m = sizes
    query, weight, offsets, target, ids, log_count = problem(batch, n, d, m, bias, seed)
    upstream = torch.randn(batch, generator=torch.Generator().manual_seed(seed))
    options = {"prediction": prediction, "sparse": sparse}
    inputs = [query, weight] if offsets is None else [query, weight, offsets]
    native = fused.pooled_losses(query, weight, offsets, target, ids[0], log_count[0], **options)
    native_grads = torch.autograd.grad(native, inputs, upstream)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    counts = log_count[:1].expand(batch, -1).masked_fill(ids[0] == target[:, None], math.inf)
    classes = torch.cat([target[:, None], ids[:1].expand(batch, -1)], 1)
    truths = [
        fused.reference_losses(*exact[:2], exact[2] if bias else None, classes, counts.double(), **options),
        fused.reference_pooled_losses(
            *exact[:2], exact[2] if bias else None, target, ids[0], log_count[0].double(), **options
        ),
    ]
    for truth in truths:
        torch.testing.assert_close(native.double(), truth, rtol=1e-5, atol=1e-4)
        for grad, expected in zip(native_grads, torch.autograd.grad(truth, exact, upstream.double()), strict=True):
            assert grad.is_sparse == expected.is_sparse
            torch.testing.assert_close(grad.to_dense().double(), expected.to_dense(), rtol=1e-4, atol=1e-4)
    if sparse:
        assert native_grads[1].is_coalesced()


def test_exponentials_are_exact_to_rounding():
    """One negative each: the slope is its softmax probability, over the whole range of float32."""
    logits = torch.linspace(0, -120, 2401).unsqueeze(-1)
    positive, slopes = torch.zeros(2401), logits.clone()
    zero = torch.zeros(1, dtype=torch.long)
    torch.ops.manyclass.pooled_loss_(slopes, positive, torch.zeros(1), zero, zero + torch.ones(2401).long(), False)
    expected = logits.double().sigmoid()
    torch.testing.assert_close(slopes.double(), expected, rtol=5e-7, atol=1e-37)
    assert (slopes[logits < -90] == 0).all()


def test_the_native_kernel_is_the_one_in_use(monkeypatch):
    arguments = problem(3, 20, 4, 5, False)
    monkeypatch.setattr(fused, "reference_losses", None)
    fused.sampled_losses(*arguments, prediction="softmax", sparse=True)
    with pytest.raises(TypeError):  # double precision is the reference's
        fused.sampled_losses(*problem(3, 20, 4, 5, False, dtype=torch.float64), prediction="softmax", sparse=True)


def test_extreme_logits_are_stable():
    query, weight = torch.full((1, 1), 1e4), torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    target, ids, log_count = torch.tensor([1]), torch.tensor([[0, 2]]), torch.zeros(1, 2)
    loss = fused.sampled_losses(query, weight, None, target, ids, log_count, prediction="softmax", sparse=False)
    assert float(loss.detach()) == 2e4
    loss.sum().backward()
    torch.testing.assert_close(weight.grad, torch.tensor([[1e4], [-1e4], [0.0]]))


def test_results_do_not_depend_on_threads():
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            query, weight, offsets, *rest = problem(64, 50, 33, 40, True)
            losses = fused.sampled_losses(query, weight, offsets, *rest, prediction="softmax", sparse=True)
            losses.sum().backward()
            results.append([losses, query.grad, weight.grad.to_dense(), offsets.grad.to_dense()])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_opcheck():
    query, weight, offsets, target, ids, log_count = (
        None if x is None else x.detach() for x in problem(4, 30, 5, 6, True)
    )
    classes = torch.cat([target[:, None], ids], 1)
    torch.library.opcheck(
        torch.ops.manyclass.sampled_loss.default, (query, weight, offsets.flatten(), classes, log_count, True)
    )
    shared = (torch.randn(4, 6), torch.randn(4), log_count[0], ids[0], target)
    torch.library.opcheck(torch.ops.manyclass.pooled_loss_.default, (*shared, True))
    with pytest.raises(RuntimeError, match=r"log_count and pool must be \(negatives,\)"):
        torch.ops.manyclass.pooled_loss_(*shared[:3], ids[0][:3], target, True)
    torch.library.opcheck(torch.ops.manyclass.sampled_loss_rows.default, (query, classes, torch.rand(4, 7), 30))
    for bad in (-1, 30):
        with pytest.raises(RuntimeError, match=r"classes must be in \[0, 30\)"):
            torch.ops.manyclass.sampled_loss(
                query, weight, offsets.flatten(), torch.full_like(classes, bad), log_count, False
            )
        with pytest.raises(RuntimeError, match=r"classes must be in \[0, 30\)"):
            torch.ops.manyclass.sampled_loss_rows(query, torch.full_like(classes, bad), torch.rand(4, 7), 30)


def test_weights_changed_between_forward_and_backward_do_not_matter():
    """The slopes were found in the forward pass: an optimizer may step before an old graph is used."""
    query, weight, _, *rest = problem(3, 20, 4, 5, False)
    loss = fused.sampled_losses(query, weight, None, *rest, prediction="softmax", sparse=False).sum()
    (expected,) = torch.autograd.grad(loss, query, retain_graph=True)
    with torch.no_grad():
        weight.mul_(2)
    torch.testing.assert_close(torch.autograd.grad(loss, query)[0], expected)


@pytest.mark.parametrize("absolute", [False, True])
def test_examples_without_a_positive_get_a_log_sum_exp(absolute):
    """What a shard of classes needs for positives that are elsewhere; empty slots do not count."""
    generator = torch.Generator().manual_seed(0)
    logits, log_count = torch.randn(3, 7, generator=generator), torch.randn(7, generator=generator)
    log_count[2] = math.inf
    positive, target = torch.tensor([0.5, -0.3, 0.0]), torch.tensor([-1, 4, -1])
    pool = torch.arange(7)
    outputs = (logits.abs() if absolute else logits) - log_count
    slopes = logits.clone()
    losses, positive_slopes = torch.ops.manyclass.pooled_loss_(slopes, positive, log_count, pool, target, absolute)
    expected = outputs.logsumexp(-1)
    torch.testing.assert_close(losses[[0, 2]], expected[[0, 2]])
    signs = logits.sign() if absolute else torch.ones_like(logits)
    torch.testing.assert_close(slopes[[0, 2]], (outputs.softmax(-1) * signs)[[0, 2]])
    own = positive[1].abs() if absolute else positive[1]
    others = outputs[1].masked_fill(pool == 4, -math.inf)
    torch.testing.assert_close(losses[1], torch.logaddexp(others.logsumexp(-1), own) - own)
    nothing = torch.full((7,), math.inf)
    losses, _ = torch.ops.manyclass.pooled_loss_(slopes, positive, nothing, pool, target.new_full((3,), -1), absolute)
    assert (losses == -1e30).all()
    assert (slopes == 0).all()
    assert (positive_slopes != 0).tolist() == [False, True, False]


@pytest.mark.parametrize("prediction", ["softmax", "absolute"])
def test_rows_of_absent_positives_get_no_gradient(prediction):
    """A row that only −1 stands for must not be touched: an optimizer with momentum would move it."""
    query, weight, offsets, _, _, _ = problem(4, 20, 6, 5, True)
    target, pool, log_count = torch.tensor([-1, 3, -1, 7]), torch.tensor([2, 7, 9, 11, 12]), torch.linspace(-1, 1, 5)
    absolute = prediction == "absolute"
    sum_of, found = fused.native_pool(query, weight, offsets, target, pool, log_count, absolute, True, None)
    (sum_of.sum() + 2 * found.sum()).backward()
    assert weight.grad._indices().flatten().tolist() == [2, 3, 7, 9, 11, 12]
    exact = [leaf.detach().double().requires_grad_() for leaf in (query, weight, offsets)]
    outputs = functional.output(exact[0] @ exact[1].T + exact[2].T, prediction)
    wanted = torch.zeros((), dtype=torch.double)
    for row, positive in enumerate(target.tolist()):
        counts = log_count.double().masked_fill(pool == positive, math.inf)
        terms = outputs[row, pool] - counts
        if positive >= 0:
            own = outputs[row, positive]
            wanted = wanted + torch.cat([own[None], terms]).logsumexp(0) + own
        else:
            wanted = wanted + terms.logsumexp(0)
    wanted.backward()
    for leaf, reference in zip((query, weight, offsets), exact, strict=True):
        torch.testing.assert_close(leaf.grad.to_dense().double(), reference.grad, rtol=1e-4, atol=1e-5)
