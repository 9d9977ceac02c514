"""The training loop, from top to bottom: one for all tasks."""

import math
import platform
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from importlib.metadata import version
from typing import Any

import torch

from ..clip import clip_grad_norm_
from . import optimizers as optimisation
from .atomic import replacing
from .data import Vocabulary
from .data.files import Advance, ignore
from .evaluation import evaluate
from .model import Model
from .processes import Processes
from .run import Metrics, Run
from .settings import Settings
from .tasks import TASKS, Task

# The TensorFlow tutorial's schedule, which the paper trained with: 39 epochs, of which six at the full rate.
PAPER_EPOCHS, PAPER_CONSTANT, PAPER_DECAY = 39, 6, 0.8


class Observer:
    """Is told how a run goes on, and asked whether to go on; this one says nothing and lets it go on."""

    def step(self, step: int, steps: int, last: Metrics) -> None:
        """A step is done."""

    def stopped(self) -> bool:
        """Whether somebody wants the run to stop."""
        return False


def prepare(name: str, settings: Settings, advance: Advance = ignore, processes: Processes | None = None) -> Task[Any]:
    """Read the data of a run into its folder; or, with ``resume``, find them there.

    Of several processes the first does it, and all get their part of every batch.
    """
    processes = processes or Processes()
    if processes.first:
        task = _prepare(name, settings, advance)
        processes.after_first(done=True)
    else:
        processes.after_first(done=False)
        run = Run(settings.out)
        task = TASKS[name][1](settings, run.data, Vocabulary.read(run.vocabulary))
    task.part = (processes.rank, processes.world)
    return task


def _prepare(name: str, settings: Settings, advance: Advance) -> Task[Any]:
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
    with run.alone():
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
    run, processes = Run(task.settings.out), Processes(*task.part)
    with run.alone() if processes.first else nullcontext():
        return _train(task, observer or Observer(), run, processes)


def _train(task: Task[Any], observer: Observer, run: Run, processes: Processes) -> list[Metrics]:
    settings = task.settings
    torch.manual_seed(settings.seed)
    model = Model(task, settings)
    if processes.first and not run.exists():  # not before: what no model can be made of is no run
        run.write_json("config.json", _config(task))
    optimizer = optimisation.make(model, settings)
    steps = settings.steps or max(1, round(settings.epochs * task.steps_per_epoch))
    milestones = {round(steps * part / settings.evaluations) for part in range(settings.evaluations + 1)} - {0}
    step, seconds, state, rows = 0, 0.0, None, []
    total, count = 0.0, 0

    def checkpoint() -> None:
        common = {"model": model.buffers_and_extras(), "rows": [list(row) for row in rows]}
        own = {"random": torch.get_rng_state(), "state": state, "progress": [step, seconds, total, count]}
        if processes.world == 1:
            remembered = optimisation.state_by_name(model, optimizer)
            run.save(step, model.weights(), {**common, **own, "optimizer": remembered})
        else:
            from . import checkpoint

            own["shard"] = model.head.shard_state()  # pyright: ignore[reportCallIssue]
            checkpoint.save(run, step, model, optimizer, {**common, "progress": own["progress"]}, own)
        if processes.first:
            run.write_metrics(rows)

    def evaluation() -> Metrics:
        bias = number = None
        if settings.sampler != "full":
            number = model.head.num_samples
            bias = model.head.diagnostics().bias if step else None
        rate = settings.lr * schedule(settings.schedule, max(0, step - 1) / steps)
        loss = evaluate(model, task, settings.eval_examples)["loss"]
        mean = processes.sums([total])[0] / (count * processes.world) if count else None
        return Metrics(step, step / task.steps_per_epoch, seconds, rate, mean, loss, bias, number)

    found = run.load(model.head if processes.world > 1 else None, task.part)
    events = _events(settings, found[1]["progress"][0] if found else 0) if processes.first else lambda row: None
    if found is not None:
        weights, rest = found
        model.restore(weights, rest["model"])
        optimisation.load_state_by_name(model, optimizer, rest["optimizer"])
        state, (step, seconds, total, count) = rest["state"], rest["progress"]
        rows = [Metrics(*row) for row in rest["rows"]]
        if processes.first:
            run.write_metrics(rows)
    if processes.world > 1:
        model.parallelise()
        torch.manual_seed((settings.seed * 1_000_003 + step) * processes.world + processes.rank)  # draws, dropout
    if found is not None:
        if "shard" in found[1]:
            model.head.load_shard_state(found[1]["shard"])  # pyright: ignore[reportCallIssue]
        if found[1]["random"] is not None:
            torch.set_rng_state(found[1]["random"])
    else:
        rows.append(evaluation())
    while step < steps:
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * schedule(settings.schedule, step / steps)
        batch = task.batch(step)
        if step % task.steps_per_epoch == 0:
            state = None
        with processes.together("gradients"):
            loss, state = model(batch, state)
            model.zero_grad()
            loss.backward()
        clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        step += 1
        seconds += time.perf_counter() - started
        total, count = total + float(loss.detach()), count + 1
        if step in milestones:
            optimisation.complete(optimizer)
            rows.append(evaluation())
            total, count = 0.0, 0
            events(rows[-1])
        stopped = processes.any(observer.stopped())
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
