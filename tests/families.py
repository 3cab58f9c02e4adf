"""Where the families are, and their parts: what laws and conformance tests are parametrised over."""

from collections.abc import Iterable
from typing import Any

import pytest

from xscale.commands.show.families import FAMILIES, family_named
from xscale.core.registry import Entry, Family


def family(name: str) -> Family[Any]:
    """The family of that name; imports what is in it, and nothing else."""
    return family_named(name)


def entries() -> list[Entry[Any]]:
    """Every part of every family."""
    return [entry for name in FAMILIES for entry in family(name)]


def each(parts: Iterable[Entry[Any]]) -> pytest.MarkDecorator:
    """Run a test once for each of `parts`, as its argument `entry`."""
    names = list(parts)
    return pytest.mark.parametrize("entry", names, ids=[entry.name for entry in names])


def example(entry: Entry[Any]) -> Any:
    """A config of the part for sizes of tens: its own `example()` where the defaults are made for thousands."""
    return getattr(entry.part, "example", entry.part.Config)()
