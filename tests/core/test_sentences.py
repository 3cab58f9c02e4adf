"""The sentence of a field is the string below it, as written in its class or the nearest one above."""

import pydantic

from xscale.core.config import Config, sentences
from xscale.core.config_keys.schema import json_schema


class Above(Config):
    kept: int = 1
    """Stands above,
    in two lines."""
    again: int = 1
    """Is said again below."""
    dropped: int = 1
    """Is declared again without a word."""


class Below(Above):
    again: int = 2
    """Said anew."""
    dropped: int = 2
    named: int = pydantic.Field(default=3, description="Given to pydantic.")


def test_sentences_are_inherited_and_said_again() -> None:
    assert sentences(Above).keys() == {"kept", "again", "dropped"}
    assert sentences(Below) == {"kept": "Stands above,\nin two lines.", "again": "Said anew."}


def test_the_schema_tells_them() -> None:
    class Whole(Config):
        part: Below = Below()
        """A section."""

    told = json_schema(Whole, "")
    assert told["properties"]["part"]["description"] == "A section."
    below = told["$defs"]["Below"]["properties"]
    assert {name: field.get("description") for name, field in below.items()} == {
        "kept": "Stands above,\nin two lines.",
        "again": "Said anew.",
        "dropped": None,
        "named": "Given to pydantic.",
    }
