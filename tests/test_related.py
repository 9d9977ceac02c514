"""Samplers of related work against the contract, and what each of them promises beyond it."""

import itertools
import math

import contract
import pytest
import torch
from contract import CHECKS, Case
from test_samplers import PAIRS, weights

from manyclass import SampledSoftmax, samplers
from manyclass.samplers import head_tail, ngram, positive, systematic

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


# --- features -------------------------------------------------------------------------------------------------------


def feature_case(make, features, uniform: float = 0.0, n: int = 13) -> Case:
    weight = weights(n)

    def truth(query, context):
        of_classes = features(weight.double())
        mass = features(query.double()) @ (of_classes + uniform * of_classes.mean(0)).T
        return mass / mass.sum(-1, keepdim=True)

    return Case(make, truth, 3, weight)


def positive_features(x):
    return (x @ positive.orthogonal_directions(3, 7, 0).double().T - x.square().sum(-1, keepdim=True) / 2).exp()


def fourier_features(x):
    angle = 2 * x / x.norm(dim=-1, keepdim=True) @ positive.orthogonal_directions(3, 5, 0).double().T
    return torch.cat([angle.cos() / 5**0.5, angle.sin() / 5**0.5, torch.ones_like(angle[..., :1])], dim=-1)


# --- the inverted multi-index ---------------------------------------------------------------------------------------


def quantised(sampler) -> torch.Tensor:
    """Class vectors after quantisation, from codebooks and cells."""
    first, second = sampler.cell // sampler.codewords, sampler.cell % sampler.codewords
    return torch.cat([sampler.codebooks[0, first], sampler.codebooks[1, second]], dim=1)[:, : sampler.columns]


def multi_index_case(n: int, codewords: int) -> Case:
    weight = weights(n)

    def make():
        return samplers.MultiIndex(n, 3, codewords, every=1)

    def truth(query, context):
        sampler = make()
        sampler.update(weight)
        return (query @ quantised(sampler).T).double().softmax(-1)

    return Case(make, truth, 3, weight)


# --- hash tables ----------------------------------------------------------------------------------------------------


def lsh_case(n: int, bits: int) -> Case:
    weight = weights(n)

    def make():
        return samplers.SimHash(n, 3, tables=4, bits=bits, uniform=0.2, every=1)

    def truth(query, context):
        planes = make().planes.view(3, 4, bits)
        signs = [torch.einsum("nd,dtb->ntb", x, planes) > 0 for x in (query, weight)]
        same = (signs[0].unsqueeze(1) == signs[1]).all(-1).double()  # shape: (batch, n, tables)
        size = same.sum(1, keepdim=True)
        share = 0.8 / 4 * (same / size.clamp(min=1)).sum(-1)
        return share + (1 - share.sum(-1, keepdim=True)) / n

    return Case(make, truth, 3, weight)


CASES = {
    "ngram": Case(mixture, mixture_truth, rtol=1e-6),
    "positive": feature_case(lambda: samplers.PositiveFeatures(13, 3, features=7, every=1), positive_features, 0.1),
    "fourier": feature_case(lambda: samplers.FourierTree(13, 3, features=5, floor=1.0), fourier_features),
    "lsh": lsh_case(40, 3),
    "lsh-of-many-empty-buckets": lsh_case(6, 5),
    "multi-index": multi_index_case(40, 3),
    "multi-index-of-single-classes": multi_index_case(9, 8),
}


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


def divergence(sampler, weight, query) -> float:
    """χ²(p‖q), averaged over queries."""
    sampler.update(weight)
    log_p = (query @ weight.T).double().log_softmax(-1)
    log_q = sampler.log_prob(query, torch.arange(len(weight)).expand(len(query), -1))
    return float((2 * log_p - log_q).exp().sum(-1).mean() - 1)


def test_positive_features_come_closer_to_the_softmax_for_small_logits_only():
    query = torch.randn(20, 8, generator=torch.Generator().manual_seed(0)) / 2
    uniform, found = {}, {}
    for scale in (0.5, 2.0):
        weight = weights(50, 8) * scale
        uniform[scale] = divergence(samplers.Uniform(50), weight, query)
        found[scale] = [divergence(samplers.PositiveFeatures(50, 8, D), weight, query) for D in (4, 64, 4096)]
    assert uniform[0.5] > 2 * found[0.5][1] > 6 * found[0.5][2]
    assert 12 * uniform[2.0] > found[2.0][1] > uniform[2.0]  # with 64 features, worse than uniform, within a bound


def test_directions_are_gaussian_and_orthogonal():
    directions = positive.orthogonal_directions(4, 40_000, 0)
    groups = directions.view(-1, 4, 4)
    products = groups @ groups.mT
    assert float((products - products.diagonal(dim1=-2, dim2=-1).diag_embed()).abs().max()) < 1e-4
    torch.testing.assert_close(directions.T @ directions / 40_000, torch.eye(4), rtol=0, atol=0.03)
    assert float(directions.norm(dim=-1).var()) == pytest.approx(4 - 1.88**2, abs=0.03)  # as of independent numbers


def test_fourier_features_come_closer_to_the_gaussian_kernel():
    weight = torch.nn.functional.normalize(weights(50, 8), dim=-1)
    query = torch.nn.functional.normalize(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    ids = torch.arange(50).expand(4, -1)
    truth = (query @ weight.T).double().log_softmax(-1)
    errors = []
    for features in (8, 512):
        sampler = samplers.FourierTree(50, 8, features, nu=1.0, floor=1e-6)
        sampler.update(weight)
        errors.append(float((sampler.log_prob(query, ids).exp() - truth.exp()).abs().sum(-1).mean()))
    assert errors[1] < 0.05 < 0.1 < errors[0]


def test_negative_fourier_masses_leave_an_exact_distribution():
    sampler = samplers.FourierTree(13, 3, features=3, floor=0.01)
    sampler.update(weights(13))
    case = Case(lambda: sampler, lambda query, context: q_of(sampler, query), 3)
    query, features = case.batch(3, seed=1)[0], sampler.kernel.feature_map
    assert float((features(query) @ features(weights(13)).T).min()) < 0
    torch.testing.assert_close(q_of(sampler, query).sum(-1), torch.ones(3).double())
    contract.check_draws_follow_reported_distribution(case)
    contract.check_positive_never_appears(case)


def q_of(sampler, query):
    return sampler.log_prob(query, torch.arange(sampler.num_classes).expand(len(query), -1)).exp()


def test_a_snapshot_is_renewed_in_time():
    weight = weights(13)
    sampler = samplers.PositiveFeatures(13, 3, features=7, every=3)
    with pytest.raises(ValueError, match="has seen no class weights yet"):
        sampler.draw(torch.zeros(1, 3), 2)
    sampler.update(weight)
    query, rows = torch.randn(2, 3), torch.tensor([0])
    before, changed = q_of(sampler, query), weight + torch.eye(13)[:, :3]
    ages = []
    for _ in range(3):
        sampler.update(changed, rows)
        ages.append((sampler.staleness(), torch.equal(q_of(sampler, query), before)))
    assert ages == [(1.0, True), (2.0, True), (0.0, False)]
    with pytest.raises(ValueError, match="num_classes must be at most"):
        samplers.PositiveFeatures(100_000_000, 3)


def test_codebooks_are_means_of_the_nearest_classes():
    weight = weights(300, 5)
    sampler = samplers.MultiIndex(300, 5, codewords=6)
    sampler.update(weight)
    padded = torch.cat([weight, torch.zeros(300, 1)], dim=1)
    for part, book, index in (
        (padded[:, :3], sampler.codebooks[0], sampler.cell // 6),
        (padded[:, 3:], sampler.codebooks[1], sampler.cell % 6),
    ):
        assert torch.equal(torch.cdist(part, book).argmin(1), index)
        assert len(index.unique()) == 6
    error = (quantised(sampler) - weight).square().sum()
    assert float(error) < 0.5 * float((weight - weight.mean(0)).square().sum())


def test_more_codewords_come_closer_to_the_softmax():
    weight, query = weights(200, 8), torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    found = [divergence(samplers.MultiIndex(200, 8, K), weight, query) for K in (1, 8, 64)]
    assert found[0] == pytest.approx(divergence(samplers.Uniform(200), weight, query), rel=1e-4)  # one cell
    assert found[0] > 2 * found[1] > 4 * found[2]


def test_hash_tables_find_what_lies_in_the_direction_of_the_query():
    weight, query = weights(200, 8), torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    sampler = samplers.SimHash(200, 8, tables=64, bits=6)
    sampler.update(weight)
    q = q_of(sampler, query)
    cosine = torch.cosine_similarity(query.unsqueeze(1), weight, dim=-1).double()
    assert float((q * cosine).sum(-1).mean()) > 0.2 > 0.05 > abs(float(cosine.mean()))


# --- samplers with two parts ----------------------------------------------------------------------------------------


def two_pass(best: bool, number: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean of Σ exp(o − log_count), the true expected count of each class, and a reported one, by enumeration.

    All 4³ draws of three candidates from four classes, and a grid of uniform numbers for the second pass.
    """
    sampler = samplers.TwoPass(4, 1, candidates=3, best=best)
    output = torch.tensor([[0.0], [1.0], [2.5], [-1.0]])
    sampler.update(output)
    grid = (torch.arange(500).double() + 0.5) / 500
    query, estimate = torch.ones(500, 1), 0.0
    entered, reported = torch.zeros(4).double(), torch.zeros(4).double()
    pools = list(itertools.product(range(4), repeat=3))
    for pool in pools:
        log_count = torch.full((3,), math.log(3 / 4))
        candidates = samplers.Draw.shared(torch.tensor(pool), log_count, torch.Size([500]), None)
        ids, counts = sampler._second(query, candidates, torch.zeros(500).long(), grid, number)
        weight = (output.double()[ids, 0] - counts).exp()
        estimate += float(weight.sum(-1).mean()) / len(pools)
        taken = counts < math.inf
        assert not bool((ids[taken] == 0).any())
        entered.index_add_(0, ids[taken], torch.ones(int(taken.sum())).double())
        reported[ids[taken]] = counts[taken].exp()
    return torch.tensor(estimate), entered / 500 / len(pools), reported


def test_two_passes_estimate_the_partition_without_bias():
    truth = math.exp(1.0) + math.exp(2.5) + math.exp(-1.0)
    estimate, entered, _ = two_pass(best=False)
    assert float(estimate) == pytest.approx(truth, rel=2e-3)
    assert entered[0] == 0
    assert bool((entered[1:] > 0).all())


def test_the_best_candidates_are_biased():
    """Kept only if fewer than two better ones were drawn: the reported count is too large by that probability."""
    truth = math.exp(1.0) + math.exp(2.5) + math.exp(-1.0)
    estimate, entered, reported = two_pass(best=True, number=1)
    assert entered[2] > entered[1] > entered[3]
    torch.testing.assert_close(reported[1:], torch.full((3,), 0.75).double())
    assert float(entered[2]) == pytest.approx(1 - 0.75**3)
    assert float(entered[3]) == pytest.approx((0.5**3) - 0.25**3)
    assert float(estimate) < 0.8 * truth


def test_chances_of_systematic_draws():
    mass = torch.tensor([[100.0, 3.0, 2.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0], [5.0, 0.0, 0.0, 0.0, 1.0]]).log()
    found = systematic.chances(mass, 3)
    expected = [[1.0, 1.0, 2 / 3, 1 / 3, 0.0], [0.6] * 5, [1.0, 0.0, 0.0, 0.0, 1.0]]
    torch.testing.assert_close(found, torch.tensor(expected).double())
    grid = (torch.arange(300).double() + 0.5) / 300
    place, taken = systematic.draw(found[:1].expand(300, -1), grid, 3)
    assert bool(taken.all())
    torch.testing.assert_close(torch.bincount(place.flatten(), minlength=5) / 300, found[0].float())


def test_the_tail_is_uniform_over_all_but_head_and_target():
    head = torch.tensor([[5, 1, 0], [5, 1, 0], [2, 6, 3]])
    exclude = torch.tensor([4, 1, 0])  # not in the head; in the head; before it
    for target in (exclude, None):
        for row in range(3):
            others = [c for c in range(8) if c not in head[row] and (target is None or c != target[row])]
            grid = (torch.arange(len(others)).double() + 0.5) / len(others)
            y = None if target is None else target[row : row + 1]
            ids, rest = head_tail.uniform_rest(head[row : row + 1], y, grid.unsqueeze(0), 8)
            assert int(rest) == len(others)
            assert ids[0].tolist() == others


class CountsAllClasses(samplers.HeadTail):
    """Gives the tail the weight of all classes, the head included."""

    def draw(self, query, num_samples, **options):
        draw = super().draw(query, num_samples, **options)
        wrong = math.log(num_samples / self.num_classes)
        return samplers.Draw.each(draw.ids, draw.log_count.where(draw.log_count == 0, wrong))


@pytest.mark.parametrize(("kind", "right"), [(samplers.HeadTail, True), (CountsAllClasses, False)])
def test_head_and_tail_estimate_the_partition_without_bias(kind, right):
    torch.manual_seed(0)
    n, weight, query, target = 100, weights(100, 4), torch.randn(6, 4), torch.arange(6)
    sampler = kind(n, 4, head=10, probe=4)
    sampler.update(weight)
    draw = sampler.draw(query, 200_000, exclude=target)
    outputs = (query @ weight.T).double()
    estimate = (outputs.gather(1, draw.ids) - draw.log_count).exp().sum(-1)
    truth = outputs.scatter(1, target[:, None], -math.inf).exp().sum(-1)
    assert bool(((estimate / truth - 1).abs() < 0.01).all()) == right


def test_head_and_tail_cover_all_classes():
    torch.manual_seed(0)
    n, weight, query, target = 100, weights(100, 4), torch.randn(6, 4), torch.arange(6)
    sampler = samplers.HeadTail(n, 4, head=10, probe=4)
    sampler.update(weight)
    draw = sampler.draw(query, 2000, exclude=target)
    outputs = (query @ weight.T).double()
    truth = outputs.scatter(1, target[:, None], -math.inf).exp().sum(-1)
    assert not bool((draw.ids == target[:, None])[draw.log_count < math.inf].any())
    best = outputs.topk(10).indices
    hits = (draw.ids[:, :10, None] == best[:, None]).any(-1).float().mean()
    assert hits > 0.7  # an approximate search
    assert sampler.numbers(7) == (17, 0)
    everything = samplers.HeadTail(n, 4, head=n, probe=n)
    everything.update(weight)
    draw = everything.draw(query, 3, exclude=target)
    assert bool((draw.log_count[:, n:] == math.inf).all())
    torch.testing.assert_close((outputs.gather(1, draw.ids) - draw.log_count).exp().sum(-1), truth)


@pytest.mark.parametrize("name", ["two_pass", "head_tail"])
def test_samplers_with_two_parts_in_the_layer(name):
    torch.manual_seed(0)
    head = SampledSoftmax(4, 60, name, 4000, bias=True, **({"candidates": 40_000} if name == "two_pass" else {}))
    query, target = torch.randn(8, 4), torch.randint(60, (8,))
    loss = head(query, target)
    loss.backward()
    torch.testing.assert_close(loss, head.eval()(query, target), rtol=0.01, atol=0)
    assert head.weight.grad.is_sparse
    with pytest.raises(ValueError, match="has no single distribution"):
        head.sampler.log_prob(query, target[:, None])


def test_a_shard_gets_its_part_of_what_is_for_all_classes():
    part, counts = samplers.Part(10, 20, 40, 4), torch.arange(40)
    made = samplers.create("head_tail", 40, 4, part=part, head=10, probe=8)
    assert (made.num_classes, made.head, made.probe) == (10, 3, 2)
    made = samplers.create("two_pass", 40, 4, part=part, candidates=100, counts=counts)
    assert (made.num_classes, made.candidates) == (10, 25)
    torch.testing.assert_close(made.first.table.weight, counts[10:20].double())
    assert samplers.create("two_pass", 40, 4, part=part).candidates == 1024


def test_a_head_is_no_larger_than_what_the_search_visits():
    sampler = samplers.HeadTail(300, 4, head=200, probe=1)
    sampler.update(torch.randn(300, 4))
    draw = sampler.draw(torch.randn(3, 4), 2)
    assert draw.ids.shape[-1] == sum(sampler.numbers(2)) < 200
