"""Functions that `torch.compile` leaves alone."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Keep the compiler out of a function: a compiled caller has one graph break there.

    `torch.compiler.disable` does the same, but imports the compiler at once, which takes as long as importing torch.
    """
    # Imports the compiler when it is called.
    hidden = torch._disable_dynamo(function)  # pyright: ignore[reportPrivateImportUsage]

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        return (hidden if torch.compiler.is_dynamo_compiling() else function)(*arguments)

    return run  # pyright: ignore[reportReturnType]
