"""The schema: strict types, unknown keys with the nearest name, faults with their dotted paths, all at once."""

from typing import Annotated, Any, Literal

import pydantic
import pytest

from xscale.core import config as schema
from xscale.core.config import Config, Slot, decode, encode
from xscale.core.errors import ConfigError
from xscale.core.registry import Family

CORES: Family[Any] = Family("core", dict)
LAYERS: Family[Any] = Family("layer", dict)


class Part:
    class Config(schema.Config):
        pass


@CORES.register("plain", traits={})
class Plain(Part):
    class Config(Part.Config):
        width: int = 4
        """Width."""
        rate: float = 0.5
        """Rate."""
        mode: Literal["fast", "exact"] = "fast"
        """Mode."""


@CORES.register("other", traits={})
class Other(Part):
    """A part without keys of its own."""


@LAYERS.register("nested", traits={})
class Nested(Part):
    class Config(Part.Config):
        core: Annotated[Part.Config, Slot(CORES)] = Plain.Config()
        """The core."""
        maybe: Annotated[Part.Config, Slot(CORES)] | None = None
        """Another."""
        several: tuple[Annotated[Part.Config, Slot(CORES)], ...] = ()
        """More."""


class Section(Config):
    steps: int = pydantic.Field(default=3, ge=1)
    """Steps."""
    fraction: float = pydantic.Field(default=0.5, gt=0, lt=1)
    """Bounded on both sides."""
    floor: float | None = pydantic.Field(default=None, gt=0)
    """Bounded, or null."""
    limits: tuple[Annotated[int, pydantic.Field(ge=0, le=8)], ...] = ()
    """Each bounded."""
    some: tuple[Annotated[int, pydantic.Field(ge=0)], ...] = pydantic.Field(default=(1,), min_length=1)
    """At least one."""


class Root(Config):
    layer: Annotated[Part.Config, Slot(LAYERS)] = Nested.Config()
    """The layer."""
    section: Section = Section()
    """A section."""
    names: tuple[str, ...] = ()
    """Names."""
    needed: int
    """Needed."""


def faults(data: dict[str, Any], origin: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        decode(Root, data, origin)
    return [str(problem) for problem in caught.value.problems]


def test_a_slot_takes_a_kind_a_mapping_or_a_config() -> None:
    by_name = decode(Root, {"needed": 1, "layer": {"kind": "nested", "core": "other"}})
    by_mapping = decode(Root, {"needed": 1, "layer": {"kind": "nested", "core": {"kind": "other"}}})
    by_config = Root(needed=1, layer=Nested.Config(core=Other.Config()))
    assert by_name == by_mapping == by_config
    assert type(by_name.layer.core) is Other.Config  # type: ignore[attr-defined]


def test_slots_in_a_tuple_or_left_out() -> None:
    config = decode(
        Root, {"needed": 1, "layer": {"kind": "nested", "several": ["plain", {"kind": "other"}], "maybe": None}}
    )
    assert decode(Root, encode(config)) == config
    assert encode(config)["layer"]["several"] == [
        {"kind": "plain", "width": 4, "rate": 0.5, "mode": "fast"},
        {"kind": "other"},
    ]


def test_two_parts_with_equal_keys_are_not_equal() -> None:
    class Twin(Plain):
        pass

    family: Family[Any] = Family("core", dict)
    twin = family.register("twin", traits={})(Twin)
    assert twin.Config() != Plain.Config()
    assert (Plain.Config.kind, twin.Config.kind) == ("plain", "twin")


def test_every_fault_is_told_at_once_with_its_path() -> None:
    found = faults(
        {
            "layer": {"kind": "nested", "core": {"kind": "plain", "widht": 3, "mode": "quick"}, "several": ["plian"]},
            "section": {"steps": 0, "stepz": 1},
            "names": "one",
        }
    )
    text = "\n".join(found)
    for said in (
        "layer.core.widht: unknown key. Did you mean 'width'?",
        "layer.core.mode: ",
        "layer.several.0: there is no core of kind 'plian'. Did you mean 'plain'?",
        "section.steps: ",
        "section.stepz: unknown key. Did you mean 'steps'?",
        "names: ",
        "needed: required key is missing",
    ):
        assert said in text
    assert len(found) == 7


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"needed": "1"}, "needed: must be a valid integer, got '1'"),
        ({"needed": 1.5}, "needed: must be a valid integer"),
        ({"needed": True}, "needed: must be a valid integer"),
        ({"needed": 1, "names": [1]}, "names.0: "),
        ({"needed": 1, "section": 3}, "section: "),
        ({"needed": 1, "layer": 3}, "layer: a layer is chosen by 'kind'"),
        ({"needed": 1, "layer": {}}, "layer: a layer is chosen by 'kind'. Choose one of: nested."),
        ({"needed": 1, "layer": {"kind": 4}}, "layer: a layer is chosen by 'kind'"),
        ({"needed": 1, "layer": {"kind": "nested", "core": {"kind": "plain", "rate": "x"}}}, "layer.core.rate: "),
    ],
)
def test_a_wrong_value_is_told(data: dict[str, Any], said: str) -> None:
    assert any(fault.startswith(said) for fault in faults(data)), faults(data)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"steps": 0}, "section.steps: must be >= 1, got 0"),
        ({"fraction": 1.5}, "section.fraction: must be in (0, 1), got 1.5"),
        ({"fraction": 0.0}, "section.fraction: must be in (0, 1), got 0.0"),
        ({"fraction": float("nan")}, "section.fraction: must be a finite number, got nan"),
        ({"floor": 0.0}, "section.floor: must be > 0, got 0.0"),
        ({"limits": [1, 9]}, "section.limits.1: must be <= 8, got 9"),
    ],
)
def test_a_value_out_of_bounds_is_told_with_the_bounds(section: dict[str, Any], said: str) -> None:
    assert faults({"needed": 1, "section": section}) == [said]
    assert decode(Root, {"needed": 1, "section": {"floor": None}}).section.floor is None


def test_an_integer_is_a_float_and_a_list_a_tuple() -> None:
    config = decode(
        Root, {"needed": 1, "layer": {"kind": "nested", "core": {"kind": "plain", "rate": 1}}, "names": ["a"]}
    )
    assert config.names == ("a",)
    assert config.layer.core.rate == 1.0  # type: ignore[attr-defined]


def test_where_a_value_came_from_is_told() -> None:
    assert faults({"needed": "x"}, {"needed": "command line"})[0].startswith("needed (command line): ")


def test_a_config_of_another_family_is_refused() -> None:
    with pytest.raises(pydantic.ValidationError, match="must be a layer, got a core"):
        Root(needed=1, layer=Plain.Config())


def test_a_config_is_frozen_and_hashable() -> None:
    config = Root(needed=1)
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.needed = 2  # type: ignore[misc]
    assert hash(config) == hash(Root(needed=1))


def test_a_bad_item_is_the_only_problem_of_its_list() -> None:
    with pytest.raises(ConfigError) as caught:
        decode(Section, {"some": [-1]})
    assert [str(problem) for problem in caught.value.problems] == ["some.0: must be >= 0, got -1"]
    with pytest.raises(ConfigError, match="some: tuple should have at least 1 item"):
        decode(Section, {"some": []})
