"""Class embeddings from a network: encode the classes of a step with gradients, and cache those of all classes."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .counters import Counters
from .refresh import version
from .samplers.draw import Draw

#: Maps ids of classes, shape ``(k,)``, to their embeddings, shape ``(k, in_features)``.
Encode = Callable[[Tensor], Tensor]

# The sweep encodes one class, without gradients, per this many classes of a step. It adds 6% to the cost of encoding.
SWEEP = 4
# Classes that the sweep examines for each that it encodes. It skips classes that were encoded in its present round.
WINDOW = 4


def encode(encoder: Encode, ids: Tensor, in_features: int, chunk_size: int) -> Tensor:
    """Encode classes ``ids (k,)``, at most ``chunk_size`` at a time: ``(k, in_features)``.

    The backward pass encodes each chunk again, to save memory. The random numbers of the encoder are the same both
    times. A single chunk is not encoded again.
    """

    def part(ids: Tensor) -> Tensor:
        rows = encoder(ids)
        if not isinstance(rows, Tensor) or rows.shape != (len(ids), in_features):
            found = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(
                f"classes must map ids of shape ({len(ids)},) to embeddings of shape ({len(ids)}, {in_features}), "
                f"got {found}"
            )
        return rows

    chunks = ids.split(chunk_size)
    if len(chunks) == 1 or not torch.is_grad_enabled():
        return torch.cat([part(chunk) for chunk in chunks])
    return torch.cat([cast(Tensor, checkpoint(part, chunk, use_reentrant=False)) for chunk in chunks])


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Run in evaluation mode, then restore the mode of every part of the module."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


class Step(NamedTuple):
    """The classes of a training step, renumbered: positions in ``rows`` take the place of ids."""

    #: Classes of the step, shape ``(k,)``, sorted and distinct.
    rows: Tensor
    #: Shape of the targets; −1 stays.
    target: Tensor
    draw: Draw


def renumber(target: Tensor, draw: Draw) -> Step:
    """Collect the distinct classes of targets and draw, or class 0 if there are none. A target of −1 is none."""
    every = torch.cat([target.flatten(), draw.ids.flatten(), draw.pool])
    # One that is there takes the place of −1: to leave it out, the host would have to wait for the device.
    every = every.where(every >= 0, every.amax().clamp(min=0)) if len(every) else every.new_zeros(1)
    rows = every.unique()
    places = draw._replace(ids=torch.searchsorted(rows, draw.ids), pool=torch.searchsorted(rows, draw.pool))
    return Step(rows, torch.where(target >= 0, torch.searchsorted(rows, target), -1), places)


class Cache(Counters):
    """A cache of the last known embedding of every class, for samplers, diagnostics and exact results.

    The rows of a training step are written when the next step begins. So a step that `torch.utils.checkpoint` repeats
    draws from the same rows.

    Args:
        num_classes: n, of this process.
        in_features: size of an embedding, d.
        device: of the cache.
        dtype: of the cache; default: torch's default dtype.
    """

    rows: Tensor
    encoded_at: Tensor

    counters = ("started", "fresh", "steps", "cursor", "round_began", "flushed")

    def __init__(self, num_classes: int, in_features: int, device: Any, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(num_classes, in_features, device=device, dtype=dtype))
        # The step that encoded each class last.
        self.register_buffer("encoded_at", torch.zeros(num_classes, device=device, dtype=torch.int32))
        #: Whether any class was encoded yet, and whether the encoder is unchanged since it encoded all classes.
        self.started, self.fresh = False, False
        #: Steps so far; where the sweep is, and the step when its present round began.
        self.steps, self.cursor, self.round_began = 0, 0, 0
        #: Rows of the last step that a checkpoint had written before the next step began.
        self.flushed = 0
        self._waiting: tuple[Tensor, Tensor | None] | None = None
        self._versions: tuple[int, ...] = ()
        self._warned = False

    def remember(self, ids: Tensor, rows: Tensor | None, learns: bool) -> None:
        """Keep the embeddings ``rows (k, in_features)`` of ``ids (k,)``, sorted and distinct, for the next step.

        Without ``rows`` they are encoded when that step begins. ``learns``: whether they may change after this step.
        """
        self._waiting = ids, None if rows is None else rows.detach()
        self.fresh &= not learns

    @torch.no_grad()
    def advance(self, embed: Encode, parameters: Iterable[Tensor]) -> Tensor | None:
        """Begin a step: write rows that wait, and encode some of the stalest classes.

        Returns the classes that changed since the last step, shape ``(k,)``; None for all of them.
        """
        self.steps += 1
        if not self.started:
            self.refresh(embed, parameters)
            return None
        written = self._write_waiting(embed, self.steps)
        due = self._due((len(written) + self.flushed) // SWEEP)
        self.flushed = 0
        if len(due):
            self._write(due, embed(due), self.steps)
        return torch.cat([written, due])

    @torch.no_grad()
    def flush(self, embed: Encode) -> Tensor:
        """Write the rows that wait for the next step, for a checkpoint, and return their classes."""
        ids = self._write_waiting(embed, self.steps + 1)
        self.flushed += len(ids)
        return ids

    def _write_waiting(self, embed: Encode, step: int) -> Tensor:
        if self._waiting is None:
            return torch.empty(0, dtype=torch.long, device=self.rows.device)
        ids, rows = self._waiting
        self._waiting = None
        ids = ids.to(self.rows.device)  # the layer may have moved since
        self._write(ids, embed(ids) if rows is None else rows, step)
        return ids

    def _write(self, ids: Tensor, rows: Tensor, step: int) -> None:
        self.rows[ids] = rows.to(self.rows)
        self.encoded_at[ids] = step

    def _due(self, number: int) -> Tensor:
        """Take at most ``number`` classes, in turn, that were not encoded since the sweep began its present round."""
        size, device = len(self.rows), self.rows.device
        self.cursor %= size  # the checkpoint may be that of a larger shard
        if device.type == "cpu":
            window = min(WINDOW * number, size - self.cursor)
            candidates = torch.arange(self.cursor, self.cursor + window)
            due = candidates[self.encoded_at[candidates] < self.round_began][:number]
            self.cursor = int(due[-1]) + 1 if len(due) == number > 0 else self.cursor + window
        else:  # to skip some, the host would have to wait for the device
            due = torch.arange(self.cursor, min(self.cursor + number, size), device=device)
            self.cursor += len(due)
        if self.cursor >= size:
            self.cursor, self.round_began = 0, self.steps
        return due

    @torch.no_grad()
    def refresh(self, embed: Encode, parameters: Iterable[Tensor], chunk_size: int = 1 << 14) -> None:
        """Encode all classes; ``parameters`` are those of the encoder."""
        self._waiting, self.flushed = None, 0
        for ids in torch.arange(len(self.rows), device=self.rows.device).split(chunk_size):
            self._write(ids, embed(ids), self.steps)
        self.cursor, self.round_began = 0, self.steps
        self.started, self.fresh, self._warned = True, True, False
        self.notice(parameters)

    def notice(self, parameters: Iterable[Tensor]) -> None:
        """Record the encoder's parameters as those that made the cached embeddings, if they were ever fresh."""
        self._versions = _versions(parameters)

    def is_fresh(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether the cache holds what the encoder would return now."""
        return self.started and self.fresh and self._versions == _versions(parameters)

    def ensure(self, embed: Encode, parameters: list[Tensor], automatic: bool) -> None:
        """Encode all classes if the cache is stale, or warn once if this is not ``automatic``."""
        if self.is_fresh(parameters):
            return
        if automatic or not self.started:
            self.refresh(embed, parameters)
        elif not self._warned:
            self._warned = True
            warnings.warn(
                "the class embeddings are older than their encoder, so results are not exact: "
                "call refresh() on the layer after training and before evaluation",
                stacklevel=4,
            )

    def age(self) -> float:
        """Return the mean number of steps since a class was encoded."""
        return float((self.steps - self.encoded_at).clamp(min=0).double().mean())

    def extra_repr(self) -> str:
        """Show the size."""
        return f"{tuple(self.rows.shape)}, dtype={self.rows.dtype}"


def _versions(parameters: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple(version(parameter) for parameter in parameters)
