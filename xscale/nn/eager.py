"""Functions at which a compiler stops, marked without loading the compiler: that takes longer than most commands."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Made = TypeVar("Made")


def eager(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """`torch.compiler.disable` that costs nothing until something is compiled."""

    @functools.wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        if torch.compiler.is_compiling():
            outside: Callable[Given, Made] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            return outside(*args, **kwargs)
        return function(*args, **kwargs)

    return call
