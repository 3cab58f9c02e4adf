"""Requirements as data: the facts of a recipe, what its parts require of them, and the changes that would meet it.

A *fact* is a function: its name is the fact's, its parameters name the facts that it is computed from. A *requirement*
is one too, and returns a `Problem` for each contradiction, with the changes that would end it (`choices`). The facts
that are given, the *roots*, are the sections of a recipe. `xscale.requirements.solver` tries the changes before it
names them.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from xscale.core.choices import OF_PART, Choice, Edit
from xscale.core.config import Config
from xscale.core.errors import Problem

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Function = Callable[..., Any]
UNKNOWN: Final = object()
"""Value of a fact that cannot be known, because values of its section were refused."""
USUAL = frozenset({"attention", "softmax", "dense", "gated", "layer", "rms", "rope", "adamw"})
"""Kinds of parts that are advised before others."""
NEAR = 4
"""At most so many divisors are named."""
MOST_TRIED = 1_000_000
"""Numbers that are tried as divisors."""
SETTINGS = "settings"
"""The root that is the whole recipe; refused sections have their defaults in it, so that it is always known."""


def take(*values: Any, key: str = "") -> tuple[Choice, ...]:
    """Return a choice for each value of `key`; empty: the key at fault."""
    return tuple(Choice(((key, value),)) for value in values)


def divisors_of(count: int) -> list[int]:
    """Return the divisors of a count, ascending: all to 1e12, and of a larger count those that a search soon finds."""
    small = [
        number for number in range(1, min(math.isqrt(count), MOST_TRIED) + 1) if count % number == 0
    ]
    return sorted({*small, *(count // number for number in small)})


def divisors(count: int) -> tuple[Choice, ...]:
    """Return the choice of each degree that divides `count`, at the key at fault."""
    return take(*divisors_of(count))


def at_most(path: str, what: str, value: Any, *alternatives: Choice) -> Problem:
    """Return the problem of a value at `path` that is too large; `value` is the largest that works."""
    return Problem(path, what, "Lower values work too.", choices=take(value) + alternatives)


def at_least(path: str, what: str, value: Any, *alternatives: Choice) -> Problem:
    """Return the problem of a value at `path` that is too small; `value` is the smallest that works."""
    return Problem(path, what, "Higher values work too.", choices=take(value) + alternatives)


def must_be_odd(path: str, value: int) -> list[Problem]:
    """List why the value at `path` is no odd number of at least 1; the choice is the next one."""
    if value >= 1 and value % 2:
        return []
    what = f"must be odd and positive, got {value}"
    return [Problem(path, what, choices=take(max(1, value + 1 - value % 2)))]


def must_divide(
    path: str, key: str, value: int, total: str, count: int, *alternatives: Choice, least: int = 1
) -> list[Problem]:
    """List why `key`, which is `value` at `path`, does not divide `count`.

    `total` is the key of the count, or a phrase with `{}` in its place. The choices are the divisors from `least` on,
    the nearest first, and `alternatives`.
    """
    if count % value == 0:
        return []
    fitting = [number for number in divisors_of(count) if number >= least]
    near = sorted(fitting, key=lambda number: abs(number - value))[:NEAR]
    named = total.format(count) if "{}" in total else f"{total}={count}"
    what = f"{key}={value} does not divide {named}"
    return [Problem(f"{path}.{key}", what, choices=take(*sorted(near)) + alternatives)]


def multiples_near(value: int, factor: int) -> list[int]:
    """Return the multiples of `factor` that are next to a value, without 0."""
    below = value // factor * factor
    return [multiple for multiple in (below, below + factor) if multiple]


def change(*edits: Edit) -> tuple[Choice, ...]:
    """Return the choice that makes several edits together."""
    return (Choice(edits),)


def kinds(names: Iterable[str], *paths: str) -> tuple[Choice, ...]:
    """Return a choice for each of the names: the part of that kind at all of the paths, the usual parts first."""
    ordered = sorted(names, key=lambda name: name not in USUAL)
    return tuple(
        Choice(tuple((f"{path}.kind", name) for path in paths)) for name in ordered if paths
    )


def instead(family: str, kind: str, names: Iterable[str]) -> tuple[Choice, ...]:
    """Return a choice for each of the names: that part wherever there is one of `kind`. `with_paths` finds where."""
    ordered = sorted(names, key=lambda name: name not in USUAL)
    return tuple(Choice(((f"{family} {kind}", name),)) for name in ordered)


def in_parts(family: str, kind: str, key: str, *values: Any) -> tuple[Choice, ...]:
    """Return a choice for each value of `key` in all parts of `kind`. `with_paths` finds where they are."""
    return take(*values, key=f"{family} {kind}{OF_PART}{key}")


def with_paths(problem: Problem, config: Config, path: str) -> Problem:
    """Return the problem with the keys of the choices of `instead` and `in_parts`, in the config at `path`."""
    choices: list[Choice] = []
    for choice in problem.choices:
        (key, value), *further = choice.edits
        family, _, part = key.partition(" ")
        if further or not part:
            choices.append(choice)
            continue
        kind, of_part, inner = part.partition(OF_PART)
        paths = part_paths(config, family, kind, path)
        if not of_part:
            choices += kinds([value], *paths)
        elif paths:
            choices.append(Choice(tuple((f"{where}.{inner}", value) for where in paths)))
    return replace(problem, choices=tuple(choices))


def part_paths(config: Any, family: str, kind: str, path: str) -> list[str]:
    """Return the dotted paths below `path`, that of `config`, at which there is a part of that kind."""
    if isinstance(config, tuple):
        below = [(f"{path}[{number}]", item) for number, item in enumerate(config)]
    elif not isinstance(config, Config):
        below = []
    elif (config.family, config.kind) == (family, kind):
        return [path]
    else:
        fields = type(config).model_fields
        below = [
            (f"{path}.{field.alias or name}", getattr(config, name))
            for name, field in fields.items()
        ]
    return [inner for where, item in below for inner in part_paths(item, family, kind, where)]


@dataclass(frozen=True)
class KeyNeed:
    """The need of a part for some values of one key of the recipe: `KeyNeed("parallel.mesh.pp", (1,), why)`."""

    key: str
    allowed: tuple[Any, ...]
    """Values that it works with."""
    why: str
    """A clause on why it does not work with another."""
    instead: tuple[Edit, ...] = ()
    """Edits, each of which leaves out what has the need. Keys are those of a recipe, or, where they begin with a dot,
    below the part's own path; a dot alone is the part itself."""

    def problems(self, settings: Any, path: str) -> list[Problem]:
        """Return the problem with the value of the key in a recipe, if there is one; `path` is that of the part."""
        value = settings
        for name in self.key.split("."):
            value = getattr(value, name)
        if value in self.allowed:
            return []
        choices = take(*self.allowed)
        for key, edit in self.instead:
            choices += take(edit, key=f"{path}{key}".rstrip(".") if key.startswith(".") else key)
        return [Problem(self.key, self.why, choices=choices)]


def reads(*sections: str) -> Callable[[FunctionT], FunctionT]:
    """State what a function reads of the fact `settings`; without it, it may read every section."""

    def mark(function: FunctionT) -> FunctionT:
        function.__dict__["sections"] = frozenset(sections)
        return function

    return mark


class RequirementSet:
    """The facts that a recipe offers, and the requirements on them."""

    def __init__(
        self, roots: Iterable[str], facts: Iterable[Function], requirements: Iterable[Function]
    ) -> None:
        self.roots = frozenset(roots)
        requirements = tuple(requirements)
        self.names = [function.__name__ for function in requirements]
        """Requirements by name, in the order in which their problems are listed. As facts they are their problems."""
        self.functions: dict[str, Function] = {}
        self.parameters: dict[str, tuple[str, ...]] = {}
        for function in (*facts, *requirements):
            name = function.__name__
            assert name not in {*self.functions, *self.roots}, f"'{name}' stands for two functions"
            self.functions[name] = function
            self.parameters[name] = tuple(inspect.signature(function).parameters)
        self._sections: dict[str, frozenset[str]] = {}

    def sections(self, name: str) -> frozenset[str]:
        """Return the roots that a fact or requirement is computed from."""
        if name not in self._sections:
            self._sections[name] = self._find_sections(name)
        return self._sections[name]

    def _find_sections(self, name: str) -> frozenset[str]:
        if name == SETTINGS:
            return self.roots
        if name in self.roots:
            return frozenset((name,))
        assert name in self.functions, f"there is no fact '{name}'"
        stated: frozenset[str] = self.functions[name].__dict__.get("sections", self.roots)
        parameters = self.parameters[name]
        return frozenset().union(
            *(stated if name == SETTINGS else self.sections(name) for name in parameters)
        )

    def facts(self, values: Mapping[str, Any]) -> "Facts":
        """Return the facts of a recipe; `values`: root -> value, UNKNOWN for a section that was refused."""
        return Facts(self, values)


class Facts:
    """The facts of one recipe; each is computed when it is first read, and once."""

    def __init__(self, requirements: RequirementSet, values: Mapping[str, Any]) -> None:
        self.requirements = requirements
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            arguments = [self[parameter] for parameter in self.requirements.parameters[name]]
            is_known = not any(argument is UNKNOWN for argument in arguments)
            value: Any = self.requirements.functions[name](*arguments) if is_known else UNKNOWN
            is_requirement = name in self.requirements.names
            # A generator would be empty when it is read again.
            self._values[name] = tuple(value) if is_requirement and value is not UNKNOWN else value
        return self._values[name]

    def changed(self, values: Mapping[str, Any]) -> "Facts":
        """Return the facts of another recipe. What is computed from roots that are equal is not computed again."""
        equal = {root for root in self.requirements.roots if values[root] == self._values[root]}
        facts = Facts(self.requirements, values)
        for name, value in self._values.items():
            if name in self.requirements.functions and self.requirements.sections(name) <= equal:
                facts._values[name] = value
        return facts

    def problems(self) -> dict[str, tuple[Problem, ...]]:
        """Return the problems of each requirement by its name; one whose facts are not all known has none."""
        values = {name: self[name] for name in self.requirements.names}
        return {name: value for name, value in values.items() if value is not UNKNOWN}
