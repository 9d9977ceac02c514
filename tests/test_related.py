"""Samplers of related work against the contract, and what each of them promises beyond it."""

import pytest
import torch
from contract import CHECKS, Case
from test_samplers import PAIRS

from manyclass import SampledSoftmax, samplers
from manyclass.samplers import ngram

# --- the adaptive mixture of n-grams --------------------------------------------------------------------------------

SHARES = (0.3, 0.5, 0.2)
RECENT = torch.tensor([3, 3, 0, 5, 3, 1, 3, 0, 3, 3])


def mixture() -> samplers.AdaptiveNgram:
    sampler = samplers.AdaptiveNgram(PAIRS, 6, memory=10)
    sampler.mixture.copy_(torch.tensor(SHARES, dtype=torch.float64))
    sampler.slots.copy_(RECENT)
    sampler.ordered.copy_(RECENT.sort().values)
    return sampler


def mixture_truth(query, context):
    unigram = torch.bincount(PAIRS[:, 1], minlength=6).double() + 1
    recent, rows = torch.bincount(RECENT, minlength=6).double() / 10, []
    for c in context.tolist():
        seen = torch.bincount(PAIRS[PAIRS[:, 0] == c][:, 1], minlength=6).double()
        share = SHARES if seen.sum() else (SHARES[0] + SHARES[1], 0, SHARES[2])
        parts = torch.stack([unigram / unigram.sum(), seen / seen.sum().clamp(min=1), recent])
        rows.append((torch.tensor(share, dtype=torch.float64).unsqueeze(-1) * parts).sum(0))
    return torch.stack(rows)


CASES = {"ngram": Case(mixture, mixture_truth, rtol=1e-6)}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_contract(case, check):
    check(case)


def test_the_mixture_follows_the_model():
    """A model that likes what no n-gram knows: shares and recent classes move there, and the bias falls."""
    n, generator = 200, torch.Generator().manual_seed(0)
    pairs = torch.stack([torch.zeros(300).long(), torch.randint(100, (300,), generator=generator)], dim=1)
    head = SampledSoftmax(2, n, "ngram", 40, pairs=pairs, memory=512)
    with torch.no_grad():
        head.weight.zero_()
        head.weight[150:160, 0] = 6.0
    query = torch.tensor([[1.0, 0.0]]).expand(64, -1)
    target = torch.randint(100, (64,), generator=generator)
    context = torch.zeros(64).long()
    ids = torch.arange(n).expand(1, -1)

    def cross_entropy() -> float:
        log_q = head.sampler.log_prob(query[:1], ids, context=context[:1])
        return -float((head.log_prob(query[:1]).detach().double().exp() * log_q).sum())

    head(query, target, context=context)
    before, bias = cross_entropy(), head.diagnostics().bias
    for _ in range(60):
        head.weight.data += 0.0  # counts as a change, so the layer lets the sampler learn
        head(query, target, context=context)
    assert head.sampler.observed > 50
    assert cross_entropy() < before - 1
    assert abs(head.diagnostics().bias) < abs(bias) / 2
    assert float(head.sampler.mixture[2]) > ngram.MIXTURE[2]
    assert float(head.sampler.mixture.sum()) == pytest.approx(1)
    assert float(head.sampler.mixture.min()) >= ngram.SMALLEST_SHARE * 0.9
    q = head.sampler.log_prob(query[:1], ids, context=context[:1]).exp()
    assert float(q.sum()) == pytest.approx(1, abs=1e-12)


def test_recent_classes_are_those_of_the_importance_weights():
    """Systematic: a class with a tenth of the weight is kept in a tenth of the slots."""
    sampler = samplers.AdaptiveNgram(PAIRS, 6, memory=640)
    importance = torch.tensor([0.5, 0.1, 0.0, 0.4], dtype=torch.float64)
    for _ in range(10):
        sampler._remember(torch.tensor([5, 2, 1, 0]), importance)
    counts = torch.bincount(sampler.slots, minlength=6)
    torch.testing.assert_close(counts / 640, torch.tensor([0.4, 0, 0.1, 0, 0, 0.5]), rtol=0, atol=0.005)
