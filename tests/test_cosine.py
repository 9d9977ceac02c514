"""Cosine logits and margins: functions, tables, encoders, and the cache of normalised rows."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import manyclass
from manyclass import ArcFace, CosFace, Cosine, FullSoftmax, SampledSoftmax, chunks, functional

N, D, M = 40, 5, 12
MARGINS = {"none": None, "cosface": CosFace(0.3), "arcface": ArcFace(0.5)}


class Tower(nn.Module):
    """Features of each class through one layer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("features", torch.randn(N, 7))
        self.layer = nn.Linear(7, D)

    def forward(self, ids):
        return self.layer(self.features[ids])


def batch(size=9, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    query = 3 * torch.randn(size, D, generator=generator, dtype=dtype)
    return query.requires_grad_(), torch.randint(N, (size,), generator=generator)


def fixed(seed=3):
    return torch.Generator().manual_seed(seed)


def layer(source, kind=SampledSoftmax, sampler=("uniform", M), scale=8.0, margin=None, learn_scale=False, **options):
    torch.manual_seed(0)
    classes = Tower() if source == "encoder" else None
    arguments = sampler if kind is SampledSoftmax else ()
    cosine = Cosine(scale, margin=margin, learn_scale=learn_scale)
    return kind(D, N, *arguments, classes=classes, cosine=cosine, **options)


def raw(head):
    """Class embeddings before they are normalised, with gradients."""
    return head.embedding.weight if head.classes is None else head.classes(torch.arange(N))


def logits_of(query, weight, target, scale, margin):
    """All logits, straight from the definition."""
    cosine = F.normalize(query, dim=-1) @ F.normalize(weight, dim=-1).T
    mine = cosine.gather(1, target[:, None])
    if margin is not None and margin.margin and isinstance(margin, ArcFace):
        angle = mine.clamp(-1 + 1e-7, 1 - 1e-7).arccos()
        over = mine - margin.margin * math.sin(margin.margin)
        mine = torch.where(angle + margin.margin < math.pi, (angle + margin.margin).cos(), over)
    elif margin is not None:
        mine = mine - margin.margin
    return scale * cosine.scatter(1, target[:, None], mine)


def same_gradients(loss, expected, parameters):
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    pairs = (torch.autograd.grad(value, parameters, retain_graph=True) for value in (loss, expected))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one.to_dense(), other.to_dense(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MARGINS)
def test_the_function_is_the_definition(name, monkeypatch):
    weight = torch.randn(N, D, requires_grad=True)
    query, target = batch()
    expected = F.cross_entropy(logits_of(query, weight, target, 8.0, MARGINS[name]), target)
    for most in (chunks.MAX_LOGITS, 9 * 7):  # in one chunk of classes, and in six
        monkeypatch.setattr(chunks, "MAX_LOGITS", most)
        loss = functional.cosine_softmax_loss(query, weight, target, 8.0, margin=MARGINS[name])
        same_gradients(loss, expected, [query, weight])


@pytest.mark.parametrize("name", MARGINS)
def test_gradcheck_of_the_function(name):
    weight = torch.randn(6, D, dtype=torch.float64, requires_grad=True)
    query, _ = batch(3, dtype=torch.float64)
    scale = torch.tensor(4.0, dtype=torch.float64, requires_grad=True)

    def loss(query, weight, scale):
        return functional.cosine_softmax_loss(query, weight, torch.tensor([0, 5, 2]), scale, margin=MARGINS[name])

    assert torch.autograd.gradcheck(loss, (query, weight, scale))


def test_margins_at_the_ends_and_beyond():
    cosine = torch.tensor([-1.0, -0.95, -0.5, 0.0, 0.5, 1.0], requires_grad=True)
    for margin in (CosFace(0.4), ArcFace(0.5)):
        shifted = margin(cosine)
        assert (shifted <= cosine - 0.02).all()
        assert (shifted.diff() > 0).all()
        (slope,) = torch.autograd.grad(shifted.sum(), cosine)
        assert torch.isfinite(slope).all()
    torch.testing.assert_close(ArcFace(0.5)(torch.tensor(0.3)), torch.tensor(math.cos(math.acos(0.3) + 0.5)))
    assert torch.equal(CosFace(0.0)(cosine), cosine)


@pytest.mark.parametrize("source", ["table", "encoder"])
@pytest.mark.parametrize("name", MARGINS)
def test_the_sampled_loss_is_the_formula(name, source, backend):
    head = layer(source, margin=MARGINS[name], learn_scale=True)
    query, target = batch()
    loss = head(query, target, generator=fixed())
    draw = head.sampler.draw(head.cosine(query).detach(), M, exclude=target, generator=fixed())
    logits = logits_of(query, raw(head), target, head.cosine.scale, MARGINS[name])
    expected = functional.sampled_softmax_loss(
        logits.gather(1, target[:, None]).squeeze(1), logits.gather(1, draw.ids), draw.log_count
    )
    same_gradients(loss, expected, [query, *head.parameters()])
    if source == "table":
        loss.backward()
        assert head.embedding.weight.grad.is_sparse


@pytest.mark.parametrize("source", ["table", "encoder"])
@pytest.mark.parametrize("name", MARGINS)
def test_softmax_draws_and_the_full_layer_give_the_full_loss(name, source):
    query, target = batch()
    for head in (
        layer(source, sampler=("softmax", M), margin=MARGINS[name]),
        layer(source, FullSoftmax, margin=MARGINS[name]),
    ):
        loss = head(query, target)
        expected = functional.cosine_softmax_loss(query, raw(head), target, 8.0, margin=MARGINS[name])
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        if isinstance(head, FullSoftmax):
            same_gradients(loss, expected, [query, *head.parameters()])
        head.refresh()
        head.eval()  # without the margin
        plain = functional.cosine_softmax_loss(query, raw(head), target, 8.0)
        torch.testing.assert_close(head(query, target), plain)


@pytest.mark.parametrize("margin", [None, ArcFace(0.5)])
def test_blocks_are_unbiased_and_see_normalised_rows(margin):
    options = {"own": 4, "probe": 2, "block_size": 4}
    head = layer("table", sampler=("blocks", 6), margin=margin, reduction="none", scale=4.0, **options)
    query, target = batch()
    query = query.detach()
    head(query, target)
    torch.testing.assert_close(head.weight.norm(dim=1), torch.ones(N))
    with torch.no_grad():
        head.embedding.weight.mul_(torch.rand(N, 1) + 0.5)  # means nothing
        head.embedding.weight.add_(0.3 * torch.randn(N, D, generator=fixed()))  # the cache is stale
        logits = logits_of(query, raw(head), target, 4.0, margin)
        rest = logits.scatter(1, target[:, None], -math.inf).logsumexp(dim=1)
        positive = logits.gather(1, target[:, None]).squeeze(1)
        head._known = lambda ids: head.weight[ids]
        ratio = torch.stack(
            [(head(query, target, generator=fixed(seed)).expm1().log() + positive - rest).exp() for seed in range(400)]
        )
    deviation = (ratio.mean(dim=0) - 1) / (ratio.std(dim=0) / 20)
    assert deviation.abs().max() < 4.5


def train_step(head, optimizer, query, target):
    optimizer.zero_grad()
    head(query, target).backward()
    optimizer.step()


def test_exact_results_of_a_table_follow_it_without_a_refresh():
    head = layer("table", sampler=("blocks", M))
    optimizer = manyclass.optim.Adam(head.parameters(), lr=0.1)
    query, target = batch()
    for _ in range(3):
        train_step(head, optimizer, query, target)
    optimizer.flush()
    logits = logits_of(query, raw(head), target, 8.0, None)
    torch.testing.assert_close(head.log_prob(query), logits.log_softmax(dim=-1))
    assert torch.equal(head.topk(query, 4)[1], logits.topk(4).indices)
    assert torch.equal(head.predict(query), logits.argmax(dim=-1))
    torch.testing.assert_close(head.eval()(query, target), F.cross_entropy(logits, target))


def test_a_search_through_the_tree_follows_a_table_without_a_refresh():
    head = layer("table", sampler=("blocks", M))
    optimizer = torch.optim.SGD(head.parameters(), lr=5.0)
    query, target = batch()
    for _ in range(3):
        train_step(head, optimizer, query, target)
        expected = logits_of(query, raw(head), target, 8.0, None).log_softmax(dim=-1).topk(4)
        values, ids = head.topk(query, 4, probe=N)  # all blocks
        torch.testing.assert_close(values, expected.values.detach(), atol=1e-3, rtol=1e-3)
        assert torch.equal(ids, expected.indices)


def test_rows_of_a_table_are_read_after_the_step_of_the_optimiser():
    head = layer("table", sampler=("softmax", M))
    optimizer = torch.optim.SGD(head.parameters(), lr=1.0)
    query, target = batch()
    head(query, target).backward()
    ids = head.embedding.weight.grad.coalesce().indices()[0]
    optimizer.step()
    head(query, target)
    torch.testing.assert_close(head.weight[ids], F.normalize(head.embedding.weight[ids].detach(), dim=1))


def test_diagnostics_have_the_margin_in_both_losses():
    for margin in MARGINS.values():
        head = layer("encoder", sampler=("softmax", M), margin=margin)
        head(*batch())
        assert abs(head.diagnostics().bias) < 1e-4
    head = layer("table", sampler=("uniform", 2), margin=ArcFace(0.5))
    head(*batch())
    assert head.diagnostics().bias < -0.05


def test_checkpoints_resume_and_weights_of_a_linear_layer_load():
    def train(head, seed):
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        losses = []
        for step in range(4):
            loss = head(*batch(seed=seed + step), generator=fixed(step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    options = {"sampler": ("blocks", M), "learn_scale": True, "margin": CosFace(0.2)}
    head, other = layer("table", **options), layer("table", **options)
    train(head, 0)
    other.load_state_dict(copy.deepcopy(head.state_dict()))
    assert train(head, 10) == train(other, 10)
    linear = nn.Linear(D, N, bias=False)
    fixed_scale = layer("table", sampler=("blocks", M))
    fixed_scale(*batch())
    fixed_scale.load_state_dict({"cosine.log_scale": torch.tensor(8.0).log(), **linear.state_dict()})
    query, target = batch()
    expected = functional.cosine_softmax_loss(query, linear.weight, target, 8.0)
    torch.testing.assert_close(fixed_scale.eval()(query, target), expected)


def test_tied_and_low_precision_tables():
    embedding = nn.Embedding(N, D, dtype=torch.bfloat16)
    head = SampledSoftmax(D, N, "uniform", M, embedding=embedding, sparse=False, dtype=torch.bfloat16, cosine=Cosine(8))
    query, target = batch()
    loss = head(query.to(torch.bfloat16), target)
    loss.backward()
    assert loss.dtype == torch.float32
    assert embedding.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Cosine(0.0), ValueError, "scale must be positive, got 0.0"),
        (lambda: Cosine(8, margin=0.5), TypeError, "margin must map cosines to cosines"),
        (lambda: ArcFace(2.0), ValueError, "margin must be from 0 to 1.571, got 2.0"),
        (lambda: CosFace(-0.1), ValueError, "margin must be from 0 to 1, got -0.1"),
        (lambda: SampledSoftmax(D, N, cosine=30.0), TypeError, "cosine must be a Cosine or None, got 30.0"),
        (
            lambda: SampledSoftmax(D, N, cosine=Cosine(8, margin=CosFace()), bias=True),
            ValueError,
            "a margin needs bias=False",
        ),
    ],
)
def test_wrong_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
