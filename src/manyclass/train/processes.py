"""The processes of a run: those that torchrun started, or this one alone."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

#: How long others wait for the first process to read the data.
READING = timedelta(days=7)
#: How long a process waits for the others at its end, and the exit codes: done, or stopped by a signal.
LEAVING = timedelta(seconds=60)
GOOD_ENDS = (0, 130)
#: Words that identify an error of torch's communication, as of data parallelism.
NETWORK = ("gloo", "NCCL", "onnection", "imed out", "timeout")


class Processes:
    """One process, and the others that train with it. Every method is called by all of them, in the same order.

    Args:
        rank: which one this is.
        world: how many there are.
    """

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world

    @property
    def first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def sums(self, values: list[float]) -> list[float]:
        """Return the sums over the processes."""
        if self.world == 1:
            return values
        from ..distributed.collectives import summed

        return summed(torch.tensor(values, dtype=torch.float64), self._group(), "sums").tolist()

    def any(self, wanted: bool) -> bool:
        """Return whether the flag is set in at least one process."""
        return self.sums([float(wanted)])[0] > 0

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Turn network errors inside the block into one that says that contact was lost."""
        try:
            yield
        except RuntimeError as error:
            if self.world == 1 or not any(word in str(error) for word in NETWORK):
                raise
            from ..distributed.collectives import together

            with together(what, self._group()):
                raise

    @contextmanager
    def shared_folder(self, made: Callable[[], AbstractContextManager[Path]]) -> Iterator[Path]:
        """Enter a folder that the first process makes, and that all write to; it is complete when all have left.

        If one of them fails, all do, and the first process leaves ``made`` with an error.
        """
        if self.world == 1:
            with made() as folder:
                yield folder
            return
        with ExitStack() as stack:
            folders = [str(stack.enter_context(made())) if self.first else None]
            with self.together("a checkpoint"):
                dist.broadcast_object_list(folders, src=0)
            failed = True
            try:
                yield Path(str(folders[0]))
                failed = False
            finally:
                others = self.any(failed)  # waits for all
            if others:
                raise OSError("another process could not write its part of the checkpoint")
        self.any(False)  # the folder has its name

    def after_first(self, done: bool) -> None:
        """Let the first process announce that its work is done; the others wait without a time limit."""
        if self.world > 1:
            store = dist.distributed_c10d._get_default_store()
            if done:
                store.set("manyclass/first", "done")
            else:
                store.wait(["manyclass/first"], READING)

    def _group(self) -> Any:
        return dist.group.WORLD


def launched() -> bool:
    """Return whether torchrun or a similar launcher started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def restarted() -> bool:
    """Return whether torchrun restarted the processes."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def join(timeout: float) -> Processes:
    """Join the processes that torchrun started, if any; one that does not answer for ``timeout`` seconds is lost."""
    if not launched():
        return Processes()
    patience = timedelta(seconds=timeout)
    try:
        store, rank, world = next(rendezvous("env://", timeout=patience))
        # After a restart torchrun's store still has the addresses of the processes that are gone.
        store = PrefixStore(f"manyclass/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    except RuntimeError as error:
        from ..distributed.collectives import LostContactError

        reason = str(error).strip().splitlines()[0]
        raise LostContactError(f"the other processes cannot be reached within {timeout:g} seconds: {reason}") from error
    return Processes(rank, world)


def leave(code: int) -> NoReturn:
    """Exit without torch's clean-up, which can deadlock when it joins gloo's threads."""
    if dist.is_available() and dist.is_initialized():
        if code in GOOD_ENDS:
            # Exiting while a peer still reads breaks its connection, so wait until every rank has finished.
            with suppress(Exception):  # the one with the store may be gone already
                store = dist.distributed_c10d._get_default_store()
                store.set(f"manyclass/left/{dist.get_rank()}", "yes")
                store.wait([f"manyclass/left/{rank}" for rank in range(dist.get_world_size())], LEAVING)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
