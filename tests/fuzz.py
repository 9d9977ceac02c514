"""Random calls of the native operations and of the Python interface; `make fuzz` runs them under the sanitizers.

Every call is made from the seed and its number alone. A child process makes the calls and says which one it is at, so a
crash or a call that never returns is found, too. A failure is printed with the command that repeats this one call.
"""

import argparse
import os
import random
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

PARTS = ("native", "api")
# Seconds of processor time for one call, which a busy machine does not shorten; and of silence, if a call waits.
TIMEOUT, SILENCE = 60, 900
# A part ends after this many failures: they often have one cause.
MOST_FAILURES = 20


def make(part: str) -> Callable[[random.Random], None]:
    """Import the calls of a part: a function that makes one, and raises if the result is wrong."""
    if part == "native":
        import fuzz_native

        return fuzz_native.one_call
    import fuzz_api

    return fuzz_api.one_call


def one(part: str, seed: int, number: int) -> None:
    """Make one call."""
    import torch

    torch.manual_seed(number)
    make(part)(random.Random(f"{part} {seed} {number}"))


def work(part: str, seed: int, numbers: range) -> None:
    """Make many calls and print the number of each before it is made, and after it ``failed`` if it did."""
    make(part)  # loading torch is not part of the first call
    for number in numbers:
        print(number, flush=True)
        signal.setitimer(signal.ITIMER_PROF, TIMEOUT)  # ends the process, also in the middle of native code
        try:
            one(part, seed, number)
        except Exception:
            traceback.print_exc()
            print("failed", flush=True)
    signal.setitimer(signal.ITIMER_PROF, 0)


def watch(part: str, seed: int, numbers: range, script: str = __file__) -> Iterator[tuple[int, str]]:
    """Run calls in child processes of ``script``, this one; yield the number of each that fails, and how."""
    while numbers:
        span = ["--first", str(numbers.start), "--calls", str(len(numbers))]
        command = [sys.executable, script, "--child", "--part", part, "--seed", str(seed), *span]
        at = numbers.start
        # Without a buffer: `select` does not see lines that were read ahead.
        with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as child:
            assert child.stdout is not None
            while select.select([child.stdout], [], [], SILENCE)[0]:
                line = child.stdout.readline().decode().strip()
                if not line:
                    break
                if line == "failed":
                    yield at, "raised the error above"
                else:
                    at = int(line)
            else:
                child.kill()
        if child.returncode == 0:
            return
        if child.returncode in (-signal.SIGPROF, -signal.SIGKILL):
            yield at, f"did not return within {TIMEOUT} seconds"
        else:
            yield at, f"ended the process with code {child.returncode}"
        numbers = range(at + 1, numbers.stop)


def main() -> int:
    """Run the calls that the command line asks for; return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, help="one part only")
    parser.add_argument("--calls", type=int, default=20_000, help="random calls of each part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--only", type=int, help="make this one call, here and without a time limit")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    parts, numbers = (
        [arguments.part] if arguments.part else PARTS,
        range(arguments.first, arguments.first + arguments.calls),
    )
    if arguments.only is not None:
        for part in parts:
            one(part, arguments.seed, arguments.only)
        return 0
    if arguments.child:
        work(parts[0], arguments.seed, numbers)
        return 0
    settings = ("LD_PRELOAD", "ASAN_OPTIONS", "UBSAN_OPTIONS", "MANYCLASS_NATIVE")
    environment = [f'{name}="{os.environ[name]}"' for name in settings if name in os.environ]
    failures = 0
    for part in parts:
        failed = 0
        for number, how in watch(part, arguments.seed, numbers):
            failed += 1
            script = Path(__file__).relative_to(Path.cwd()) if Path(__file__).is_relative_to(Path.cwd()) else __file__
            command = [*environment, sys.executable, str(script), "--part", part, "--seed", str(arguments.seed)]
            print(f"{part} call {number} {how}. Repeat it:\n  {' '.join(command)} --only {number}", flush=True)
            if failed == MOST_FAILURES:
                break
        print(f"{part}: {len(numbers):,} calls from seed {arguments.seed}, {failed} failed", flush=True)
        failures += failed
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
