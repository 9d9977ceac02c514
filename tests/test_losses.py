"""Other losses than the sampled softmax: each against its formula, and what it estimates by enumeration."""

import csv
import io
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from manyclass import losses, optim, samplers
from manyclass.bench import optimum

N, D, BATCH, M = 9, 4, 5, 3
COUNTS = torch.tensor([5.0, 1, 1, 30, 2, 2, 1, 8, 1])


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, D, generator=generator), torch.randint(N, (BATCH,), generator=generator)


def layer(kind, sampler="unigram", **options):
    torch.manual_seed(1)
    if sampler == "unigram":
        options["counts"] = COUNTS
    head = kind(D, N, sampler, M, **options)
    with torch.no_grad():
        head.weight.copy_(torch.randn(N, D))
    return head


# --- NCE and negative sampling --------------------------------------------------------------------------------------


def nce_formula(outputs, target, ids, log_q, weight=0.0):
    """The definition, example by example; outputs ``(batch, N)``, ids ``(batch, M)``, log_q ``(batch, N)``."""
    scores, total = outputs - math.log(N), []
    for s, y, noise, lq in zip(scores, target.tolist(), ids.tolist(), log_q, strict=True):
        loss = -F.logsigmoid(s[y] - lq[y] - math.log(M))
        loss = loss - sum(F.logsigmoid(lq[k] + math.log(M) - s[k]) for k in noise)
        z = sum((s[k] - lq[k] - math.log(M)).exp() for k in noise)
        total.append(loss + weight * z.log() ** 2)
    return torch.stack(total).mean()


@pytest.mark.parametrize("scope", ["example", "batch"])
@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("bias", [False, True])
def test_nce_is_its_formula(scope, weight, bias):
    head = layer(losses.NoiseContrastive, scope=scope, self_normalisation=weight, bias=bias)
    query, target = batch()
    query.requires_grad_()
    loss = head(query, target, generator=torch.Generator().manual_seed(3))
    loss.backward()
    draw = head.sampler.draw(query, M, generator=torch.Generator().manual_seed(3))
    ids = torch.cat([draw.ids, draw.pool.expand(BATCH, -1)], dim=1)
    log_q = head.sampler.log_prob(query, torch.arange(N).expand(BATCH, -1)).float()
    dense, free = head.weight.detach().clone().requires_grad_(), query.detach().clone().requires_grad_()
    outputs = free @ dense.T + (0 if head.bias is None else head.bias.detach())
    expected = nce_formula(outputs, target, ids, log_q, weight)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(query.grad, free.grad)
    assert head.weight.grad.is_sparse
    torch.testing.assert_close(head.weight.grad.to_dense(), dense.grad)


def expected_slope(head, p, q, target_known: bool) -> torch.Tensor:
    """Mean over targets and all negatives of the gradient by the outputs that fit ``p``, by enumeration."""
    outputs = head.optimum(p, q).clone().requires_grad_()
    total = torch.zeros(())
    for y in range(len(p)):
        allowed = torch.ones(len(p)) if target_known else (torch.arange(len(p)) != y).float()
        q_y = q * allowed / (q * allowed).sum()
        for ids in itertools.product(range(len(p)), repeat=2):
            ids = torch.tensor(ids)
            log_count = (2 * q_y[ids]).log().clamp(min=-1e4).unsqueeze(0)
            negative, of_target = outputs[ids].unsqueeze(0), (2 * q[y]).log().reshape(1)
            loss = head._losses(outputs[y].reshape(1), negative, log_count, of_target)
            total = total + p[y] * q_y[ids].prod() * loss.sum()
    (slope,) = torch.autograd.grad(total, outputs)
    return slope


P = torch.tensor([0.4, 0.1, 0.05, 0.15, 0.3])
Q = torch.tensor([0.1, 0.2, 0.3, 0.35, 0.05])


class Nce(losses.NoiseContrastive):
    def optimum(self, p, q):
        return p.log() + math.log(len(p))


class WithoutTheNumber(Nce):
    """Forgets m in the counts of the noise."""

    def _losses(self, positive, negative, log_count, target_log_count):
        return super()._losses(positive, negative, log_count - math.log(2), target_log_count)


class Negatives(losses.NegativeSampling):
    def optimum(self, p, q):
        odds = [p[i] / (2 * sum(p[y] * q[i] / (1 - q[y]) for y in range(len(p)) if y != i)) for i in range(len(p))]
        return torch.tensor(odds).log()


@pytest.mark.parametrize(("kind", "right"), [(Nce, True), (WithoutTheNumber, False), (Negatives, True)])
def test_the_optimum_is_what_the_docstring_says(kind, right):
    head = kind(D, len(P), "uniform")
    slope = expected_slope(head, P, Q, target_known=kind is not Negatives)
    assert bool(slope.abs().max() < 1e-6) == right


def test_self_normalisation_draws_the_partition_towards_n():
    query, target = batch()
    ends = []
    for weight in (0.0, 1.0):
        head = layer(losses.NoiseContrastive, self_normalisation=weight)
        optimizer = optim.SGD(head.parameters(), lr=0.05)
        for step in range(300):
            optimizer.zero_grad()
            head(query, target, generator=torch.Generator().manual_seed(step)).backward()
            optimizer.step()
        ends.append(float(((query @ head.weight.T).logsumexp(-1) - math.log(N)).detach().square().mean()))
    assert ends[1] < ends[0] / 2


@pytest.mark.parametrize("sampler", ["unigram", "blocks"])
@pytest.mark.parametrize("scope", ["example", "batch"])
def test_negative_sampling_is_its_formula(sampler, scope):
    head = layer(losses.NegativeSampling, sampler, **({"scope": scope} if sampler == "unigram" else {"own": 2}))
    query, target = batch()
    head.refresh()
    loss = head(query, target, generator=torch.Generator().manual_seed(3))
    loss.backward()
    draw = head.sampler.draw(query, M, exclude=target, generator=torch.Generator().manual_seed(3))
    ids = torch.cat([draw.ids, draw.pool.expand(BATCH, -1)], dim=1)
    there = torch.cat([draw.log_count < math.inf, ~draw.hidden_mask()], dim=1)
    assert not bool((ids == target.unsqueeze(-1))[there].any())
    dense = head.weight.detach().clone().requires_grad_()
    outputs = query @ dense.T
    expected = -F.logsigmoid(outputs.gather(1, target[:, None])).squeeze(1)
    expected = (expected - (F.logsigmoid(-outputs.gather(1, ids)) * there).sum(1)).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(head.weight.grad.to_dense(), dense.grad)


def test_losses_evaluate_exactly_and_refuse_what_they_cannot_do():
    query, target = batch()
    for kind in (losses.NoiseContrastive, losses.NegativeSampling):
        head = layer(kind).eval()
        torch.testing.assert_close(head(query, target), F.cross_entropy(query @ head.weight.T, target))
        with pytest.raises(ValueError, match=f"{kind.__name__} has no diagnostics"):
            head.diagnostics()
        with pytest.raises(TypeError, match="does not take tolerance: its loss is no estimate"):
            kind(D, N, "uniform", tolerance=0.1)
        with pytest.raises(TypeError, match="does not take classes: it reads its class weights from a table"):
            kind(D, N, "uniform", classes=torch.nn.Embedding(N, D))
    with pytest.raises(ValueError, match=r"sampler must have one distribution q.*Blocks has none"):
        losses.NoiseContrastive(D, N, "blocks")
    with pytest.raises(ValueError, match="self_normalisation must not be negative, got -1"):
        losses.NoiseContrastive(D, N, "uniform", self_normalisation=-1.0)


def test_nce_with_an_adaptive_sampler_of_the_kernel():
    head = layer(losses.NoiseContrastive, samplers.Softmax)
    query, target = batch()
    loss = head(query, target, generator=torch.Generator().manual_seed(3))
    draw = head.sampler.draw(query, M, generator=torch.Generator().manual_seed(3))
    log_q = (query @ head.weight.T).log_softmax(-1)
    torch.testing.assert_close(loss, nce_formula(query @ head.weight.T, target, draw.ids, log_q))


def test_bench_optimum(tmp_path, monkeypatch):
    """The outputs that each loss ends with, against known probabilities."""
    monkeypatch.setattr(optimum, "CLASSES", 30)
    monkeypatch.setattr(optimum, "EXAMPLES", 64)
    console = Console(file=io.StringIO(), width=100)
    optimum.run(tmp_path, console, [1, 30], 200)
    with (tmp_path / optimum.FILE).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["loss"], row["negatives"]) for row in rows[:3]] == [
        ("softmax", ""),
        ("softmax", "1"),
        ("softmax", "30"),
    ]
    kl = {(row["loss"], row["negatives"]): float(row["kl"]) for row in rows}
    assert kl["softmax", ""] < 0.005
    assert kl["softmax", "1"] > 0.1 > 0.02 > kl["softmax", "30"]  # biased, less with more negatives
    assert max(kl["nce", "1"], kl["nce", "30"]) < 0.02
    assert min(kl["negative", "1"], kl["negative", "30"]) > 0.1
    normalised = [float(row["log_partition"]) for row in rows if row["loss"] == "nce"]
    assert max(map(abs, normalised)) < 0.05
    wrong = WithoutTheNumber(1, 30, "unigram", 16, counts=torch.ones(30), sparse=False)
    end = optimum.optimum(wrong, "nce", 16, optimum.problem().p, 200)
    assert abs(end.log_partition) > 0.3
