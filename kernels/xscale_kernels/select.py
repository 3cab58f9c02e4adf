"""The operators, their implementations, and which one runs: the first usable in a fixed order, or the named one."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from xscale_kernels import refusals, triton_runtime

LOG = logging.getLogger("xscale_kernels")


class UnusableError(ValueError):
    """The named implementation cannot run this call, or none can; the message has the reason and the usable ones."""


@dataclass(frozen=True)
class Implementation:
    """One implementation of an operator."""

    name: str
    """Its name in a recipe: reference, cpu, torch, triton, apex, cuda."""
    module: str
    """Dotted path of its module, which is imported only when it is chosen."""
    usable: Callable[..., str | None]
    """Takes the operator's arguments; returns None, or the reason why it cannot run this call."""
    worthwhile: Callable[..., str | None] | None = None
    """Takes the same; returns the reason why it would run this call slowly. Ignored if the implementation is named."""
    prefix: str = ""
    """Start of its functions' names, in a module that holds several implementations."""

    def refusal(self, named: bool, *args: object, **kwargs: object) -> str | None:
        """Reason why it is not chosen for this call, or None."""
        reason = self.usable(*args, **kwargs)
        if reason is None and not named and self.worthwhile is not None:
            reason = self.worthwhile(*args, **kwargs)
        return reason

    def function(self, name: str) -> Any:
        """Import its module and return its function `name`, such as "forward"."""
        module = sys.modules.get(self.module) or importlib.import_module(self.module)
        return getattr(module, self.prefix + name)


class KernelChoice(NamedTuple):
    """The implementation chosen for one call, and why others were refused."""

    operator: str
    implementation: Implementation
    named: bool
    """Whether the caller named it; otherwise it is the first usable one."""
    refused: tuple[tuple[str, str], ...]
    """(implementation, reason) of each one earlier in the order that refused."""

    def __str__(self) -> str:
        return _sentence(self.operator, self.implementation.name, self.named, self.refused)


def _sentence(operator: str, name: str, named: bool, refused: Sequence[tuple[str, str]]) -> str:
    why = "named" if named else "first usable"
    passed = "".join(f"; {other} refused: {reason}" for other, reason in refused)
    return f"{operator}: {name} ({why}{passed})"


def log_choice(operator: str, name: str, refused: Sequence[tuple[str, str]]) -> None:
    """Log, as `choose` does, a choice among ways to compute that are not all implementations of one operator.

    `name` is the way that is taken, and `refused` has (way, reason) of those before it.
    """
    if LOG.isEnabledFor(logging.INFO) and not torch.compiler.is_compiling():
        LOG.info("%s", _sentence(operator, name, False, refused))


class LogOnce(logging.Filter):
    """Filter that passes each message once; for the handler that writes a run's log."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        new = text not in self.seen
        self.seen.add(text)
        return new


def use_reference(named: str | None) -> bool:
    """Whether the reference runs without selection: it is named, or torch.compile will fuse it."""
    return named == "reference" or (named is None and torch.compiler.is_compiling())


def is_small_call(named: str | None, x: torch.Tensor) -> bool:
    """Whether plain torch runs without selection: on a few numbers on the CPU a search costs more than the operator.

    It is what `choose` would find, and nobody reads why.
    """
    return (
        not named
        and type(x) is torch.Tensor
        and x.numel() < refusals.SMALL
        and x.is_cpu
        and not LOG.isEnabledFor(logging.INFO)
        and not triton_runtime.interpreting()
    )


def choose(
    operator: str,
    implementations: Sequence[Implementation],
    named: str | None,
    *args: object,
    **kwargs: object,
) -> KernelChoice:
    """Choose the implementation of this call of `operator`.

    `args` and `kwargs` go to each implementation's `usable`. `named` is an implementation's name, or None (or "")
    for the first usable one in the given order. Each choice is logged to the logger `xscale_kernels` at level INFO.

    Raises UnusableError when the named one is unknown or refuses, or when all refuse.
    """
    if named and named not in {implementation.name for implementation in implementations}:
        names = ", ".join(implementation.name for implementation in implementations)
        raise UnusableError(f"{operator} has no implementation '{named}'; there are: {names}")
    refused: list[tuple[str, str]] = []
    for implementation in implementations:
        if named and implementation.name != named:
            continue
        reason = implementation.refusal(bool(named), *args, **kwargs)
        if reason is None:
            choice = KernelChoice(operator, implementation, bool(named), tuple(refused))
            if LOG.isEnabledFor(logging.INFO) and not torch.compiler.is_compiling():
                LOG.info("%s", choice)
            return choice
        refused.append((implementation.name, reason))
    if named:
        able = [
            implementation.name
            for implementation in implementations
            if implementation.usable(*args, **kwargs) is None
        ]
        raise UnusableError(
            f"{operator}: implementation '{named}' cannot run this call: {refused[0][1]}. "
            f"These can: {', '.join(able) or 'none'}"
        )
    raise UnusableError(
        f"{operator}: no implementation can run this call: "
        + "; ".join(f"{n}: {r}" for n, r in refused)
    )


FOLDER = Path(__file__).parent
"""Has a folder for each operator."""


def operators() -> tuple[str, ...]:
    """Names of the folders that have an op.py, sorted."""
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/op.py")))


def implementations(operator: str) -> tuple[Implementation, ...]:
    """Implementations of an operator, in the order in which they are tried."""
    implementations: tuple[Implementation, ...] = importlib.import_module(
        f"xscale_kernels.{operator}.op"
    ).IMPLEMENTATIONS
    return implementations


def unknown(named: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Unknown entries of `named` (operator -> implementation): operator -> (what is wrong, the valid names)."""
    errors = {}
    for operator, name in named.items():
        if operator not in operators():
            errors[operator] = (
                f"there is no operator '{operator}'",
                f"There are: {', '.join(operators())}.",
            )
            continue
        known = [implementation.name for implementation in implementations(operator)]
        if name not in known:
            errors[operator] = (
                f"{operator} has no implementation '{name}'",
                f"There are: {', '.join(known)}.",
            )
    return errors
