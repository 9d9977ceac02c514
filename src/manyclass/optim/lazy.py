"""Exact lazy updates of rows without gradients.

A dense optimiser changes every row in every step: moments shrink, momentum moves the row, and its weights decay. Here a
row waits for its next gradient, or for `flush`, and stores the last step that it has applied. Two sums per step then
give the exact change that it has missed, for any learning rates.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .rows import RowUpdate, update_rows_

# State of a parameter: the last step of each row, and two sums for every step, float64, shape (2, steps).
# The first sum is the log of the product of all weight decays up to the step. The second is how far momentum has since
# carried a row that had its last gradient in this step, as a multiple of first/√second, before decay.
ROW_STEP, HISTORY = "row_step", "history"
# Momentum below this share of its start is ignored.
NEGLIGIBLE = 1e-9
# Smaller decays are set to 0, so that no moment becomes a denormal number, which is slow to compute with.
SMALLEST = 1e-20
# Steps that the sums have room for at first.
CAPACITY = 1024
# Rows that `flush` takes at a time.
CHUNK = 16_384


def start(state: dict[str, Any], rows: int, device: torch.device) -> None:
    """Start the sums. All rows are complete up to the last step."""
    done = int(state["step"]) - 1
    state[ROW_STEP] = torch.full((rows,), done, dtype=torch.int32, device=device)
    state[HISTORY] = torch.zeros(2, 2 * done + CAPACITY, dtype=torch.float64, device=device)


def nothing_missed(count: int, update: RowUpdate, like: Tensor) -> Tensor:
    """Return coefficients for `update_rows_`, shape ``(count, 5)``, of rows that are complete."""
    return like.new_tensor([1.0, 0.0, update.decay1, update.decay2, 1.0]).repeat(count, 1)


def catch_up(state: dict[str, Any], rows: Tensor, update: RowUpdate, like: Tensor) -> Tensor:
    """Return coefficients for `update_rows_`, shape ``(count, 5)``; after it ``rows`` are complete."""
    history, last, step = state[HISTORY], state[ROW_STEP][rows], int(state["step"])
    log_decay, carried = history[:, last]
    elapsed = (step - last).double()
    decays = [decay**elapsed for decay in (update.decay1, update.decay2)]
    scale, share = (history[0, step] - log_decay).exp(), torch.ones_like(carried)
    missed = torch.stack([scale, carried * update.root, *decays, share], dim=1)
    missed[:, 2:].masked_fill_(missed[:, 2:] < SMALLEST, 0.0)
    state[ROW_STEP][rows] = step
    return missed.to(like.dtype)


def open_step(state: dict[str, Any], update: RowUpdate) -> None:
    """Record the weight decay of this step."""
    step = int(state["step"])
    if step == state[HISTORY].shape[1]:
        state[HISTORY] = torch.cat([state[HISTORY], torch.zeros_like(state[HISTORY])], dim=1)
    log_decay = state[HISTORY][0]
    log_decay[step] = log_decay[step - 1] + math.log1p(-update.weight_decay)


def close_step(state: dict[str, Any], update: RowUpdate) -> None:
    """Record how far momentum moves rows in this step that had their last gradient earlier."""
    shrink = update.decay1 / math.sqrt(update.decay2)
    if not 0 < shrink < 1:
        return
    step = int(state["step"])
    begin = max(0, step - math.ceil(math.log(NEGLIGIBLE) / math.log(shrink)))
    log_decay, carried = state[HISTORY]
    age = torch.arange(step - begin, 0, -1, dtype=torch.float64, device=carried.device)
    undecayed = (log_decay[begin:step] - log_decay[step]).exp()
    carried[begin:step] += update.rate / update.root * undecayed * shrink**age


def flush(
    weight: Tensor, first: Tensor | None, second: Tensor | None, state: dict[str, Any], update: RowUpdate
) -> None:
    """Complete all rows of ``weight``, shape ``(num_rows, columns)``."""
    update = update._replace(rate=0.0, gain1=0.0, gain2=0.0)
    for begin in range(0, len(weight), CHUNK):
        rows = torch.arange(begin, min(begin + CHUNK, len(weight)), device=weight.device)
        grad = weight.new_zeros(len(rows), weight.shape[1])
        update_rows_(weight, first, second, rows, grad, catch_up(state, rows, update, weight), update)
