"""What every sampler must satisfy, as functions that raise AssertionError; broken samplers prove that they can."""

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

from manyclass.samplers import Sampler

# Fixed in advance. With about 200 statistical checks and fixed seeds the suite is stable, and a wrong
# distribution of the sizes used here gives p-values many orders of magnitude below it.
SIGNIFICANCE = 1e-5


@dataclass
class Case:
    """A sampler in a known state, with the truth that it must match."""

    make: Callable[[], Sampler]
    #: queries ``(batch, in_features)`` → true q, shape ``(batch, num_classes)``, float64.
    truth: Callable[[Tensor, Tensor], Tensor]
    in_features: int = 3
    #: class weights for samplers that follow them, shape ``(num_classes, in_features)``.
    weight: Tensor | None = None
    #: how far float32 statistics may be from the truth.
    rtol: float = 1e-5

    def sampler(self) -> Sampler:
        sampler = self.make()
        if self.weight is not None:
            sampler.update(self.weight)
        return sampler

    def batch(self, size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, positives and contexts."""
        generator = torch.Generator().manual_seed(seed)
        query = torch.randn(size, self.in_features, generator=generator)
        n = self.sampler().num_classes
        return query, torch.randint(n, (size,), generator=generator), torch.randint(n, (size,), generator=generator)


def goodness_of_fit(observed: Tensor, expected: Tensor) -> float:
    """p-value of the chi-square test, rare cells merged so that each expects 10 or more; 0 for an impossible draw."""
    if observed[expected == 0].sum() > 0:
        return 0.0
    expected, order = expected[expected > 0].sort(descending=True), (expected > 0).nonzero().squeeze(-1)
    expected, observed = expected.values, observed[order][expected.indices]
    # Cells by the multiple of 10 that the running total passes; a rest that is too small joins the last one.
    bins = ((expected.cumsum(0) - expected / 2) / 10).floor().clamp(max=expected.sum() // 10 - 1)
    _, bins = bins.unique(return_inverse=True)
    wanted = torch.zeros(int(bins.max()) + 1, dtype=torch.float64).index_add(0, bins, expected.double())
    seen = torch.zeros_like(wanted).index_add(0, bins, observed.double())
    assert torch.isclose(wanted.sum(), seen.sum())
    return float(stats.chi2.sf(float(((seen - wanted) ** 2 / wanted).sum()), len(seen) - 1)) if len(seen) > 1 else 1.0


def restricted(q: Tensor, exclude: Tensor) -> Tensor:
    q = q.scatter(-1, exclude.unsqueeze(-1), 0.0)
    return q / q.sum(-1, keepdim=True)


def check_probabilities_by_enumeration(case: Case) -> None:
    sampler, (query, exclude, context) = case.sampler(), case.batch(5)
    ids = torch.arange(sampler.num_classes).expand(5, -1)
    q = sampler.log_prob(query, ids, context=context).exp()
    torch.testing.assert_close(q, case.truth(query, context).double(), rtol=case.rtol, atol=1e-12)
    torch.testing.assert_close(q.sum(-1), torch.ones(5, dtype=torch.float64), rtol=1e-9, atol=0)
    if sampler.num_classes > 1:
        q = sampler.log_prob(query, ids, exclude=exclude, context=context).exp()
        truth = restricted(case.truth(query, context).double(), exclude)
        torch.testing.assert_close(q, truth, rtol=case.rtol, atol=1e-12)


def check_draws_follow_reported_distribution(case: Case, draws: int = 20_000) -> None:
    sampler, (query, exclude, context) = case.sampler(), case.batch(3, seed=1)
    n = sampler.num_classes
    # The most probable class is the positive that matters most, and that masking after the draw gets most wrong.
    exclude[0] = case.truth(query, context)[0].argmax()
    for positive in [None, exclude] if n > 1 else [None]:
        generator = torch.Generator().manual_seed(2)
        draw = sampler.draw(query, draws, exclude=positive, context=context, generator=generator)
        q = sampler.log_prob(query, torch.arange(n).expand(3, -1), exclude=positive, context=context).exp()
        for example in range(3):
            observed = torch.bincount(draw.ids[example], minlength=n)
            p_value = goodness_of_fit(observed, q[example] * draws)
            assert p_value > SIGNIFICANCE, f"draws do not follow log_prob: p = {p_value}"


def check_log_count_is_that_of_the_distribution(case: Case) -> None:
    sampler, (query, exclude, context) = case.sampler(), case.batch(4)
    for positive in [None, exclude] if sampler.num_classes > 1 else [None]:
        for m in (1, 7):
            draw = sampler.draw(query, m, exclude=positive, context=context)
            expected = sampler.log_prob(query, draw.ids, exclude=positive, context=context) + math.log(m)
            torch.testing.assert_close(draw.log_count, expected.float(), rtol=case.rtol, atol=case.rtol)


def check_positive_never_appears(case: Case) -> None:
    sampler = case.sampler()
    n = sampler.num_classes
    if n < 2:
        return
    # Every class takes its turn as the positive, most draws where it would be drawn most.
    query = case.batch(1)[0].expand(n, -1)
    exclude, context = torch.arange(n), torch.arange(n).flip(0)
    q = case.truth(query, context).gather(-1, exclude.unsqueeze(-1)).squeeze(-1)
    rest = 1 - q
    keep = rest > 1e-12
    ids = sampler.draw(query[keep], 500, exclude=exclude[keep], context=context[keep]).ids
    assert not bool((ids == exclude[keep].unsqueeze(-1)).any()), "the positive class was drawn"


def check_same_uniforms_same_draw(case: Case) -> None:
    sampler, (query, exclude, context) = case.sampler(), case.batch(4)
    exclude = exclude if sampler.num_classes > 1 else None
    draws = [
        sampler.draw(query, 20, exclude=exclude, context=context, generator=torch.Generator().manual_seed(seed))
        for seed in (5, 5, 6)
    ]
    assert torch.equal(draws[0].ids, draws[1].ids)
    assert torch.equal(draws[0].log_count, draws[1].log_count)
    assert sampler.num_classes < 3 or not torch.equal(draws[0].ids, draws[2].ids), "the generator is not used"


def check_update_equals_rebuild(case: Case) -> None:
    sampler, (query, _, context) = case.sampler(), case.batch(4)
    if case.weight is None or len(case.weight) < 2:
        return
    rows = torch.tensor([0, len(case.weight) - 1])
    weight = case.weight.clone()
    weight[rows] += 1.5
    sampler.update(weight, rows)
    rebuilt = case.make()
    rebuilt.update(weight)
    ids = torch.arange(sampler.num_classes).expand(4, -1)
    new, fresh = sampler.log_prob(query, ids, context=context), rebuilt.log_prob(query, ids, context=context)
    torch.testing.assert_close(new, fresh, rtol=1e-6, atol=1e-6)
    old = case.sampler().log_prob(query, ids, context=context)
    assert not torch.allclose(new, old), "the update changed nothing"


def check_leading_shapes(case: Case) -> None:
    sampler, (query, exclude, context) = case.sampler(), case.batch(6)
    exclude = exclude if sampler.num_classes > 1 else None
    for shape in [(6,), (2, 3), (1, 6, 1)]:
        shaped = [None if x is None else x.reshape(*shape, *x.shape[1:]) for x in (query, exclude, context)]
        generator = torch.Generator().manual_seed(3)
        draw = sampler.draw(shaped[0], 4, exclude=shaped[1], context=shaped[2], generator=generator)
        assert draw.ids.shape == draw.log_count.shape == (*shape, 4)
        flat = sampler.draw(query, 4, exclude=exclude, context=context, generator=torch.Generator().manual_seed(3))
        assert torch.equal(draw.ids.reshape(6, 4), flat.ids)
    single = sampler.draw(query[0], 4, context=context[0])
    assert single.ids.shape == (4,)
    empty = sampler.draw(query[:0], 4, exclude=None if exclude is None else exclude[:0], context=context[:0])
    assert empty.ids.shape == empty.log_count.shape == (0, 4)


def check_state_travels(case: Case) -> None:
    sampler, (query, _, context) = case.sampler(), case.batch(4)
    loaded = case.make()
    loaded.load_state_dict(sampler.state_dict())
    if sampler.derived:  # a checkpoint has the class weights already
        assert not sampler.state_dict()
        loaded.update(case.weight)
    for other in (loaded, pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler), sampler.to("cpu")):
        draws = [
            s.draw(query, 9, context=context, generator=torch.Generator().manual_seed(1)) for s in (sampler, other)
        ]
        assert torch.equal(draws[0].ids, draws[1].ids)
        assert torch.equal(draws[0].log_count, draws[1].log_count)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
