"""Progress bars, and stopping a run by a signal."""

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..pages import keep_memory
from ..train import training
from ..train.data.files import STANDARD_INPUT
from ..train.processes import Processes, launched
from ..train.run import Metrics, Run
from ..train.settings import Settings
from ..train.tasks import Task
from ..train.tasks.base import read_facts


def start(threads: int | None, processes: Processes | None = None) -> Console:
    """Set the number of threads and return a console; only the first of several processes prints."""
    keep_memory()
    if threads is not None:
        torch.set_num_threads(threads)
    torch.sparse.check_sparse_tensor_invariants.disable()  # prevents a warning of torch about its default
    return Console(quiet=processes is not None and not processes.first)


class Bar(training.Observer):
    """The progress bar of a run; Ctrl-C stops the run after its step, a second Ctrl-C immediately.

    Under torchrun the second signal is ignored, since torchrun repeats a signal that the terminal sent to all
    processes.

    Args:
        progress: where the bar is shown.
        name: what is written before it.
    """

    def __init__(self, progress: Progress, name: str) -> None:
        self.progress, self.name = progress, name
        self.bar: Any = None
        self.wanted = False

    def step(self, step: int, steps: int, last: Metrics) -> None:
        """Move the bar."""
        if self.bar is None:
            self.bar = self.progress.add_task(self.name, total=steps, loss=math.nan)
        self.progress.update(self.bar, completed=step, loss=last.heldout_loss)

    def stopped(self) -> bool:
        """Return whether a signal was received."""
        return self.wanted

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch Ctrl-C and termination as requests to stop."""

        def stop(number: int, frame: FrameType | None) -> None:
            self.wanted = True
            if not launched():
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def prepare(name: str, settings: Settings, console: Console, processes: Processes | None = None) -> Task[Any]:
    """Read the data of a run, with a progress bar."""
    single = ("interactions", "data", "heldout", "test", "items")
    files = [*(getattr(settings, "text", None) or ()), *(getattr(settings, option, None) for option in single)]
    if sum(file == STANDARD_INPUT for file in files) > 1:
        raise ValueError("only one file can be the standard input")
    size = sum(file.stat().st_size for file in files if file is not None and file.exists())
    fresh = not Run(settings.out).exists()
    columns = ["reading the data", BarColumn(), DownloadColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=size or None)
        task = training.prepare(name, settings, lambda read: progress.advance(bar, read), processes)
    if fresh:
        for line in read_facts(Run(settings.out).data)["lines"]:
            shown = "".join(letter if letter.isprintable() else "\ufffd" for letter in line)  # no control codes
            console.print(shown, soft_wrap=True, markup=False, highlight=False)
    return task


@contextmanager
def progress_bars(console: Console) -> Iterator[Progress]:
    """Yield progress bars that show the last held-out loss."""
    columns = ["{task.description:<12}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    with Progress(*columns, TextColumn("held-out loss {task.fields[loss]:.3f}"), console=console) as progress:
        yield progress


def train(task: Task[Any], progress: Progress, name: str) -> tuple[list[Metrics], bool]:
    """Train with a bar; returns the evaluations, and whether the run was stopped before its end."""
    bar = Bar(progress, name)
    with bar.listening():
        return training.train(task, bar), bar.wanted
