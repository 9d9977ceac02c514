"""Layers of related work: normalised probabilities, gradients of their formulas, and bias where there is one."""

import heapq
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from manyclass import diagnostics, losses, optim
from manyclass.losses import hierarchical, spherical

N, D, BATCH = 23, 4, 6


def batch(seed: int = 0, n: int = N) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, D, generator=generator), torch.randint(n, (BATCH,), generator=generator)


def counts(n: int = N) -> torch.Tensor:
    return torch.tensor([1000 // (i + 1) for i in range(n)])


def vectors(n: int = N) -> torch.Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(n))


# --- hierarchical softmax -------------------------------------------------------------------------------------------

TREES = {
    "huffman": lambda n=N, **options: losses.HierarchicalSoftmax(D, n, counts=counts(n), **options),
    "halves": lambda n=N, **options: losses.HierarchicalSoftmax(D, n, embeddings=vectors(n), **options),
}


@pytest.mark.parametrize("make", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("n", [2, 3, 8, N])
def test_probabilities_of_a_tree_sum_to_one(make, n):
    torch.manual_seed(0)
    head = make(n)
    with torch.no_grad():
        head.weight.normal_()
    query, target = batch(n=n)
    log_prob = head.log_prob(query)
    torch.testing.assert_close(log_prob.exp().sum(-1), torch.ones(BATCH))
    assert float(log_prob.detach().exp().std()) > 0
    torch.testing.assert_close(head(query, target), -log_prob.gather(1, target[:, None]).mean())
    torch.testing.assert_close(head.eval()(query, target), -log_prob.gather(1, target[:, None]).mean())
    value, ids = head.topk(query, min(5, n))
    expected = log_prob.topk(min(5, n))
    torch.testing.assert_close(value, expected.values)
    assert torch.equal(ids, expected.indices)
    assert torch.equal(head.predict(query), log_prob.argmax(-1))


@pytest.mark.parametrize("make", TREES.values(), ids=TREES.keys())
def test_every_inner_node_parts_its_classes_in_two(make):
    head = make()
    paths = [
        dict(zip(head.node[a:b].tolist(), head.side[a:b].tolist(), strict=True))
        for a, b in itertools.pairwise(head.offsets.tolist())
    ]
    assert sum(2.0 ** -len(path) for path in paths) == 1
    for node in range(N - 1):
        met = [path for path in paths if node in path]
        assert {path[node] for path in met} == {-1, 1}
    # Two classes part at one node exactly: their sides differ at one of the nodes that both meet.
    for one, other in itertools.combinations(paths, 2):
        assert sum(one[node] != other[node] for node in one.keys() & other.keys()) == 1


def test_huffman_paths_are_the_shortest():
    heap, cost = sorted(counts().tolist()), 0
    while len(heap) > 1:
        total = heapq.heappop(heap) + heapq.heappop(heap)
        cost += total
        heapq.heappush(heap, total)
    depth = hierarchical.huffman(counts()).offsets.diff()
    assert int((depth * counts()).sum()) == cost
    assert depth[0] < depth[-1]


def test_halves_are_neighbours_and_balanced():
    torch.manual_seed(0)
    paths = hierarchical.halves(torch.cat([torch.randn(16, 3) - 20, torch.randn(16, 3) + 20]))
    assert paths.offsets.diff().tolist() == [5] * 32
    first = paths.side.view(32, 5)[:, 0]
    assert first[:16].unique().numel() == first[16:].unique().numel() == 1
    assert first[0] != first[16]


@pytest.mark.parametrize("make", TREES.values(), ids=TREES.keys())
def test_gradients_of_a_tree_are_sparse_and_right(make):
    head, (query, target) = make(), batch()
    target[0] = -100
    free = query.clone().requires_grad_()
    head(free, target).backward()
    grad, query_grad = head.weight.grad.to_dense(), free.grad
    assert head.weight.grad.is_sparse
    assert len(head.weight.grad.coalesce().values()) < N - 1
    free, dense = query.clone().requires_grad_(), make(sparse=False)
    dense.load_state_dict(head.state_dict())
    loss = -dense.log_prob(free)[1:].gather(1, target[1:, None]).mean()
    loss.backward()
    torch.testing.assert_close(grad, dense.weight.grad)
    torch.testing.assert_close(query_grad, free.grad)


def test_a_tree_learns():
    torch.manual_seed(0)
    head, (query, target) = TREES["huffman"](), batch()
    optimizer = optim.SGD(head.parameters(), lr=1.0)
    first = float(head(query, target).detach())
    for _ in range(200):
        optimizer.zero_grad()
        loss = head(query, target)
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.1 * first


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "give either counts"),
        ({"counts": torch.ones(5)}, ValueError, r"counts must have shape \(23,\), got \(5,\)"),
        ({"counts": -torch.ones(N)}, ValueError, "counts must be finite and not negative"),
        ({"embeddings": torch.ones(N)}, ValueError, r"embeddings must have shape \(23, columns\)"),
        ({"counts": torch.ones(N), "bias": True}, TypeError, "does not take bias"),
    ],
)
def test_wrong_trees(options, error, message):
    with pytest.raises(error, match=message):
        losses.HierarchicalSoftmax(D, N, **options)


def test_adaptive_softmax_is_normalised_in_any_order_of_classes():
    torch.manual_seed(0)
    frequency = counts().roll(7)
    head, (query, target) = losses.AdaptiveSoftmax(D, N, counts=frequency), batch()
    log_prob = head.log_prob(query)
    torch.testing.assert_close(log_prob.exp().sum(-1), torch.ones(BATCH))
    torch.testing.assert_close(head(query, target), -log_prob.gather(1, target[:, None]).mean())
    target[0] = -100
    torch.testing.assert_close(head(query, target), -log_prob[1:].gather(1, target[1:, None]).mean())
    assert float(head(query, torch.full((BATCH,), -100)).detach()) == 0
    value, ids = head.topk(query, 4)
    torch.testing.assert_close(value, log_prob.topk(4).values)
    assert torch.equal(ids, log_prob.topk(4).indices)
    assert int(head.rank[7]) == 0  # the most frequent class


# --- spherical and Taylor softmax -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "mass"),
    [
        (lambda **o: losses.SphericalSoftmax(D, N, epsilon=0.3, **o), lambda o: o**2 + 0.3),
        (lambda **o: losses.TaylorSoftmax(D, N, **o), lambda o: 1 + o + o**2 / 2),
    ],
    ids=["spherical", "taylor"],
)
def test_quadratic_softmaxes(make, mass):
    torch.manual_seed(0)
    head, (query, target) = make(bias=True), batch()
    free = query.clone().requires_grad_()
    p = mass((free @ head.weight.T + head.bias).double())
    expected = -(p / p.sum(-1, keepdim=True)).gather(1, target[:, None]).log().mean()
    grads = torch.autograd.grad(expected, [free, head.weight], retain_graph=True)
    loss = head(free, target)
    torch.testing.assert_close(loss.double(), expected)
    torch.testing.assert_close(torch.autograd.grad(loss, [free, head.weight]), grads)
    torch.testing.assert_close(head.eval()(query, target).double(), expected)
    log_prob = head.log_prob(query)
    torch.testing.assert_close(log_prob.exp().sum(-1), torch.ones(BATCH))
    value, ids = head.topk(query, 4)
    torch.testing.assert_close(value, log_prob.topk(4).values)
    assert torch.equal(ids, log_prob.topk(4).indices)


@pytest.mark.parametrize("fold", [False, True])
def test_the_spherical_update_is_sgd_on_the_full_loss(fold, monkeypatch):
    if fold:
        monkeypatch.setattr(spherical, "STEPS", 3)
    torch.manual_seed(0)
    head = losses.SphericalSoftmax(D, N, epsilon=0.3, dtype=torch.float64)
    factored = losses.SphericalUpdate(head.weight, epsilon=0.3)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.2)
    for step in range(40):
        query, target = batch(step)
        free = query.double().requires_grad_()
        optimizer.zero_grad()
        expected = head(free, target)
        expected.backward()
        optimizer.step()
        loss, grad = factored.step(query.double(), target, 0.2)
        torch.testing.assert_close(loss.mean(), expected.detach())
        torch.testing.assert_close(grad, free.grad)
    torch.testing.assert_close(factored.weight(), head.weight.detach())
    torch.testing.assert_close(factored.q, head.weight.detach().T @ head.weight.detach())
    assert factored.folds == (14 if fold else 1)


def test_a_spherical_step_writes_the_rows_of_its_targets_only():
    """So that its cost does not depend on the number of classes, though all class weights change."""
    weight = torch.randn(1000, D, generator=torch.Generator().manual_seed(0))
    factored, (query, target) = losses.SphericalUpdate(weight), batch(n=1000)
    factored.step(query, target, 0.2)
    written = (factored.v != weight).any(dim=-1).nonzero().squeeze(-1)
    assert torch.equal(written, target.unique())
    assert factored.folds == 1
    assert bool((factored.weight() != weight).any(dim=-1).all())


def test_the_spherical_update_survives_a_step_that_makes_its_factor_singular():
    """A rate that sends U through zero: W·(1 − hhᵀ·2·lr/z) has a vanishing column, but W itself stays right."""
    weight = torch.randn(N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    factored, query, target = losses.SphericalUpdate(weight, 0.3), torch.eye(D)[:1].double(), torch.tensor([3])
    z = float((weight[:, 0] ** 2).sum()) + N * 0.3
    lr = z / 2
    free = weight.clone().requires_grad_()
    mass = (query @ free.T).square() + 0.3
    (mass.sum().log() - mass[0, 3].log()).backward()
    factored.step(query, target, lr)
    assert factored.folds == 2
    torch.testing.assert_close(factored.weight(), weight - lr * free.grad)
    with pytest.raises(ValueError, match="lr must be positive"):
        factored.step(query, target, 0.0)


# --- BlackOut and scalable cross entropy ----------------------------------------------------------------------------


def test_blackout_is_its_formula():
    torch.manual_seed(0)
    head, (query, target) = losses.BlackOut(D, N, "unigram", 5, counts=counts()), batch()
    loss = head(query, target, generator=torch.Generator().manual_seed(1))
    loss.backward()
    draw = head.sampler.draw(query, 5, exclude=target, generator=torch.Generator().manual_seed(1))
    assert not bool((draw.ids == target[:, None]).any())
    q = counts().double() / counts().sum()
    dense = head.weight.detach().clone().requires_grad_()
    mass = (query @ dense.T).double().exp()
    total = 0.0
    for e in range(BATCH):
        y, noise = int(target[e]), draw.ids[e].tolist()
        of_noise = [mass[e, k] / (q[k] / (1 - q[y])) for k in noise]
        own = mass[e, y] / q[y]
        z = own + sum(of_noise)
        total = total - (own / z).log() - sum((1 - one / z).log() for one in of_noise)
    torch.testing.assert_close(loss.double(), total / BATCH)
    (total / BATCH).backward()
    torch.testing.assert_close(head.weight.grad.to_dense(), dense.grad)
    with pytest.raises(ValueError, match="sampler must have one distribution"):
        losses.BlackOut(D, N, "blocks")


@pytest.mark.parametrize("bias", [False, True])
def test_scalable_cross_entropy_with_one_bucket_of_all_is_exact(bias):
    torch.manual_seed(0)
    options = {"buckets": 1, "bucket_queries": BATCH, "bucket_classes": N, "bias": bias}
    head, (query, target) = losses.ScalableCrossEntropy(D, N, **options), batch()
    free = query.clone().requires_grad_()
    loss = head(free, target)
    loss.backward()
    dense = head.weight.detach().clone().requires_grad_()
    again = query.clone().requires_grad_()
    expected = F.cross_entropy(again @ dense.T + (0 if head.bias is None else head.bias.detach()), target)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(free.grad, again.grad)
    assert head.weight.grad.is_sparse
    torch.testing.assert_close(head.weight.grad.to_dense(), dense.grad)


def test_scalable_cross_entropy_is_a_lower_bound():
    """Never above the exact loss, for any query; below it by the mass outside of the buckets."""
    torch.manual_seed(0)
    n, query = 400, torch.randn(32, D)
    target = torch.randint(n, (32,))
    gaps = []
    for classes in (8, 64, 256):
        head = losses.ScalableCrossEntropy(D, n, bucket_classes=classes, reduction="none")
        torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
        exact = F.cross_entropy(query @ head.weight.T, target, reduction="none")
        sampled = head(query, target, generator=torch.Generator().manual_seed(1))
        assert bool((sampled <= exact + 1e-5).all())
        gaps.append(float((exact - sampled).mean().detach()))
    assert gaps[0] > 2 * gaps[1] > 4 * gaps[2] > 0


def test_the_bias_of_scalable_cross_entropy_is_measured():
    """`diagnostics` compares training losses with exact ones, in buckets of the whole batch, for some examples."""
    torch.manual_seed(0)
    n, size = 400, 64
    query, target = 1.5 * torch.randn(size, D), torch.randint(n, (size,))
    head = losses.ScalableCrossEntropy(D, n, bucket_classes=32, reduction="none")
    torch.nn.init.normal_(head.weight)
    with pytest.raises(ValueError, match="diagnostics need a training step"):
        head.diagnostics()
    exact, generator = F.cross_entropy(query @ head.weight.T, target, reduction="none"), torch.Generator()
    generator.manual_seed(0)
    trained = torch.stack([head(query, target, generator=generator) for _ in range(diagnostics.DRAWS)])
    difference, before = (trained - exact).detach(), torch.get_rng_state()
    for examples, every in ((size, 1), (10, 7)):
        measured = head.diagnostics(examples)
        assert measured.bias == pytest.approx(float(difference[:, ::every].mean()), rel=1e-4)
        assert measured.error == pytest.approx(float(difference[:, ::every].square().mean().sqrt()), rel=1e-4)
        assert measured.bias < -0.3
        assert measured.gradient_error > 0.1
    assert torch.equal(before, torch.get_rng_state())  # a run that is measured trains as one that is not
    head = losses.ScalableCrossEntropy(D, n, buckets=1, bucket_queries=size, bucket_classes=n)
    head(query, target)
    measured = head.diagnostics()
    assert measured.error < 1e-5
    assert measured.gradient_error < 1e-4


def test_scalable_cross_entropy_without_examples():
    head = losses.ScalableCrossEntropy(D, N)
    loss = head(torch.zeros(2, D, requires_grad=True), torch.tensor([-100, -100]))
    assert float(loss.detach()) == 0
    loss.backward()


@pytest.mark.parametrize("kind", [losses.ScalableCrossEntropy, losses.TaylorSoftmax, losses.SphericalSoftmax])
def test_layers_have_a_table_of_all_classes(kind):
    for name in ("classes", "cosine", "shard"):
        with pytest.raises(TypeError, match=f"{kind.__name__} does not take {name}"):
            kind(D, N, **{name: None})


def test_an_example_has_one_target():
    """Several targets of an example would need a loss of their own: refused, not summed in some way."""
    heads = [losses.TaylorSoftmax(D, N), losses.SphericalSoftmax(D, N), losses.ScalableCrossEntropy(D, N)]
    heads += [kind(D, N, "uniform") for kind in (losses.NoiseContrastive, losses.NegativeSampling, losses.BlackOut)]
    heads += [make() for make in TREES.values()] + [losses.AdaptiveSoftmax(D, N, counts=counts())]
    for head in heads:
        for k in (2, BATCH):
            with pytest.raises(ValueError, match=r"target must have shape \(6,\)"):
                head(batch()[0], torch.zeros(BATCH, k).long())


def test_what_blackout_and_nce_have_as_their_optimum():
    """Gradients by the outputs at ln p, over targets and draws by enumeration: 0 for NCE, not for BlackOut."""
    p, q = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    slopes = {}
    for kind in (losses.NoiseContrastive, losses.BlackOut):
        head, outputs = kind(D, 4, "uniform"), (p.log() + math.log(4)).requires_grad_()
        total = torch.zeros(())
        for y in range(4):
            allowed = (torch.arange(4) != y) if head.excludes_target else torch.ones(4)
            noise = q * allowed / (q * allowed).sum()
            for ids in itertools.product(range(4), repeat=2):
                index, chance = torch.tensor(ids), p[y] * noise[list(ids)].prod()
                if chance > 0:
                    count = (2 * noise[index]).log().unsqueeze(0)
                    arguments = (outputs[y].reshape(1), outputs[index].unsqueeze(0), count, (2 * q[y]).log().reshape(1))
                    total = total + chance * head._losses(*arguments).sum()
        slopes[kind.__name__] = float(torch.autograd.grad(total, outputs)[0].abs().max())
    assert slopes["NoiseContrastive"] < 1e-6 < 0.01 < slopes["BlackOut"]
