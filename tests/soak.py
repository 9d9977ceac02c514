"""Kill runs at random moments and resume them: they must end with the numbers of a run that nobody killed.

`make soak` does so for an hour. A failure prints the seed of its round, and leaves the folder.
"""

import argparse
import csv
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from safetensors.torch import load_file
from test_training import write_documents, write_sequences, write_text

TASKS = {
    "lm": ("--text", write_text, ("--length", 5, "--dropout", 0.1)),
    "next-item": ("--interactions", write_sequences, ("--history", 5)),
    "classify": ("--data", write_documents, ()),
}
COMMON = (
    "--features",
    16,
    "--batch",
    8,
    "--num-samples",
    32,
    "--evaluations",
    5,
    "--checkpoint-every",
    7,
    "--timeout",
    20,
)
STEPS = 400
#: A run is killed at most this often, and then left alone.
KILLS = 3
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}


def start(task: str, processes: int, steps: int, folder: Path) -> subprocess.Popen[bytes]:
    """Begin or resume a run in a folder that has its data."""
    option, _, more = TASKS[task]
    (data,) = folder.glob("*.txt")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes] if processes > 1 else []
    arguments = [
        "train",
        task,
        option,
        data.name,
        *COMMON,
        *more,
        "--steps",
        steps,
        "--threads",
        1,
        "--timeout",
        20,
        "--resume",
    ]
    command = [sys.executable, *launch, "-m", "manyclass", *arguments]
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(
            list(map(str, command)), cwd=folder, env=ENVIRONMENT, stdout=output, stderr=output, start_new_session=True
        )


def killed(run: subprocess.Popen[bytes], processes: int, chance: random.Random) -> None:
    """Kill a process with the signal that none can catch: the only one, one of several, or all."""
    victims = [run.pid]
    if processes > 1:
        children = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
        one = children and chance.random() < 0.7
        victims = [chance.choice(children)] if one else [run.pid, *children]
    for victim in victims:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    run.wait(timeout=120)


def outcome(folder: Path) -> tuple[list[dict[str, str]], dict[tuple[str, str], bytes]]:
    """What a run measured, without its times, and its weights."""
    with (folder / "run" / "metrics.csv").open() as file:
        rows = [{**row, "seconds": "", "cpu_seconds": ""} for row in csv.DictReader(file)]
    checkpoint = sorted((folder / "run").glob("checkpoint-*"))[-1]
    files = sorted(checkpoint.glob("model-*"))
    weights = {(file.name, name): value.numpy().tobytes() for file in files for name, value in load_file(file).items()}
    return rows, weights


def prepared(task: str, parent: Path) -> Path:
    """A new folder with the data of a task."""
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=f"{task}-"))
    TASKS[task][1](folder)
    return folder


class Soak:
    """Rounds of kills, and the runs that nobody killed.

    Args:
        parent: where all folders are made.
        steps: of each run.
        kills: at most so many of each run.
    """

    def __init__(self, parent: Path, steps: int = STEPS, kills: int = KILLS) -> None:
        self.parent, self.steps, self.kills = parent, steps, kills
        #: Outcome and seconds of the run that nobody killed, by task and number of processes.
        self.wanted: dict[tuple[str, int], tuple[object, float]] = {}

    def round(self, seed: int, task: str | None = None, processes: int | None = None) -> str:
        """Kill and resume one run; returns what was done, and raises if its outcome is another one."""
        chance = random.Random(seed)
        task, processes = task or chance.choice(list(TASKS)), processes or chance.choice([1, 1, 2])
        if (task, processes) not in self.wanted:
            folder, begun = prepared(task, self.parent), time.monotonic()
            assert start(task, processes, self.steps, folder).wait(timeout=600) == 0, (folder / "output").read_text()
            self.wanted[task, processes] = outcome(folder), time.monotonic() - begun
        wanted, seconds = self.wanted[task, processes]
        folder, kills = prepared(task, self.parent), 0
        while True:
            run = start(task, processes, self.steps, folder)
            try:
                code = run.wait(timeout=chance.uniform(0, seconds) if kills < self.kills else 600)
            except subprocess.TimeoutExpired:
                killed(run, processes, chance)
                kills += 1
                continue
            assert code == 0, f"seed {seed}: {(folder / 'output').read_text()[-2000:]}"
            break
        assert outcome(folder) == wanted, f"seed {seed}: {folder} ended with other numbers"
        left = [path.name for path in (folder / "run").glob(".*")]
        assert not left, f"seed {seed}: {folder} has temporary files: {left}"
        return f"seed {seed}: {task}, {processes} processes, {kills} kills: the same numbers"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    soak, end, number = Soak(Path(tempfile.mkdtemp(prefix="soak-"))), time.monotonic() + given.seconds, given.seed
    while time.monotonic() < end:
        print(soak.round(number), flush=True)
        number += 1
