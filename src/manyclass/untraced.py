"""Exclude functions from `torch.compile`."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Exclude a function from compilation: a compiled caller has one graph break there.

    `torch.compiler.disable` does the same, but imports the compiler immediately, which takes as long as importing
    torch.
    """
    # Imports the compiler when it is called.
    hidden = torch._disable_dynamo(function)  # pyright: ignore[reportPrivateImportUsage]

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        return (hidden if torch.compiler.is_dynamo_compiling() else function)(*arguments)

    return run  # pyright: ignore[reportReturnType]
