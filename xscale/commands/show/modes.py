"""The modes in which each variant loads, from the table that find_modes makes."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from xscale.core.yaml_reader import parse

TABLE = Path(__file__).with_suffix(".yaml")
"""Id -> names of the modes in which the variant loads."""


@dataclass(frozen=True)
class Modes:
    """Which models a variant can be."""

    causal: bool
    """A decoder."""
    bidirectional: bool
    """An encoder."""
    cross: bool
    """An encoder-decoder, whose decoder attends to the source."""


def modes_of(id: str) -> Modes:
    """The modes of the variant `id`, from the table. KeyError: it has no recipe."""
    names = _table()[id]
    return Modes(**{mode: mode in names for mode in ("causal", "bidirectional", "cross")})


@cache
def _table() -> dict[str, list[str]]:
    table: dict[str, list[str]] = parse(TABLE.read_text(encoding="utf-8"), str(TABLE))
    return table
