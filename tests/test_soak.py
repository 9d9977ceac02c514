"""A few rounds of `make soak`."""

import pytest
import torch.distributed as dist
from soak import TASKS, Soak


@pytest.mark.parametrize("task", TASKS)
def test_a_run_that_is_killed_ends_with_the_same_numbers(tmp_path, task):
    """Of two processes for the language model, whose hidden states both have a part of."""
    processes = 2 if task == "lm" and dist.is_gloo_available() else 1
    assert "the same numbers" in Soak(tmp_path, steps=60, kills=1 if processes > 1 else 2).round(0, task, processes)
