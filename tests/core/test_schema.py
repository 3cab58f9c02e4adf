"""The JSON schema for editors: nested families, and files that give a part of the keys."""

from typing import Annotated, Any

import pytest

from tests.core.fits import fits
from xscale.core import config as schema
from xscale.core.config import Config, Slot
from xscale.core.config_keys.schema import families_of, json_schema
from xscale.core.registry import Family

SHAPES: Family[Any] = Family("shape", dict)


class Shape:
    class Config(schema.Config):
        pass


@SHAPES.register("disc", traits={})
class Disc(Shape):
    """A round shape."""

    class Config(Shape.Config):
        radius: float = 1.0
        """How large it is."""


@SHAPES.register("pair", traits={})
class Pair(Shape):
    """Two shapes: a family whose parts hold parts of the family."""

    class Config(Shape.Config):
        parts: tuple[Annotated[Shape.Config, Slot(SHAPES)], ...] = ()
        """The two."""


class Inner(Config):
    size: int
    """Needed."""
    mode: str | None = None
    """Or none."""


class Root(Config):
    shape: Annotated[Shape.Config, Slot(SHAPES)] = Disc.Config()
    """The shape."""
    other: Annotated[Shape.Config, Slot(SHAPES)] | None = None
    """Another one, or none."""
    inner: Inner = Inner(size=1)
    """A section."""


def test_families_are_found_once_however_deep() -> None:
    assert [family.name for family in families_of(Root, set())] == ["shape"]


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"shape": "disc"},
        {"shape": {"kind": "disc", "radius": 2}},
        {"shape": {"radius": 2.5}},
        {"shape": {"kind": "pair", "parts": ["disc", {"kind": "pair", "parts": []}]}},
        {"other": None, "inner": {"mode": None}},
        {"use": "model/tiny"},
        {"use": ["model/tiny", "data/stdlib"], "inner": {"size": 3}},
    ],
)
def test_what_composes_fits(data: Any) -> None:
    assert fits(data, json_schema(Root, "x"))


@pytest.mark.parametrize(
    "data",
    [
        {"shap": "disc"},
        {"shape": "square"},
        {"shape": {"kind": "disc", "radius": "wide"}},
        {"shape": {"kind": "disc", "parts": []}},
        {"shape": {"kind": "pair", "parts": ["square"]}},
        {"inner": {"size": 1.5}},
        {"inner": {"size": None}},
        {"use": 3},
    ],
)
def test_what_does_not_compose_does_not_fit(data: Any) -> None:
    assert not fits(data, json_schema(Root, "x"))


def test_descriptions_reach_the_editor() -> None:
    schema = json_schema(Root, "x")
    disc = next(one for one in schema["$defs"]["family shape"]["anyOf"] if one.get("title") == "shape: disc")
    assert disc["description"] == "A round shape."
    assert disc["properties"]["radius"]["description"] == "How large it is."
    assert schema["properties"]["shape"]["description"] == "The shape."
