"""`make demo`: three runs of `manyclass train lm --corpus python`, and their report."""

import shutil
from pathlib import Path

import torch
from rich.console import Console

from .. import report
from ..train.run import Run
from ..train.settings import LanguageSettings
from . import console as show

SAMPLERS = ("full", "unigram", "blocks")


def run(steps: int, out: Path, seed: int, console: Console, text: list[Path] | None = None) -> None:
    """Train with the full softmax, with unigram draws and with blocks; print a table, write a page and a plot."""
    runs = []
    for number, sampler in enumerate(SAMPLERS):
        folder = out / sampler
        if Run(folder).exists():  # of an earlier demo
            shutil.rmtree(folder)
        settings = LanguageSettings(
            text=text,
            corpus=None if text else "python",
            sampler=sampler,
            power=0.75 if sampler == "unigram" else None,
            steps=steps,
            schedule="constant",
            evaluations=5,
            eval_examples=5000,
            seed=seed,
            out=folder,
        )
        task = show.prepare("lm", settings, console)
        if number == 0:
            console.print(
                f"{task.train_examples:,} words and symbols of Python source, {task.num_classes:,} classes; "
                f"{steps} steps of {settings.batch * settings.length} words, {torch.get_num_threads()} threads, "
                f"seed {seed}",
                soft_wrap=True,
            )
        with show.progress_bars(console) as progress:
            _, stopped = show.train(task, progress, sampler)
        if stopped:
            console.print("stopped")
            return
        runs.append(report.load(folder))
    console.print(report.table(runs))
    report.plot(runs, out / "demo.png")
    report.write(runs, out / "demo.html")
    console.print(f"plot: {out / 'demo.png'}\npage: {out / 'demo.html'}", soft_wrap=True)
