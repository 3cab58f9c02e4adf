"""Graph breaks for torch.compile, marked without importing the compiler, which takes longer than most commands."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Params = ParamSpec("Params")
Result = TypeVar("Result")


def eager(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Like `torch.compiler.disable`, but free until something is compiled."""

    @functools.wraps(function)
    def call(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        if torch.compiler.is_compiling():
            outside: Callable[Params, Result] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            return outside(*args, **kwargs)
        return function(*args, **kwargs)

    return call
