"""`make demo`: a word model and a recommender, each trained three times, with a table and a picture of each."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .. import report
from ..budget import NUM_SAMPLES
from ..samplers import Blocks, options
from ..train.data.synth import synthesise
from ..train.run import Run
from ..train.settings import LanguageSettings, NextItemSettings, Settings
from . import console as show

#: Items, users and interactions per user of the recommender's synthetic data.
ITEMS, USERS, LENGTH = 30_000, 10_000, 20
#: Each part trains with all classes, with uniform negatives, and with as many negatives of the default sampler.
SAMPLERS: dict[str, dict[str, Any]] = {
    "full": {"sampler": "full"},
    "uniform": {
        "sampler": "uniform",
        "scope": "batch",
        "num_samples": NUM_SAMPLES["batch"] + options(Blocks)["own"],
    },
    "blocks": {"sampler": "blocks"},
}


def run(steps: int, out: Path, seed: int, console: Console, text: list[Path] | None = None) -> None:
    """Train both models; print a table and draw a picture of each, and describe what it shows."""
    common: dict[str, Any] = {"steps": steps, "schedule": "constant", "evaluations": 5, "seed": seed}

    def words(out: Path, sampler: dict[str, Any]) -> Settings:
        corpus = None if text else "python"
        return LanguageSettings(text=text, corpus=corpus, eval_examples=2000, out=out, **common, **sampler)

    def recommender(out: Path, sampler: dict[str, Any]) -> Settings:
        model: dict[str, Any] = {"split": "last", "history": LENGTH, "dropout": 0.1, "lr": 0.005, "batch": 32}
        return NextItemSettings(interactions=items, eval_examples=2000, out=out, **model, **common, **sampler)

    console.print(f"{torch.get_num_threads()} threads, seed {seed}, {steps} training steps per run", soft_wrap=True)
    if not _compare("lm", "words", words, out, console):
        return
    items = out / "interactions.txt"
    synthesise(items, items=ITEMS, users=USERS, length=LENGTH, seed=seed)
    _compare("next-item", "recommender", recommender, out, console)


def _compare(
    task: str, name: str, settings: Callable[[Path, dict[str, Any]], Settings], out: Path, console: Console
) -> bool:
    """Train one model with each sampler and report it; return whether it was trained to the end."""
    runs = []
    for sampler, chosen in SAMPLERS.items():
        folder = out / name / sampler
        if Run(folder).exists():  # of an earlier demo
            shutil.rmtree(folder)
        # The data are the same for all runs, so they are described once.
        prepared = show.prepare(task, settings(folder, chosen), Console(quiet=True) if runs else console)
        with show.progress_bars(console) as progress:
            _, stopped = show.train(prepared, progress, f"{name}, {sampler}")
        if stopped:
            console.print("stopped")
            return False
        runs.append(report.load(folder))
    seen = _seen(runs)
    console.print(report.table(runs))
    report.plot(runs, out / f"{name}.png", seen)
    report.write(runs, out / f"{name}.html")
    console.print(f"picture: {out / name}.png, page: {out / name}.html\n{seen}\n", soft_wrap=True, highlight=False)
    return True


def _seen(runs: Sequence[report.Run]) -> str:
    """Describe the end of the curves, relative to the first one."""
    full, *others = runs
    sentences = [f"Training with all classes ({full.name}) ends at a held-out loss of {full.loss:.2f} nats."]
    for other in others:
        gap, time = other.loss - full.loss, other.rows[-1]["seconds"] / full.rows[-1]["seconds"]
        where = "above" if gap > 0 else "below"
        sentences.append(f"{other.name} ends {abs(gap):.2f} {where} it, in {time:.0%} of its training time.")
    return " ".join(sentences)
