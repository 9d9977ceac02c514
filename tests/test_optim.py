"""Optimisers for dense and sparse gradients: against torch's, by rows, and with all that training puts around them."""

import copy
import io
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import manyclass
from manyclass import optim
from manyclass.optim import lazy, rows

N, D = 30, 5
KINDS = [
    ("AdamW", {"weight_decay": 0.1}),
    ("AdamW", {"maximize": True, "betas": (0.8, 0.95)}),
    ("Adam", {}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("SGD", {"weight_decay": 0.1}),
    ("SGD", {"momentum": 0.8}),
]


def table(shape=(N, D), seed=0, dtype=torch.float32):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype))


def gradient(rows, seed, shape=(N, D), dtype=torch.float32):
    """A sparse gradient of distinct rows."""
    rows = torch.tensor(sorted(rows), dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(rows), *shape[1:], generator=generator, dtype=dtype)
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True)


def some_rows(step):
    return torch.randperm(N, generator=torch.Generator().manual_seed(step))[: N // 3].tolist()


def assert_same_state(optimizer, other):
    for a, b in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key].dtype == b[key].dtype
            assert torch.equal(a[key], b[key])


def pair(kind, options, shape=(N, D), lr=0.1):
    """A parameter and its optimiser; and the same with torch's."""
    mine, torchs = table(shape), table(shape)
    optimizers = getattr(optim, kind)([mine], lr=lr, **options), getattr(torch.optim, kind)([torchs], lr=lr, **options)
    return mine, torchs, *optimizers


@pytest.mark.parametrize("shape", [(N, D), (N, 1), (N,), (N, 2, 3)])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_gradients_of_all_rows_are_as_dense_ones(kind, options, shape, backend):
    sparse, dense, mine, torchs = pair(kind, options, shape)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)) for o in (mine, torchs)]
    for step in range(12):
        sparse.grad = gradient(range(N), step, shape)
        dense.grad = sparse.grad.to_dense()
        for optimizer, schedule in zip((mine, torchs), schedules, strict=True):
            optimizer.step()
            schedule.step()
    torch.testing.assert_close(sparse, dense, rtol=1e-5, atol=1e-5)
    assert (sparse - table(shape)).abs().max() > 0.1


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_rows_catch_up_with_the_dense_optimiser(kind, options, backend):
    """Rows 0 to 4 never have a gradient, others now and then; rates change; training goes on from a flush."""
    sparse, dense, mine, torchs = pair(kind, options)
    before, waiting = sparse.detach().clone(), 0.0
    for step in range(60):
        for optimizer in (mine, torchs):
            optimizer.param_groups[0]["lr"] = 0.1 * math.cos(step) ** 2
        chosen = [row for row in some_rows(step) if row >= 5]
        sparse.grad = gradient(chosen, step)
        dense.grad = sparse.grad.to_dense()
        mine.step()
        torchs.step()
        changed = (sparse != before).any(1).nonzero().flatten()
        assert changed.tolist() == sorted(chosen)  # nothing else moves unseen
        if step in (30, 59):
            waiting = float((sparse - dense).detach().abs().max())
            mine.flush()
            torch.testing.assert_close(sparse, dense, rtol=1e-5, atol=1e-5)
            flushed = sparse.detach().clone()
            mine.flush()
            assert torch.equal(sparse, flushed)
        before = sparse.detach().clone()
    assert (waiting > 0.01) == (kind != "Adagrad")


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_after_long_absence(kind, options, backend, monkeypatch):
    """Momentum has faded by then, no number under- or overflows, and the sums needed more room."""
    monkeypatch.setattr(lazy, "CAPACITY", 64)
    sparse, dense, mine, torchs = pair(kind, options, lr=0.01)
    for step in range(500):
        sparse.grad = gradient([1] if step in (0, 498) else [2], step)
        dense.grad = sparse.grad.to_dense()
        mine.step()
        torchs.step()
    mine.flush()
    torch.testing.assert_close(sparse, dense, rtol=1e-4, atol=1e-5)
    assert all(torch.isfinite(value).all() for value in mine.state[sparse].values())


def test_rows_that_share_a_second_moment_catch_up():
    """If all numbers of a row have the same gradient, one second moment per row is no restriction."""
    sparse, dense = table(), table()
    mine, torchs = optim.AdamW([sparse], lr=0.1, rowwise=True), torch.optim.AdamW([dense], lr=0.1)
    for step in range(20):
        grad = gradient(some_rows(step), step)
        sparse.grad = torch.sparse_coo_tensor(grad.indices(), grad.values()[:, :1].expand(-1, D), (N, D))
        dense.grad = sparse.grad.to_dense()
        mine.step()
        torchs.step()
    mine.flush()
    torch.testing.assert_close(sparse, dense, rtol=1e-5, atol=1e-5)


def test_one_second_moment_per_row(backend):
    weight, beta1, beta2, steps = table(), 0.9, 0.999, 6
    optimizer = optim.Adam([weight], lr=0.1, rowwise=True)
    wanted, first, second = table().detach(), torch.zeros(N, D), torch.zeros(N, 1)
    for step in range(1, steps):
        weight.grad = gradient(range(N), step)
        optimizer.step()
        grad = weight.grad.to_dense()
        first = beta1 * first + (1 - beta1) * grad
        second = beta2 * second + (1 - beta2) * grad.square().mean(1, keepdim=True)
        wanted -= 0.1 * first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + 1e-8)
    torch.testing.assert_close(weight.detach(), wanted)
    assert optimizer.state[weight]["exp_avg_sq"].shape == (N, 1)
    sums = optim.Adagrad([weight], rowwise=True, initial_accumulator_value=2.0)
    sums.step()
    expected = 2 + weight.grad.to_dense().square().mean(1, keepdim=True)
    torch.testing.assert_close(sums.state[weight]["sum"], expected)


@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 70)),
    moments=st.tuples(st.booleans(), st.sampled_from(["none", "rows", "full"])),
    seed=st.integers(0, 999),
)
@settings(deadline=None, derandomize=True, max_examples=100)
def test_the_native_kernel_is_the_reference(sizes, moments, seed):
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.rand(shape, generator=generator)

    chosen = (rand(sizes[0]) < 0.5).nonzero().flatten()
    weight, grad = rand(*sizes), rand(len(chosen), sizes[1]) - 0.5
    first = rand(*sizes) if moments[0] else None
    second = {"none": None, "rows": rand(sizes[0], 1), "full": rand(*sizes)}[moments[1]]
    missed = rand(len(chosen), 5)
    update = rows.RowUpdate(rate=0.3, gain1=0.7, gain2=0.5, root=1.4, eps=0.2)
    results = []
    for call in (rows.update_rows_, rows.update_rows_reference_):
        tables = [None if part is None else part.clone() for part in (weight, first, second)]
        call(*tables, chosen, grad, missed, update)
        results.append(tables)
    for native, reference in zip(*results, strict=True):
        if native is not None:
            torch.testing.assert_close(native, reference, rtol=1e-5, atol=1e-5)
    absent = torch.ones(sizes[0], dtype=torch.bool).index_fill(0, chosen, False)
    assert torch.equal(results[0][0][absent], weight[absent])


def test_the_native_kernel_is_the_one_in_use(monkeypatch):
    monkeypatch.setattr(rows, "update_rows_reference_", None)
    for dtype in (torch.float32, torch.float64):
        weight = table(dtype=dtype)
        weight.grad = gradient([3, 4], 0, dtype=dtype)
        if dtype == torch.float32:
            optim.AdamW([weight]).step()
        else:
            with pytest.raises(TypeError):
                optim.AdamW([weight]).step()


def test_results_do_not_depend_on_threads():
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            weight = table((1000, 33))
            optimizer = optim.AdamW([weight])
            for step in range(2):
                weight.grad = gradient(range(step, 1000, 3), step, (1000, 33))
                optimizer.step()
            results.append(weight.detach().clone())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("foreach", [None, True, False])
def test_dense_and_sparse_gradients_in_one_optimiser(foreach):
    """The dense part is torch's, to the last bit; a Lightning-like loop has one optimiser and clips all gradients."""
    torch.manual_seed(0)
    trunk, head = nn.Linear(D, D), manyclass.SampledSoftmax(D, N, "uniform", 8, bias=True)
    twin = copy.deepcopy(trunk)
    optimizer = optim.AdamW([*trunk.parameters(), *head.parameters()], lr=0.01, foreach=foreach)
    torchs = torch.optim.AdamW(twin.parameters(), lr=0.01, foreach=foreach)
    query, target, losses = torch.randn(64, D), torch.randint(N, (64,)), []
    for _ in range(100):
        optimizer.zero_grad()
        loss = head(trunk(query), target)
        loss.backward()
        manyclass.clip_grad_norm_([*trunk.parameters(), *head.parameters()], 1.0)
        for parameter, same in zip(trunk.parameters(), twin.parameters(), strict=True):
            same.grad = parameter.grad.clone()
        optimizer.step()
        torchs.step()
        losses.append(float(loss.detach()))
    assert all(torch.equal(a, b) for a, b in zip(trunk.parameters(), twin.parameters(), strict=True))
    assert sum(losses[-10:]) < sum(losses[:10]) - 5
    assert isinstance(optimizer, torch.optim.AdamW)


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("order", ["sparse first", "dense first"])
def test_a_parameter_may_have_both_kinds_of_gradients(order, rowwise):
    weight, twin = table((N, 1)), table((N, 1))  # of one column: one number per row is all numbers
    wide, wide_twin = table(), table()
    optimizer = optim.AdamW([weight, wide], lr=0.1, weight_decay=0.1, rowwise=rowwise)
    torchs = torch.optim.AdamW([twin, wide_twin], lr=0.1, weight_decay=0.1)
    for step in range(8):
        for parameter, same in ((weight, twin), (wide, wide_twin)):
            grad = gradient(range(N), step, parameter.shape)
            same.grad = grad.to_dense()
            parameter.grad = grad if (step % 4 < 2) == (order == "sparse first") else grad.to_dense()
        optimizer.step()
        torchs.step()
    torch.testing.assert_close(weight, twin)
    if not rowwise:
        torch.testing.assert_close(wide, wide_twin)


def test_uncoalesced_and_empty_gradients(backend):
    weight, twin = table(), table()
    optimizers = [optim.AdamW([weight], lr=0.1), optim.AdamW([twin], lr=0.1)]
    values = torch.randn(3, D)
    weight.grad = torch.sparse_coo_tensor([[7, 2, 7]], values, (N, D))
    twin.grad = weight.grad.coalesce()
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.step()
        weight.grad, twin.grad = gradient([], 0), gradient([], 0)
    assert torch.equal(weight, twin)
    assert optimizers[0].state[weight]["step"] == 2
    assert (weight != table()).any(1).nonzero().flatten().tolist() == [2, 7]


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "Adagrad", "SGD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_goes_on_to_the_same_bits(kind, dtype):
    options = {"AdamW": {"rowwise": True, "weight_decay": 0.1}, "SGD": {"weight_decay": 0.1}}.get(kind, {})

    def train(weight, optimizer, steps):
        for step in steps:
            weight.grad = gradient(some_rows(step), step, dtype=dtype)
            optimizer.step()

    weight = table(dtype=dtype)
    optimizer = getattr(optim, kind)([weight], lr=0.01, **options)
    train(weight, optimizer, range(7))
    file = io.BytesIO()
    torch.save([weight.detach(), optimizer.state_dict()], file)
    pickled = pickle.dumps([weight, optimizer])
    copied = copy.deepcopy([weight, optimizer])
    file.seek(0)
    values, state = torch.load(file, weights_only=True)
    loaded = nn.Parameter(values)
    fresh = getattr(optim, kind)([loaded], lr=0.5)  # the rate comes from the state
    fresh.load_state_dict(state)
    assert_same_state(fresh, optimizer)
    train(weight, optimizer, range(7, 14))
    for other, its in ([loaded, fresh], pickle.loads(pickled), copied):
        train(other, its, range(7, 14))
        assert torch.equal(other, weight)
        assert_same_state(its, optimizer)
        assert its.param_groups[0].get("rowwise") == options.get("rowwise", None if kind == "SGD" else False)


def test_loading_does_not_share_the_history():
    weight, twin = table(), table()
    optimizer, fresh = optim.AdamW([weight]), optim.AdamW([twin])
    weight.grad = gradient([1], 0)
    optimizer.step()
    state = optimizer.state_dict()
    fresh.load_state_dict(state)
    before = state["state"][0][lazy.HISTORY].clone()
    twin.grad = gradient([2], 0)
    fresh.step()
    assert torch.equal(state["state"][0][lazy.HISTORY], before)


def test_grad_scaler():
    """A step with infinite gradients is left out; all others are as without scaling."""
    weight, twin = table(), table()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    mine, plain = optim.AdamW([weight], lr=0.1), optim.AdamW([twin], lr=0.1)
    for step in range(5):
        scale = scaler.get_scale()
        scaler.scale(torch.ones(()))  # as a loss
        weight.grad = gradient(some_rows(step), step) * (math.inf if step == 2 else scale)
        scaler.unscale_(mine)
        norm = manyclass.clip_grad_norm_([weight], 1.0)
        scaler.step(mine)
        scaler.update()
        assert torch.isfinite(norm) == (step != 2)
        if step != 2:
            twin.grad = gradient(some_rows(step), step)
            manyclass.clip_grad_norm_([twin], 1.0)
            plain.step()
    torch.testing.assert_close(weight, twin)
    assert mine.state[weight]["step"] == 4


def test_schedulers_hooks_groups_and_closures():
    weight, other = table(), table()
    optimizer = optim.AdamW([weight])
    torch.optim.AdamW([table()])  # torch wraps the step of this class, too
    optimizer.add_param_group({"params": [other], "lr": 0.5, "rowwise": True})
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)  # moves betas, too

    def closure():
        weight.grad, other.grad = gradient([1], 0), gradient([2], 0)
        return 3.0

    for _ in range(9):
        assert optimizer.step(closure) == 3.0
        scheduler.step()
    assert calls == ["before", "after"] * 9
    assert optimizer.state[weight]["exp_avg_sq"].shape == (N, D)
    assert optimizer.state[other]["exp_avg_sq"].shape == (N, 1)
    assert torch.isfinite(weight).all()


def test_a_parameter_without_a_gradient_stays():
    weight = table()
    optimizer = optim.AdamW([weight])
    optimizer.step()
    optimizer.flush()
    assert torch.equal(weight, table())
    assert not optimizer.state


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("AdamW", {"amsgrad": True}, "amsgrad=True does not work with sparse gradients: maxima"),
        ("AdamW", {"fused": True}, "fused=True does not work with sparse gradients"),
        ("AdamW", {"differentiable": True}, "differentiable=True does not work with sparse gradients"),
        ("AdamW", {"weight_decay": 2.0, "lr": 0.5}, r"lr \* weight_decay must be below 1, got 1.0"),
        ("AdamW", {"betas": (0.9, 0.8)}, r"need betas\[0\]² < betas\[1\], got betas=\(0.9, 0.8\)"),
        ("SGD", {"momentum": 1.0}, "momentum must be below 1 for sparse gradients, got 1.0"),
        ("Adam", {"weight_decay": 0.1}, "weight_decay=0.1 does not work with sparse gradients: .*AdamW"),
        ("Adagrad", {"weight_decay": 0.1}, "weight_decay=0.1 does not work with sparse gradients"),
        ("SGD", {"momentum": 0.9, "weight_decay": 0.1}, "weight_decay=0.1 does not work .*momentum=0.9.* must be 0"),
        ("SGD", {"momentum": 0.9, "nesterov": True}, "nesterov=True does not work with sparse gradients"),
        ("SGD", {"momentum": 0.9, "dampening": 0.5}, "dampening=0.5 does not work with sparse gradients"),
    ],
)
def test_options_for_dense_gradients_only(kind, options, message):
    weight = table()
    optimizer = getattr(optim, kind)([weight], **options)
    weight.grad = gradient([1], 0)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    if not {"lr", "betas", "differentiable"} & options.keys():  # torch takes them for dense gradients
        weight.grad = torch.ones(N, D)
        optimizer.step()


def test_bad_parameters_and_arguments():
    with pytest.raises(TypeError, match="unexpected keyword argument 'row_wise'"):
        optim.AdamW([table()], row_wise=True)
    with pytest.raises(ValueError, match=r"Invalid beta parameter at index 0: 1\.5"):
        optim.AdamW([table()], betas=(1.5, 0.9))
    weight = nn.Parameter(torch.randn(D, N).T)
    weight.grad = gradient([1], 0)
    with pytest.raises(ValueError, match=r"must be contiguous, got strides \(1, 30\)"):
        optim.AdamW([weight]).step()
    weight = table()
    weight.grad = torch.ones(N, D).to_sparse()
    with pytest.raises(ValueError, match="sparse_dim=1, got sparse_dim=2"):
        optim.AdamW([weight]).step()


def test_opcheck():
    native, none = torch.ops.manyclass.update_rows_, torch.zeros(0, D)
    chosen, grad, missed = torch.tensor([1, 4]), torch.randn(2, D), torch.rand(2, 5)
    numbers = (0.1, 0.01, 0.1, 1.0, 1e-8)

    def tables():
        return torch.randn(N, D), torch.randn(N, D), torch.rand(N, D)

    torch.library.opcheck(native.default, (*tables(), chosen, grad, missed, *numbers))
    torch.library.opcheck(native.default, (torch.randn(N, D), none, none.clone(), chosen, grad, missed, *numbers))
    for bad, message in (
        ([1, N], r"rows must be in \[0, 30\), got 30"),
        ([-1, 4], r"rows must be in \[0, 30\), got -1"),
        ([4, 1], "rows must be ascending and distinct"),
        ([4, 4], "rows must be ascending and distinct"),
    ):
        with pytest.raises(ValueError, match=message):
            native(*tables(), torch.tensor(bad), grad, missed, *numbers)
    weight, first, second = tables()
    for arguments, message in (
        ((weight, first, second, chosen, grad[:1], missed), r"grad must be \(2, 5\), got \(1, 5\)"),
        ((weight, first[:7], second, chosen, grad, missed), "first must be empty or have the shape of weight"),
        ((weight, first, second[:, :2].contiguous(), chosen, grad, missed), "second must be empty"),
        ((weight, first, second, chosen, grad, missed[:1]), r"missed must be \(2, 5\), got \(1, 5\)"),
        ((weight.T, first, second, chosen, grad, missed), "weight must be contiguous"),
        ((weight, first, second, chosen.int(), grad, missed), "rows must have the dtype int64"),
    ):
        with pytest.raises(ValueError, match=message):
            native(*arguments, *numbers)
