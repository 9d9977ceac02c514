"""The training loop, from top to bottom: one for all tasks."""

import math
import platform
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Any, cast

import torch
from torch import Tensor, nn

from .atomic import replacing
from .clip import clip_grad_norm_
from .data import Vocabulary
from .data.files import Advance, ignore
from .head import SampledSoftmax
from .models import FullSoftmax
from .run import Metrics, Run
from .settings import Settings
from .tasks import TASKS, Batch, Task
from .tasks.base import IGNORE

# The TensorFlow tutorial's schedule, which the paper trained with: 39 epochs, of which six at the full rate.
PAPER_EPOCHS, PAPER_CONSTANT, PAPER_DECAY = 39, 6, 0.8


class Model(nn.Module):
    """A trunk and the output layer on it.

    Args:
        task: what the model is for.
        settings: of the run.
    """

    def __init__(self, task: Task[Any], settings: Settings) -> None:
        super().__init__()
        self.recurrent = task.recurrent
        self.trunk = task.trunk()
        embedding = None
        full = settings.sampler == "full"
        if getattr(settings, "tied", False):
            embedding = cast(nn.Embedding, self.trunk.embedding)
            embedding.sparse = not full
        options: dict[str, Any] = {"prediction": settings.prediction, "embedding": embedding, "ignore_index": IGNORE}
        features = settings.features  # pyright: ignore[reportAttributeAccessIssue]
        if full:
            self.head: SampledSoftmax = FullSoftmax(features, task.num_classes, **options)
            return
        if settings.scope is not None:
            options["scope"] = settings.scope
        if settings.sampler in ("unigram", "bigram"):
            target, context = task.pairs()
            if settings.sampler == "unigram":
                options["counts"] = torch.bincount(target, minlength=task.num_classes) + 1
                options["power"] = settings.power
            elif int(context.max()) == IGNORE:
                raise ValueError("--sampler bigram needs a class before each, which documents do not have")
            else:
                options["pairs"] = torch.stack([context, target], dim=1)
        self.head = SampledSoftmax(
            features,
            task.num_classes,
            settings.sampler,
            settings.num_samples,
            target_bias=settings.target_bias,
            **options,
        )

    def hidden(self, batch: Batch, state: Any = None) -> tuple[Tensor, Any]:
        """Hidden states ``(batch, time, features)``, and the state to go on from."""
        return self.trunk(*batch.inputs, state) if self.recurrent else (self.trunk(*batch.inputs), None)

    def forward(self, batch: Batch, state: Any = None) -> tuple[Tensor, Any]:
        """Mean loss over all targets, and the state to go on from."""
        hidden, state = self.hidden(batch, state)
        *places, labels = batch.target.shape
        query = hidden.unsqueeze(2).expand(*places, labels, -1)
        context = None if batch.context is None else batch.context.unsqueeze(2).expand_as(batch.target)
        return self.head(query, batch.target, context=context), state

    def weights(self) -> dict[str, Tensor]:
        """All parameters, each once."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    def buffers_and_extras(self) -> dict[str, Any]:
        """What else the state has: the sampler's statistics."""
        names = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        return {name: value for name, value in self.state_dict().items() if name not in names}

    def restore(self, weights: dict[str, Tensor], rest: dict[str, Any]) -> None:
        """Take over what `weights` and `buffers_and_extras` gave."""
        shared = {}  # a tied weight has one name in a checkpoint and two in the model
        for name, parameter in self.named_parameters(remove_duplicate=False):
            first = next(other for other, same in self.named_parameters() if same is parameter)
            shared[name] = weights[first]
        self.load_state_dict({**shared, **rest})


class Observer:
    """Is told how a run goes on, and asked whether to go on; this one says nothing and lets it go on."""

    def step(self, step: int, steps: int, last: Metrics) -> None:
        """A step is done."""

    def stopped(self) -> bool:
        """Whether somebody wants the run to stop."""
        return False


def prepare(name: str, settings: Settings, advance: Advance = ignore) -> Task[Any]:
    """Read the data of a run into its folder; or, with ``resume``, find them there."""
    run, (_, kind) = Run(settings.out), TASKS[name]
    if run.exists():
        if not settings.resume:
            raise FileExistsError(f"{settings.out} holds a run already: give --resume, or another --out")
        config = run.config()
        if config["task"] != name:
            raise ValueError(f"{settings.out} is a run of {config['task']}, not of {name}")
        for option in settings.differences(config["settings"]):
            new, old = settings.to_json()[option], config["settings"].get(option)
            raise ValueError(f"{settings.out} was begun with {option}={old}, so it cannot go on with {option}={new}")
        return kind(settings, run.data, Vocabulary.read(run.vocabulary))
    try:
        with replacing(run.data) as temporary:
            temporary.mkdir()
            vocabulary = kind.prepare(settings, temporary, advance)
            task = kind(settings, temporary, vocabulary)  # complains if it cannot be trained on
            if run.data.exists():  # of a run that was stopped before it had begun
                shutil.rmtree(run.data)
    except BaseException:
        with suppress(OSError):  # leave nothing behind
            settings.out.rmdir()
        raise
    vocabulary.write(run.vocabulary)
    return task  # its files have a new name, but stay mapped into memory


def train(task: Task[Any], observer: Observer | None = None) -> list[Metrics]:
    """Train as the task's settings say, or go on from the last checkpoint; returns all evaluations of the run.

    A run is a function of its settings: stopped at any moment and resumed, it ends with the same numbers.
    """
    settings, observer, run = task.settings, observer or Observer(), Run(task.settings.out)
    torch.manual_seed(settings.seed)
    model = Model(task, settings)
    if not run.exists():  # not before: what no model can be made of is no run
        run.write_json("config.json", _config(task))
    optimizers = _optimizers(model, settings)
    steps = settings.steps or max(1, round(settings.epochs * task.steps_per_epoch))
    milestones = {round(steps * part / settings.evaluations) for part in range(settings.evaluations + 1)} - {0}
    step, seconds, state, rows = 0, 0.0, None, []
    total, count = 0.0, 0

    def checkpoint() -> None:
        rest = {
            "model": model.buffers_and_extras(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "random": torch.get_rng_state(),
            "state": state,
            "progress": [step, seconds, total, count],
            "rows": [list(row) for row in rows],
        }
        run.save(step, model.weights(), rest)
        run.write_metrics(rows)

    def evaluation() -> Metrics:
        bias = number = None
        if settings.sampler != "full":
            number = model.head.num_samples
            if model.head.sampler.distinct:
                number = min(number, task.num_classes)
            bias = model.head.diagnostics().bias if step else None
        rate = settings.lr * schedule(settings.schedule, max(0, step - 1) / steps)
        loss = evaluate(model, task, settings.eval_examples)["loss"]
        return Metrics(
            step, step / task.steps_per_epoch, seconds, rate, total / count if count else None, loss, bias, number
        )

    found = run.load()
    events = _events(settings, found[1]["progress"][0] if found else 0)
    if found is not None:
        weights, rest = found
        model.restore(weights, rest["model"])
        for optimizer, saved in zip(optimizers, rest["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        torch.set_rng_state(rest["random"])
        state, (step, seconds, total, count) = rest["state"], rest["progress"]
        rows = [Metrics(*row) for row in rest["rows"]]
        run.write_metrics(rows)
    else:
        rows.append(evaluation())
    while step < steps:
        started = time.perf_counter()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * schedule(settings.schedule, step / steps)
        batch = task.batch(step)
        if step % task.steps_per_epoch == 0:
            state = None
        loss, state = model(batch, state)
        model.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), settings.clip)
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        seconds += time.perf_counter() - started
        total, count = total + float(loss.detach()), count + 1
        if step in milestones:
            rows.append(evaluation())
            total, count = 0.0, 0
            events(rows[-1])
        stopped = observer.stopped()
        if step in milestones or step % settings.checkpoint_every == 0 or stopped:
            checkpoint()
        observer.step(step, steps, rows[-1])
        if stopped:
            break
    return rows


def _config(task: Task[Any]) -> dict[str, Any]:
    return {
        "task": task.name,
        "manyclass": version("manyclass"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "num_classes": task.num_classes,
        "train_examples": task.train_examples,
        "heldout_examples": task.heldout_examples,
        "threads": torch.get_num_threads(),
        "settings": task.settings.to_json(),
    }


def schedule(name: str, done: float) -> float:
    """Factor of the learning rate when the share ``done`` of a run is done."""
    if name == "linear":
        return min(1.0, 2 * (1 - done))
    if name == "exponential":
        return PAPER_DECAY ** max(0, math.floor(done * PAPER_EPOCHS) - PAPER_CONSTANT + 1)
    return 1.0


@torch.no_grad()
def evaluate(model: Model, task: Task[Any], limit: int | None = None, k: tuple[int, ...] = ()) -> dict[str, float]:
    """Exact loss on held-out data, over all classes, and for each ``k`` the ranking measures of `ranking`."""
    training = model.training
    model.eval()
    sums: dict[str, float] = {}
    targets = queries = 0
    state = None
    for batch in task.heldout(limit):
        hidden, state = model.hidden(batch, state)
        wanted = batch.target != IGNORE
        kept = wanted.any(dim=-1)
        query, target = hidden[kept], batch.target[kept]
        loss = model.head(query.unsqueeze(1).expand(*target.shape, -1), target)
        found = {"loss": float(loss) * int(wanted.sum())}
        if k:
            found |= ranking(model.head.topk(query, min(max(k), task.num_classes))[1], target, k)
        sums = {name: sums.get(name, 0.0) + value for name, value in found.items()}
        targets, queries = targets + int(wanted.sum()), queries + len(query)
    model.train(training)
    return {name: value / (targets if name == "loss" else queries) for name, value in sums.items()}


def ranking(best: Tensor, target: Tensor, cutoffs: tuple[int, ...]) -> dict[str, float]:
    """Sums over queries of recall, precision, MRR and NDCG at each cut-off.

    Args:
        best: classes, best first, ``(queries, at least max(cutoffs))``.
        target: the classes that are right, ``(queries, labels)``, padded with `IGNORE`.
        cutoffs: the k.
    """
    hit = (best.unsqueeze(-1) == target.unsqueeze(1)).any(dim=-1).double()
    right = (target != IGNORE).sum(dim=-1)
    discount = 1 / torch.arange(2, best.shape[1] + 2, dtype=torch.double).log2()
    sums = {}
    for k in cutoffs:
        first = hit[:, :k]
        place = first.argmax(dim=-1) + 1
        ideal = discount[:k].cumsum(0)[right.clamp(max=min(k, best.shape[1])) - 1]
        sums[f"recall@{k}"] = float((first.sum(dim=-1) / right).sum())
        sums[f"precision@{k}"] = float(first.sum() / k)
        sums[f"mrr@{k}"] = float((first.amax(dim=-1) / place).sum())
        sums[f"ndcg@{k}"] = float(((first * discount[:k]).sum(dim=-1) / ideal).sum())
    return sums


def load(run: Run) -> tuple[Model, Task[Any], int]:
    """The model of a run's last checkpoint, its task and its step."""
    config = run.config()
    settings_type, kind = TASKS[config["task"]]
    settings = settings_type(**{**config["settings"], "out": run.folder})
    task = kind(settings, run.data, Vocabulary.read(run.vocabulary))
    found = run.load()
    if found is None:
        raise ValueError(f"{run.folder} has no checkpoint yet")
    model = Model(task, settings)
    model.restore(found[0], found[1]["model"])
    return model.eval(), task, found[1]["progress"][0]


def _optimizers(model: Model, settings: Settings) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    if settings.optimizer == "adagrad":
        return [torch.optim.Adagrad(parameters, lr=settings.lr)]
    if settings.optimizer == "sgd":
        return [torch.optim.SGD(parameters, lr=settings.lr)]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    sparse = {id(table.weight) for table in tables if table.sparse}
    return [
        kind([parameter for parameter in parameters if (id(parameter) in sparse) is wanted], lr=settings.lr)
        for kind, wanted in ((torch.optim.Adam, False), (torch.optim.SparseAdam, True))
        if any((id(parameter) in sparse) is wanted for parameter in parameters)
    ]


def _events(settings: Settings, step: int) -> Callable[[Metrics], None]:
    """Where evaluations go besides the table: TensorBoard, if wanted."""
    if not settings.tensorboard:
        return lambda row: None
    try:
        from torch.utils.tensorboard import SummaryWriter  # pyright: ignore
    except ModuleNotFoundError as error:
        raise ValueError("--tensorboard needs a package: pip install 'manyclass[tensorboard]'") from error

    writer = SummaryWriter(str(settings.out / "tensorboard"), purge_step=step + 1)

    def write(row: Metrics) -> None:
        for name in ("train_loss", "heldout_loss", "bias", "lr"):
            value = getattr(row, name)
            if value is not None:
                writer.add_scalar(name, value, row.step)
        writer.flush()

    return write
