"""A trainer's table of keys: each of its keys, the key here, and how its value is converted."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Settings = Mapping[str, Any]
"""Dotted key -> value."""


class UnfitError(Exception):
    """A value that has no counterpart here, with the reason as a clause."""


@dataclass(frozen=True)
class KeyEntry:
    """A key of another trainer, and what it is here."""

    name: str
    """Its name there, with underscores; dotted where the file has sections."""
    path: str = ""
    """Dotted key here. `moe.` stands for the mixture in the place of the ffn; empty: there is no such key here."""
    unit: str = "same"
    """Name of the conversion, in `UNITS`."""
    of: tuple[str, ...] = ()
    """Other keys there that the conversion reads."""
    values: Mapping[str, Settings] = field(default_factory=dict)
    """Instead of `path`: a value, in lower case, -> the keys that it sets here."""
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Key here -> values of it with which alone this key means something."""
    instead: str = ""
    """Without a counterpart: a clause that says what is done here."""


@dataclass(frozen=True)
class DerivedKey:
    """A key here that follows from other_values here, where the trainer's file does not set it."""

    path: str
    unit: str
    of: tuple[str, ...]
    """Keys here that the conversion reads: the first is its value."""
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainerTable:
    """All that is known about the keys of one trainer."""

    name: str
    """The trainer."""
    file: str
    """Its config, as a noun phrase."""
    suffixes: tuple[str, ...]
    """Endings of its configs."""
    entries: tuple[KeyEntry, ...]
    """Entries of its keys; the later of two for one key here counts."""
    derived: tuple[DerivedKey, ...] = ()
    defaults: Settings = field(default_factory=dict)
    """Its own defaults, of keys there, where they differ from those here."""
    fixed: Settings = field(default_factory=dict)
    """Keys here that follow from the trainer itself."""
    sections: bool = False
    """Whether its keys are named with their sections."""
    can: str = ""
    """Sentence on what it has and xscale has not."""
    cannot: str = ""
    """Sentence on what xscale adds."""

    def key_name(self, dotted: str) -> str:
        """Return the name in the table of a key as a file has it."""
        name = dotted if self.sections else dotted.rpartition(".")[2]
        return name.strip("-").replace("-", "_")

    def named(self, name: str) -> list[KeyEntry]:
        """Return the entries of a key, by its name in the table."""
        return [entry for entry in self.entries if entry.name == name]


LAUNCHER = "`xscale launch local --processes N CONFIG`, or slurm, starts the processes"
TORCHRUN = tuple(
    KeyEntry(name, instead=LAUNCHER)
    for name in (
        "nproc_per_node",
        "nnodes",
        "node_rank",
        "master_addr",
        "master_port",
        "standalone",
        "rdzv_backend",
        "rdzv_endpoint",
        "rdzv_id",
    )
)
"""Options of torchrun, which a script has beside the trainer's."""

Convert = Callable[[Any, list[Any]], Any]


@dataclass(frozen=True)
class Unit:
    """A conversion of a value, and its text in the documentation, where `{}` are the other keys that it reads."""

    convert: Convert
    text: str = ""


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnfitError("must be a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise UnfitError("must be finite")
    return value


def _divided(value: Any, other_values: list[Any]) -> float:
    if not _number(other_values[0]):
        raise UnfitError("is a ratio to 0")
    return float(f"{_number(value) / other_values[0]:.12g}")


def _product(value: Any, other_values: list[Any]) -> int:
    # Counts such as -1 stand for all ranks that are left, which the file does not say.
    for other in (value, *other_values):
        if not isinstance(other, int) or isinstance(other, bool):
            raise UnfitError("must be an integer")
    return math.prod(max(1, int(factor)) for factor in (value, *other_values))


def _exact_quotient(value: Any, other_values: list[Any]) -> int:
    divisor = _product(1, other_values)
    if int(_number(value)) <= 0:
        raise UnfitError("is left to the trainer")
    if value % divisor:
        raise UnfitError(f"must be a multiple of {divisor}")
    return int(value // divisor)


def _rounded(value: Any, other_values: list[Any]) -> int:
    return round(float(_number(value) * _number(other_values[0])))


def _steps_or_fraction(value: Any, other_values: list[Any]) -> int:
    return _rounded(value, other_values) if 0 < _number(value) < 1 else int(_number(value))


def _positive(value: Any, other_values: list[Any]) -> Any:
    if _number(value) <= 0:
        raise UnfitError("is left to the trainer")
    return value


def _positive_or_zero(value: Any, other_values: list[Any]) -> Any:
    return max(0, _number(value))


def _zero_is_null(value: Any, other_values: list[Any]) -> Any:
    return _number(value) or None


def _item(index: int) -> Convert:
    def item(value: Any, other_values: list[Any]) -> Any:
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise UnfitError("must be a list of two numbers")
        return value[index]

    return item


def _integer(value: Any, other_values: list[Any]) -> int:
    if int(_number(value)) != value:
        raise UnfitError("must be a whole number")
    return int(value)


def _remaining(value: Any, other_values: list[Any]) -> int:
    return max(0, int(_number(value)) - int(_number(other_values[0])))


def _gated_hidden(value: Any, other_values: list[Any]) -> int:
    return int(4 * _number(value) * 2 / 3) // 64 * 64


def _width(value: Any, other_values: list[Any]) -> int:
    aspect, head = (_product(1, [other]) for other in other_values)
    return -(-_product(value, []) * aspect // head) * head


def _heads(value: Any, other_values: list[Any]) -> int:
    return _width(value, other_values) // _product(1, other_values[1:])


def _virtual_stages(value: Any, other_values: list[Any]) -> int:
    return _exact_quotient(other_values[0], [other_values[1], value])


UNITS = {
    "same": Unit(lambda value, other_values: value),
    "integer": Unit(_integer),
    "divided by": Unit(_divided, "divided by {}"),
    "times": Unit(_product, "times {}"),
    "in units of": Unit(_exact_quotient, "divided by {}"),
    "fraction of": Unit(_rounded, "times {}, rounded"),
    "steps or fraction of": Unit(_steps_or_fraction, "below 1: times {}, rounded"),
    "negation": Unit(lambda value, other_values: not value, "negated"),
    "positive": Unit(_positive, "where it is positive"),
    "at least 0": Unit(_positive_or_zero, "-1 is 0"),
    "0 is null": Unit(_zero_is_null, "0 is null"),
    "first of two": Unit(_item(0), "its first number"),
    "second of two": Unit(_item(1), "its second number"),
    "less": Unit(_remaining, "less {}"),
    "gated hidden": Unit(_gated_hidden, "8/3 of it, rounded down to 64"),
    "width": Unit(_width, "times {}"),
    "heads": Unit(_heads, "times {}"),
    "virtual stages": Unit(_virtual_stages, "as stages of a rank, by {}"),
}
"""Name of a conversion -> the conversion."""
