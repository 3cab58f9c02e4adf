"""Which implementation of an operator runs: the first usable one in a fixed order, or the one that was named."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

LOG = logging.getLogger("xscale_kernels")


class UnusableError(ValueError):
    """The named implementation cannot serve this call, or no implementation can; the text says why and what would."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator."""

    name: str
    """What a recipe calls it: reference, cpu, torch, triton, apex."""
    module: str
    """Dotted path of the module that computes it; imported only when it is chosen."""
    usable: Callable[..., str | None]
    """Takes the operator's arguments; returns None, or the reason why it cannot serve this call."""
    worthwhile: Callable[..., str | None] | None = None
    """As `usable`, for calls that it could serve but not well; who names it gets it all the same."""

    def refusal(self, named: bool, *args: object, **kwargs: object) -> str | None:
        """Why it is not taken for this call, or None."""
        reason = self.usable(*args, **kwargs)
        if reason is None and not named and self.worthwhile is not None:
            reason = self.worthwhile(*args, **kwargs)
        return reason

    def load(self) -> Any:
        """The module that computes it."""
        return importlib.import_module(self.module)


@dataclass(frozen=True)
class Choice:
    """What was chosen for one call, and why not the others."""

    operator: str
    implementation: Implementation
    named: bool
    """Whether the caller named it; otherwise it is the first usable one."""
    refused: tuple[tuple[str, str], ...]
    """(implementation, reason) for each one that stood before it and refused."""

    def __str__(self) -> str:
        why = "named" if self.named else "first usable"
        passed = "".join(f"; {name} refused: {reason}" for name, reason in self.refused)
        return f"{self.operator}: {self.implementation.name} ({why}{passed})"


class FirstTime(logging.Filter):
    """Lets each text through once; put it on the handler that writes a run's log."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        new = text not in self.seen
        self.seen.add(text)
        return new


def plain(named: str | None) -> bool:
    """Whether to go straight to the reference: when it is named, or under torch.compile, which fuses it by itself."""
    return named == "reference" or (named is None and torch.compiler.is_compiling())


def choose(
    operator: str, implementations: Sequence[Implementation], named: str | None, *args: object, **kwargs: object
) -> Choice:
    """The implementation that serves this call of `operator`.

    `args` and `kwargs` go to each implementation's `usable`. `named` is an implementation's name, or None (or "")
    for the first usable one in the order given. Each choice is reported to the logger `xscale_kernels` at level INFO.

    Raises UnusableError when the named one is unknown or refuses, or when all refuse.
    """
    if named and named not in {each.name for each in implementations}:
        names = ", ".join(each.name for each in implementations)
        raise UnusableError(f"{operator} has no implementation '{named}'; there are: {names}")
    refused: list[tuple[str, str]] = []
    for each in implementations:
        if named and each.name != named:
            continue
        reason = each.refusal(bool(named), *args, **kwargs)
        if reason is None:
            choice = Choice(operator, each, bool(named), tuple(refused))
            if not torch.compiler.is_compiling() and LOG.isEnabledFor(logging.INFO):
                LOG.info("%s", choice)
            return choice
        refused.append((each.name, reason))
    if named:
        able = [each.name for each in implementations if each.usable(*args, **kwargs) is None]
        raise UnusableError(
            f"{operator}: implementation '{named}' cannot serve this call: {refused[0][1]}. "
            f"These can: {', '.join(able) or 'none'}"
        )
    raise UnusableError(
        f"{operator}: no implementation can serve this call: " + "; ".join(f"{n}: {r}" for n, r in refused)
    )
