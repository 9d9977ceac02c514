"""Squares of sampled gradients in optimisers: right in the mean, and noted where gradients are."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import manyclass
from manyclass import importance, optim

D, N, POOL, BATCH = 8, 400, 80, 16


def made(**options):
    torch.manual_seed(0)
    options = {"num_samples": POOL, **options}
    head = manyclass.SampledSoftmax(D, N, **options)
    query = torch.randn(BATCH, D, generator=torch.Generator().manual_seed(1))
    target = torch.randint(N, (BATCH,), generator=torch.Generator().manual_seed(2))
    return head, query, target


def exact_squares(head, query, target, scale=1.0):
    """Squares of the full softmax's gradient, and the rows that are no targets."""
    weight = head.weight.detach().clone().requires_grad_()
    (scale * manyclass.functional.full_softmax_loss(query, weight, target)).backward()
    return weight.grad.square(), torch.ones(N, dtype=torch.bool).index_fill(0, target, False)


@pytest.mark.parametrize("sampler", ["blocks", "uniform"])
@pytest.mark.parametrize(("passes", "clip"), [(1, False), (3, True)])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kind", ["Adam", "Adagrad"])
def test_squares_are_right_in_the_mean(sampler, passes, clip, exact, kind, backend):
    """They are the squares of the full softmax's gradient, or larger."""
    options = {"own": 1, "probe": 1} if sampler == "blocks" else {"scope": "batch"}
    head, query, target = made(sampler=sampler, **options)
    if kind == "Adam":
        optimizer = optim.Adam(head.parameters(), lr=0.0, betas=(0.0, 1 - 1e-6), exact_squares=exact)
    else:
        optimizer = optim.Adagrad(head.parameters(), lr=0.0, exact_squares=exact)
    steps = 150
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            head(query, target).backward()
        if clip:
            manyclass.clip_grad_norm_(head.parameters(), 1e9)
        optimizer.step()
    squares, others = exact_squares(head, query, target, passes)
    state = optimizer.state[head.weight]
    found = state["exp_avg_sq"] / 1e-6 if kind == "Adam" else state["sum"]
    ratio = float(found[others].sum() / steps / squares[others].sum())
    assert ratio == pytest.approx(1.0, rel=0.12) if exact else ratio > 1 + 2 / passes


@pytest.mark.parametrize("rowwise", [True, False])
def test_no_step_of_adagrad_is_longer_than_its_rate(rowwise, backend):
    """Divided by its exact square alone, the first gradient of a rare class would be several times as long."""
    head, query, target = made(own=1, probe=1)
    before = head.weight.detach().clone()
    optimizer = optim.Adagrad(head.parameters(), lr=0.5, rowwise=rowwise)
    head(query, target).backward()
    assert importance.read(head.weight.grad, head.weight.grad.coalesce().indices()[0]).max() > 2
    optimizer.step()
    moved = (head.weight.detach() - before).square()
    longest = moved.mean(dim=1).max() if rowwise else moved.max()
    assert float(longest) == pytest.approx(0.25, rel=1e-3)


def passes_of(parameter):
    return getattr(parameter.grad, importance.NAME, (0, []))[1]


def test_every_backward_pass_is_noted_once():
    head, query, target = made(bias=True)
    for number in (1, 2):
        head(query, target).backward()
        assert len(passes_of(head.weight)) == len(passes_of(head.bias_embedding.weight)) == number
        head.diagnostics()
        assert len(passes_of(head.weight)) == number


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_forgets_what_was_noted(set_to_none):
    head, query, target = made()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad(set_to_none)
        head(query, target).backward()
        assert len(passes_of(head.weight)) == 1
        optimizer.step()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_passes_are_noted_once(reentrant):
    head, query, target = made()
    checkpoint(head, query.requires_grad_(), target, use_reentrant=reentrant).backward()
    assert len(passes_of(head.weight)) == 1


def test_classes_that_are_mostly_targets_have_nearly_no_excess():
    head, query, target = made(sampler="in_batch")
    head(query, target).backward()
    rows = head.weight.grad.coalesce().indices()[0]
    assert importance.read(head.weight.grad, rows).max() < 1.2


def test_rows_that_left_the_gradient_do_no_harm():
    head, query, target = made(own=1, probe=1)
    head(query, target).backward()
    grad = head.weight.grad.coalesce()
    rows = grad.indices()[0]
    excess = importance.read(head.weight.grad, rows)
    assert excess.max() > 2
    assert torch.equal(importance.read(head.weight.grad, rows[::2].contiguous()), excess[::2])
    assert importance.read(head.weight.grad, rows[:0]).tolist() == []
    assert (importance.read(torch.zeros(N, D).to_sparse(1), rows) == 1).all()


@pytest.mark.parametrize("options", [{"cosine": manyclass.Cosine(8.0)}, {"sparse": False}])
def test_gradients_that_are_not_noted(options):
    head, query, target = made(**options)
    head(query, target).backward()
    assert not passes_of(head.weight if "sparse" in options else head.embedding.weight)


def test_tied_embeddings():
    embedding = nn.Embedding(N, D, sparse=True)
    head, _, target = made(embedding=embedding)
    head(embedding(target.flip(0)), target).backward()
    assert len(passes_of(embedding.weight)) == 1
