"""The training loop, from top to bottom: one for all tasks."""

import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import version
from typing import Any

import torch

from ..clip import clip_grad_norm_
from . import optimizers as optimisation
from . import state as saved
from .atomic import remove, replacing
from .checkpoint import FORMAT
from .data import Vocabulary
from .data.files import Advance, ignore
from .data.vocabulary import digest
from .evaluation import evaluate
from .model import Model, device_named
from .processes import Processes
from .records import first_line, quoted
from .run import CHECKPOINT, Metrics, Run, best
from .settings import LENGTH, Settings
from .state import State
from .tasks import TASKS, Task

# The TensorFlow tutorial's schedule, which the paper trained with: 39 epochs, of which six at the full rate.
PAPER_EPOCHS, PAPER_CONSTANT, PAPER_DECAY = 39, 6, 0.8


class Observer:
    """Receive progress callbacks and optionally request a stop. The default does neither."""

    def step(self, step: int, steps: int, last: Metrics) -> None:
        """Report that a step is done."""

    def stopped(self) -> bool:
        """Return whether the run should stop."""
        return False


def prepare(name: str, settings: Settings, advance: Advance = ignore, processes: Processes | None = None) -> Task[Any]:
    """Read the data of a run into its folder, or, with ``resume``, open the data that are there.

    The first of several processes reads them, and each gets its part of every batch.
    """
    processes = processes or Processes()
    if device_named(settings.device).type != "cpu" and processes.world > 1:
        raise ValueError(f"--device {settings.device}: several processes compute on the CPU")
    part = (processes.rank, processes.world)
    if getattr(settings, "tied", False) is None:
        run = Run(settings.out)
        settings.tied = run.config()["settings"].get("tied") if run.exists() else processes.world == 1  # pyright: ignore
    if processes.first:
        task = _prepare(name, settings, advance, part)
        processes.after_first(done=True)
        return task
    processes.after_first(done=False)
    run = Run(settings.out)
    return TASKS[name][1](settings, run.data, Vocabulary.read(run.vocabulary), part)


def _prepare(name: str, settings: Settings, advance: Advance, part: tuple[int, int]) -> Task[Any]:
    run, (_, kind) = Run(settings.out), TASKS[name]
    if run.exists():
        if not settings.resume:
            raise FileExistsError(f"{settings.out} holds a run already: give --resume, or another --out")
        with usable(run):
            config = _read_config(run)
            if config["task"] != name:
                raise ValueError(f"{settings.out} is a run of {config['task']}, not of {name}")
            before = type(settings).from_json(config["settings"], run.folder / "config.json").to_json()
            for option in [name for name in settings.differences(before) if name not in LENGTH]:
                new, old = settings.to_json()[option], before[option]
                raise ValueError(
                    f"{settings.out} was begun with {option}={old}, so it cannot be resumed with {option}={new}"
                )
            return kind(settings, run.data, _vocabulary(run, config), part)
    for other in (settings.init, settings.tree):
        if other is not None:
            Run(other).config()  # now, not when all data are read
    with run.alone():
        try:
            with replacing(run.data) as temporary:
                temporary.mkdir()
                vocabulary = kind.prepare(settings, temporary, advance)
                task = kind(settings, temporary, vocabulary, part)  # raises if it cannot be trained on
                remove(run.data)  # of a run that was stopped before it had begun
        except BaseException:
            with suppress(OSError):  # delete the incomplete run
                settings.out.rmdir()
            raise
        vocabulary.write(run.vocabulary)
    return task  # its files have a new name, but stay mapped into memory


def train(task: Task[Any], observer: Observer | None = None) -> list[Metrics]:
    """Train with the task's settings, or resume from the last checkpoint; return all evaluations of the run.

    A run is a function of its settings: if it is stopped at any moment and resumed, it ends with the same numbers.
    """
    run, processes = Run(task.settings.out), Processes(*task.part)
    with run.alone() if processes.first else nullcontext():
        return _train(task, observer or Observer(), run, processes)


def _train(task: Task[Any], observer: Observer, run: Run, processes: Processes) -> list[Metrics]:
    settings = task.settings
    vectors = class_vectors(task, Run(settings.tree)) if settings.tree is not None and not run.checkpoints() else None
    torch.manual_seed(settings.seed)
    model = Model(task, settings, vectors).to(device_named(settings.device))
    if settings.init is not None and not run.checkpoints():
        initialise(model, task, Run(settings.init))
    if processes.first and not run.exists():  # only after a model could be made of the settings
        run.write_json("config.json", _config(task, run))
    optimizer = optimisation.make(model, settings)
    steps = settings.steps or max(1, round(settings.epochs * task.steps_per_epoch))
    milestones = {round(steps * part / settings.evaluations) for part in range(settings.evaluations + 1)} - {0}
    state = State(device=model.device)
    _start(run, model, optimizer, state, processes, settings.seed)
    if state.step > steps:
        raise ValueError(f"{run.folder} has done {state.step} steps already, so it cannot end after {steps}")
    events = _events(settings, state.step) if processes.first else lambda row: None
    if not state.rows:
        state.rows.append(_measured(model, task, state, steps, processes))

    while state.step < steps and not _patience_is_over(state, settings.patience):
        started, used = time.perf_counter(), time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * schedule(settings.schedule, state.step / steps)
        if state.step % task.steps_per_epoch == 0:
            state.hidden = None
        with processes.together("gradients"):
            batch = task.batch(state.step).to(model.device)
            loss, state.hidden = model(batch, state.hidden, _negatives(settings.seed, state, processes))
            model.zero_grad()
            loss.backward()
        clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        state.step += 1
        state.seconds += time.perf_counter() - started
        state.cpu_seconds += time.process_time() - used
        state.total, state.count = state.total + float(loss.detach()), state.count + 1
        if state.step in milestones:
            optimisation.complete(optimizer)
            state.rows.append(_measured(model, task, state, steps, processes))
            state.total, state.count = 0.0, 0
            events(state.rows[-1])
            kept = best(state.rows, task.selects)
            state.best = kept and (kept.step, kept.measure(str(task.selects)))
        stopped = processes.any(observer.stopped())
        if state.step in milestones or state.step % settings.checkpoint_every == 0 or stopped:
            saved.write(run, model, optimizer, state, processes)
        observer.step(state.step, steps, state.rows[-1])
        if stopped:
            break
    if processes.first:
        run.write_json("resources.json", {"peak_bytes": peak_bytes()})
    return state.rows


def peak_bytes() -> int | None:
    """Return the peak memory of this process in bytes; None if the system does not report it."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _patience_is_over(state: State, patience: int | None) -> bool:
    if patience is None or state.best is None:
        return False
    return sum(row.step > state.best[0] for row in state.rows) >= patience


def _start(run: Run, model: Model, optimizer: Any, state: State, processes: Processes, seed: int) -> None:
    """Restore the last checkpoint, if there is one, and seed each process differently."""
    last = run.checkpoints()[-1:]
    if processes.world > 1:
        model.parallelise()
    step = int(last[0].name.removeprefix(CHECKPOINT)) if last else 0
    torch.manual_seed(_seed(seed, step, processes))  # of dropout, whatever the model drew before
    if last:
        with usable(run):
            saved.restore(last[0], model, optimizer, state, processes)
        if processes.first:
            run.write_metrics(state.rows)
            run.write_json("config.json", {**run.config(), "settings": model.task.settings.to_json()})  # its new length


def _seed(seed: int, step: int, processes: Processes) -> int:
    return ((seed * 1_000_003 + step) * processes.world + processes.rank) % (1 << 63)  # a range that torch takes


def _negatives(seed: int, state: State, processes: Processes) -> torch.Generator:
    """Return the generator of a step's negatives. Dropout has another, so it is the same for every output layer."""
    return torch.Generator(state.device).manual_seed(_seed(seed, state.step, processes))


def _measured(model: Model, task: Task[Any], state: State, steps: int, processes: Processes) -> Metrics:
    """Evaluate on held-out data."""
    settings = task.settings
    number = model.head.num_samples if settings.draws else None
    bias = model.head.diagnostics().bias if state.step and settings.estimates else None
    rate = settings.lr * schedule(settings.schedule, max(0, state.step - 1) / steps)
    found = evaluate(model, task, settings.eval_examples, (10, 20) if task.ranked else ())
    mean = processes.sums([state.total])[0] / (state.count * processes.world) if state.count else None
    ranks = [found.get(name) for name in ("recall@10", "recall@20", "ndcg@10", "mrr@10")]
    done = state.step, state.step / task.steps_per_epoch, state.seconds
    return Metrics(*done, rate, mean, found["loss"], bias, number, *ranks, cpu_seconds=state.cpu_seconds)


def _config(task: Task[Any], run: Run) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "task": task.name,
        "manyclass": version("manyclass"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "num_classes": task.num_classes,
        "train_examples": task.train_examples,
        "heldout_examples": task.heldout_examples,
        "test_examples": task.test_examples,
        "threads": torch.get_num_threads(),
        "select": task.selects,
        "vocabulary": digest(run.vocabulary),
        "settings": task.settings.to_json(),
    }


def _read_config(run: Run) -> dict[str, Any]:
    config = run.config()
    if config.get("format") != FORMAT:
        raise ValueError(
            f"{run.folder / 'config.json'}: has format {quoted(config.get('format'))}, but this version reads {FORMAT}"
        )
    if config["task"] not in TASKS:
        raise ValueError(f"{run.folder / 'config.json'}: unknown task {quoted(config['task'])}")
    return config


def _vocabulary(run: Run, config: dict[str, Any]) -> Vocabulary:
    if digest(run.vocabulary) != config.get("vocabulary"):
        raise ValueError(f"{run.vocabulary}: not the file that the run was begun with")
    vocabulary = Vocabulary.read(run.vocabulary)
    if len(vocabulary.names) != config["num_classes"]:
        raise ValueError(f"{run.vocabulary}: has {len(vocabulary.names)} classes, the run {config['num_classes']}")
    return vocabulary


def initialise(model: Model, task: Task[Any], run: Run) -> int:
    """Copy the weights of another run, matching classes by name; return the number of matches."""
    if task.part[1] > 1:
        raise ValueError("--init needs all class weights in every process, so it is for one process")
    other, before, _ = load(run)
    if before.name != task.name:
        raise ValueError(f"--init {run.folder}: a run of {before.name}, not of {task.name}")
    new, old = _same_classes(task, before)
    sources = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        source = sources.get(name)
        if source is None or source.shape[1:] != parameter.shape[1:]:
            raise ValueError(f"--init {run.folder}: {name} has another shape; give the settings of its model")
        with torch.no_grad():
            if len(source) == before.num_classes and len(parameter) == task.num_classes:
                parameter[new] = source[old]
            elif len(source) == len(parameter):
                parameter.copy_(source)
            else:
                raise ValueError(f"--init {run.folder}: {name} has {len(source)} rows instead of {len(parameter)}")
    return len(new)


def class_vectors(task: Task[Any], run: Run) -> torch.Tensor:
    """Return the class vectors of another run, by the classes' names, ``(num_classes, features)``; unknown: zeros."""
    other, before, _ = load(run)
    weight = getattr(other.head, "weight", None)
    if weight is None or len(weight) != before.num_classes:
        raise ValueError(f"--tree {run.folder}: its loss {before.settings.loss!r} has no vector for each class")
    new, old = _same_classes(task, before)
    vectors = weight.new_zeros(task.num_classes, weight.shape[1])
    vectors[new] = weight.detach()[old]
    return vectors


def _same_classes(task: Task[Any], other: Task[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of the classes that two tasks share by name, in the one and in the other."""
    shared = [(task.ids[name], index) for index, name in enumerate(other.vocabulary.names) if name in task.ids]
    new, old = torch.tensor(shared, dtype=torch.long).reshape(-1, 2).T
    return new, old


@contextmanager
def usable(run: Run) -> Iterator[None]:
    """Turn any error that a run's files can cause into a `ValueError` of one line that names the folder."""
    try:
        yield
    except OSError:
        raise
    except ValueError as error:
        message = first_line(error)
        raise ValueError(message if str(run.folder) in message else f"{run.folder}: {message}") from error
    except Exception as error:
        raise ValueError(f"{run.folder} cannot be used: {type(error).__name__}: {first_line(error)}") from error


def schedule(name: str, done: float) -> float:
    """Factor of the learning rate when the share ``done`` of a run is done."""
    if name == "linear":
        return min(1.0, 2 * (1 - done))
    if name == "exponential":
        return PAPER_DECAY ** max(0, math.floor(done * PAPER_EPOCHS) - PAPER_CONSTANT + 1)
    return 1.0


def load(run: Run, device: str = "cpu") -> tuple[Model, Task[Any], int]:
    """Load the model of a run's best checkpoint, if it selects one, or of its last; return its task and step, too."""
    place = device_named(device)
    with usable(run):
        config = _read_config(run)
        settings_type, kind = TASKS[config["task"]]
        settings = settings_type.from_json({**config["settings"], "out": str(run.folder)}, run.folder / "config.json")
        task = kind(settings, run.data, _vocabulary(run, config))
        model = Model(task, settings)
        step = saved.restore_model(run, model)
        model.to(place)
        model.refresh()
    return model.eval(), task, step


def _events(settings: Settings, step: int) -> Callable[[Metrics], None]:
    """Open TensorBoard's event writer, if it is asked for."""
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
