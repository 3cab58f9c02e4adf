"""A check of a part: a function that fails an assertion where the part does not keep what it declares."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from xscale.core.registry import Entry

Arguments = tuple[Any, ...]
Applies = Callable[[Entry[Any]], bool]
Subjects = Callable[[Entry[Any]], Iterable[tuple[str, Any]]]


def everywhere(entry: Entry[Any]) -> bool:
    """The check is for every part of the family."""
    return True


def itself(entry: Entry[Any]) -> Iterable[tuple[str, Any]]:
    """The part by its name: what most checks are called with."""
    yield entry.name, entry


@dataclass(frozen=True, eq=False)
class Check:
    """One check of the parts of a family: called with a part, it returns, or raises AssertionError with a reason."""

    family: str
    function: Callable[..., None]
    applies: Applies = everywhere
    """Whether the check is for this part, by its traits."""
    subjects: Subjects = itself
    """Arguments that the function is called with, by name: the part, or the part with each of several configs."""
    values: Mapping[str, Arguments] = field(default_factory=dict)
    """Further arguments by name, with each of which the function is called."""
    at_start: bool = False
    """Quick enough for the start of each run with a plugin."""

    @property
    def __name__(self) -> str:
        return self.function.__name__

    @property
    def sentence(self) -> str:
        """The promise that is checked, in words."""
        return self.function.__name__.replace("_", " ")

    @property
    def wants_folder(self) -> bool:
        """Whether the function writes files, and takes a folder as its last argument."""
        return "folder" in inspect.signature(self.function).parameters

    def cases(self, entry: Entry[Any]) -> Iterator[tuple[str, Arguments]]:
        """Names and arguments of the calls that check the part."""
        if not self.applies(entry):
            return
        for name, subject in self.subjects(entry):
            if not self.values:
                yield name, (subject,)
            for value_name, values in self.values.items():
                yield f"{name}-{value_name}", (subject, *values)

    def __call__(self, *arguments: Any) -> None:
        self.function(*arguments)

    def run(self, arguments: Arguments, folder: Path) -> None:
        """Call the function with the arguments of a case, and with `folder` if it writes files."""
        self.function(*arguments, *([folder] if self.wants_folder else []))


def check(
    family: str,
    applies: Applies = everywhere,
    *,
    subjects: Subjects = itself,
    values: Mapping[str, Arguments] | None = None,
    at_start: bool = False,
) -> Callable[[Callable[..., None]], Check]:
    """Decorate a function as a check of the family's parts."""

    def decorate(function: Callable[..., None]) -> Check:
        return Check(family, function, applies, subjects, values or {}, at_start)

    return decorate


def checks_of(suite: ModuleType) -> list[Check]:
    """The checks that a module defines, in its order."""
    return [value for value in vars(suite).values() if isinstance(value, Check)]


def is_near(value: float, expected: float, relative: float, absolute: float = 1e-12) -> bool:
    """Whether `value` is within the larger of both distances of `expected`."""
    return abs(value - expected) <= max(relative * abs(expected), absolute)
