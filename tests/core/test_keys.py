"""Config keys from a JSON schema: what is below a section or slot, how a key is found, and how a type reads."""

from typing import Annotated, Any, Literal

import pydantic
import pytest

from xscale.core import config as schema
from xscale.core.config import Config, Slot
from xscale.core.config_keys.keys import ConfigKeys, choices, first_sentence, type_text, value_text
from xscale.core.config_keys.schema import json_schema
from xscale.core.registry import Family

ANIMALS: Family[Any] = Family("animal", dict)


class Animal:
    class Config(schema.Config):
        pass


@ANIMALS.register("cat", traits={}, aliases=("kitten",))
class Cat(Animal):
    """A cat."""

    class Config(Animal.Config):
        renamed = {"lifes": "lives"}
        lives: int = pydantic.Field(default=9, ge=1, lt=10)
        """How many."""
        weight: float = 4.0
        """In kg."""


@ANIMALS.register("herd", traits={})
class Herd(Animal):
    """Several animals."""

    class Config(Animal.Config):
        weight: float = 4.0
        """In kg."""
        members: tuple[Annotated[Animal.Config, Slot(ANIMALS)], ...] = ()
        """The animals."""
        leader: Annotated[Animal.Config, Slot(ANIMALS)] = Cat.Config(lives=3)
        """The first."""


class Fence(Config):
    height: float | None = pydantic.Field(default=None, gt=0)
    """In metres. Null: none."""
    colour: Literal["red", "green"] = "red"
    """Colour of the paint."""
    posts: int
    """How many."""


class Farm(Config):
    pet: Annotated[Animal.Config, Slot(ANIMALS)] = Cat.Config()
    """The pet."""
    fence: Fence = Fence(posts=3)
    """The fence."""
    more: tuple[Fence, ...] = ()
    """Other fences."""


@pytest.fixture(scope="module")
def keys() -> ConfigKeys:
    return ConfigKeys(json_schema(Farm, "x"))


def paths(groups: Any) -> list[list[str]]:
    return [[key.path for key in group] for group in groups]


def test_sections_and_slots_have_their_keys(keys: ConfigKeys) -> None:
    assert [key.path for key in keys.children(keys.root)] == ["pet", "fence", "more[]"]
    pet, fence, more = keys.children(keys.root)
    assert [key.path for key in keys.children(fence)] == ["fence.height", "fence.colour", "fence.posts"]
    assert next(key.path for key in keys.children(more)) == "more[].height"
    assert (keys.family(pet), keys.family(fence)) == ("animal", None)
    assert [key.name for key in keys.children(pet, "cat")] == ["lives", "weight"]
    shared = {key.name: key.needs[0].kinds for key in keys.children(pet)}
    assert shared == {"lives": ("cat",), "weight": ("cat", "herd"), "members": ("herd",), "leader": ("herd",)}


def test_a_key_has_its_type_default_sentence_and_old_names(keys: ConfigKeys) -> None:
    (lives,) = keys.at("pet.lives")
    assert (lives.type, lives.node["default"], lives.sentence, lives.old_names) == (
        "int in [1, 10)",
        9,
        "How many.",
        ("lifes",),
    )
    assert [key.path for key in keys.at("pet.lifes")] == ["pet.lives"]
    assert paths(keys.find("pet.kind")) == [["pet"]]
    assert keys.find("fence.kind") == []
    assert keys.old_kinds("animal") == {"kitten": "cat"}
    assert [keys.at(f"fence.{name}")[0].type for name in ("height", "colour", "posts")] == [
        "float > 0 or null",
        "one of red, green",
        "int",
    ]
    assert not keys.at("fence.posts")[0].has_default
    assert keys.at("pet")[0].node["default"] == "cat"
    assert keys.at("pet.leader")[0].node["default"] == {"kind": "cat", "lives": 3}
    assert keys.at("fences") == keys.at("fence.colour.red") == []


def test_a_key_is_found_by_words_of_its_path_and_by_kinds(keys: ConfigKeys) -> None:
    assert paths(keys.find("lives")) == [["pet.lives"]]
    assert paths(keys.find("cat.weight")) == paths(keys.find("pet.weight")) == [["pet.weight"]]
    assert paths(keys.find("colour")) == [["fence.colour", "more[].colour"]]
    assert paths(keys.find("more.colour")) == [["more[].colour"]]
    assert paths(keys.find("pet.leader.leader.lives")) == [["pet.leader.leader.lives"]], "a part in its own family"
    assert keys.find("colour.lives") == []
    assert [(key.path, kind) for key, kind in keys.find_part("herd")] == [("pet", "herd")]
    assert [(key.path, kind) for key, kind in keys.find_part("pet.kitten")] == [("pet", "cat")]
    assert keys.find_part("fence.cat") == []


def test_a_misspelt_key_has_its_nearest(keys: ConfigKeys) -> None:
    assert keys.suggest("fence.heigth")[0] == "fence.height"
    assert keys.suggest("cat.livse")[0] == "pet.lives"
    assert keys.suggest("wibble") == []


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ({"type": "integer", "minimum": 1}, "int >= 1"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "float in (0, 1]"),
        ({"type": "integer", "minimum": 8, "multipleOf": 4}, "int >= 8, a multiple of 4"),
        ({"type": "array", "items": {"type": "string"}, "minItems": 2}, "list of str, at least 2"),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}]}, "list of int and null"),
        ({"type": "object", "additionalProperties": {"type": "boolean"}}, "mapping of str to bool"),
        ({"$ref": "#/$defs/family core"}, "part of the family core"),
    ],
)
def test_a_type_reads_as_python_has_it(node: dict[str, Any], text: str) -> None:
    assert type_text(node) == text


def test_values_read_as_a_config_has_them() -> None:
    values = [None, True, 0, 1.0, "a", ["a", None], {"kind": "cat"}]
    assert [value_text(value) for value in values] == ["null", "true", "0", "1.0", "a", "[a, null]", "{kind: cat}"]
    assert choices({"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}) == ["a", "b", "null"]
    assert choices({"type": "boolean"}) == ["true", "false"]
    assert choices({"anyOf": [{"type": "integer"}, {"type": "null"}]}) == []


def test_the_first_sentence_ends_at_a_full_stop_and_not_at_an_abbreviation() -> None:
    assert first_sentence("As Fu et al. 2020\nsay, v1.1. Then more.") == "As Fu et al. 2020 say, v1.1."
    assert first_sentence("By Fu et al. And so on") == "By Fu et al. And so on"
    assert first_sentence("no stop") == "no stop"
