"""Libraries' Triton kernels in Triton's interpreter, which lacks some of what their kernels use."""

import builtins
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import autotuner, interpreter


def _scalar(value: Any, of: Any, kind: Any) -> Any:
    return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=kind), of), of)


def count(*bounds: Any) -> Iterator[Any]:
    """Count like `range` in a kernel, whose loop variable has `.to`."""
    return (_scalar(value, tl.int32, np.int32) for value in builtins.range(*(int(bound) for bound in bounds)))


def _rsqrt(x: Any) -> Any:
    return 1 / tl.sqrt(x)


def _tanh(x: Any) -> Any:
    shrink = tl.exp(-2 * tl.abs(x))
    size = (1 - shrink) / (1 + shrink)
    return tl.where(x < 0, -size, size)


SUBSTITUTES: dict[str, Callable[..., Any]] = {"rsqrt": _rsqrt, "tanh": _tanh}
"""Functions of CUDA's libdevice, which return None in the interpreter."""


def complete(patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Give the interpreter what the kernels of `modules` use: scalars with `.to`, libdevice, and autotuned launches."""
    convert = interpreter._implicit_cvt

    def _convert(argument: Any) -> Any:
        return _scalar(argument, tl.float32, np.float32) if type(argument) is float else convert(argument)

    patch.setattr(interpreter, "_implicit_cvt", _convert)
    # No kernel is timed: the first of its settings runs.
    patch.setattr(autotuner.Autotuner, "_bench", lambda *_, **__: [0.0])
    for module in modules:
        patch.setattr(module, "range", count, raising=False)
        for name in SUBSTITUTES.keys() & vars(module).keys():
            patch.setattr(module, name, SUBSTITUTES[name])
