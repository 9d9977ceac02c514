"""Counters that the host reads in every step: Python numbers, which checkpoints hold as tensors."""

from typing import Any, ClassVar

import torch
from torch import nn


class Counters(nn.Module):
    """A module with numbers that no device holds, so that reading them does not wait for a device.

    They appear in ``state_dict`` under their names, as tensors without dimensions on the CPU.
    """

    #: Names of the attributes.
    counters: ClassVar[tuple[str, ...]] = ()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.counters:
            value = getattr(self, name)
            destination[prefix + name] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for name in self.counters:
            key = prefix + name
            if key in state_dict:
                setattr(self, name, type(getattr(self, name))(state_dict[key]))
                if key in unexpected_keys:
                    unexpected_keys.remove(key)
            elif strict:
                missing_keys.append(key)
