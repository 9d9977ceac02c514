"""Fair timing on a noisy machine."""

import csv
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..samplers import Blocks, Sampler


def best_of(alternatives: dict[str, Callable[[], object]], repeats: int = 7, budget: float = 6.0) -> dict[str, float]:
    """Return the seconds of each alternative: the best of up to ``repeats`` rounds, in which all take turns.

    An alternative that has had two rounds and ``budget`` seconds sits out the rest.
    """
    times: dict[str, list[float]] = {name: [] for name in alternatives}
    for _ in range(repeats):
        for name, call in alternatives.items():
            if len(times[name]) < 2 or sum(times[name]) < budget:
                started = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - started)
    return {name: min(seconds) for name, seconds in times.items()}


def settle(sampler: Sampler) -> None:
    """Put blocks into the state of a long training, in which the next tree grows by one slice per step."""
    if isinstance(sampler, Blocks):
        sampler.updates = max(sampler.updates, 4 * sampler.growing.slices)


def write_csv(file: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write rows under a header."""
    with file.open("w", newline="") as handle:
        csv.writer(handle).writerows([header, *rows])
