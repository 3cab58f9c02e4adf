"""The page on data flow names the types, fields, axes and signals that the code has."""

import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest

from xscale.nn.signals import FORMER_FIELDS, Signal
from xscale.nn.tokens import Tokens

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture/data-flow.md").read_text(encoding="utf-8")


def rows(name: str) -> list[list[str]]:
    """The cells of the table between the marks of that name, without its head."""
    match = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", PAGE, re.DOTALL)
    assert match, name
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in match[1].splitlines()[2:]]


def signals() -> dict[str, tuple[str, str]]:
    """Key -> the file that declares it, and its axes."""
    declared = {}
    for file in sorted((ROOT / "xscale").rglob("*.py")):
        if not re.search(r"^[A-Z_]+ = Signal\[", file.read_text(encoding="utf-8"), re.MULTILINE):
            continue
        place = file.relative_to(ROOT).as_posix()
        module = importlib.import_module(place.removesuffix(".py").replace("/", "."))
        declares = re.findall(r"^([A-Z_]+) = Signal\[", file.read_text(encoding="utf-8"), re.MULTILINE)
        for signal in (getattr(module, name) for name in declares):
            assert signal.key not in declared, f"{signal.key} is declared twice"
            declared[signal.key] = (place, ", ".join(signal.axes.names) if signal.axes else "-")
    return declared


def test_stations_have_the_fields_of_their_types() -> None:
    for station, name, cell, _ in rows("stations"):
        module, _, kind = name.strip("`").rpartition(".")
        part = getattr(importlib.import_module(module), kind)
        named = re.findall(r"`(\w+)`", cell)
        inherited = [each.name for each in fields(Tokens)] if "Tokens" in named else []
        if named and not cell.startswith("documents of"):
            own = [each.name for each in fields(part) if each.name not in inherited]
            assert own == [field for field in named if field != "Tokens"], station


def test_axes_are_those_that_the_fields_declare() -> None:
    declared = {each.name: ", ".join(each.metadata["axes"].names) for each in fields(Tokens) if each.metadata}
    assert {field.strip("`"): axes for field, axes in rows("axes")} == declared


def test_signals_are_those_that_parts_declare() -> None:
    table = {key.strip("`"): (place.strip("`"), axes) for key, place, axes in rows("signals")}
    assert table == signals()
    assert list(table) == sorted(table)


@pytest.mark.parametrize("name", FORMER_FIELDS)
def test_a_former_field_says_where_its_signal_is(name: str) -> None:
    module, _, signal = FORMER_FIELDS[name].rpartition(".")
    assert isinstance(getattr(importlib.import_module(module), signal), Signal)
    ids = importlib.import_module("torch").zeros(1, 2, dtype=int)
    with pytest.raises(AttributeError, match=rf"tokens.get\({signal}\), with {signal} from {module}"):
        getattr(Tokens.from_ids(ids), name)
    with pytest.raises(TypeError, match=f"with {signal} from {module}; here it is in `signals`"):
        Tokens.from_ids(ids, **{name: None})
