"""The JSON schema of a config, for editors: one definition a family and a nested model, so that patterns may nest."""

from collections.abc import Iterator
from typing import Any, get_args

from xscale.core.config import FAMILY_MARK, Config, Slot
from xscale.core.registry import Family

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(root: type[Config], title: str) -> dict[str, Any]:
    """The schema of files that are composed into `root`: any of its keys, and `use`; none is needed."""
    definitions: dict[str, Any] = {}
    families = {family.name: family for family in families_of(root, set())}
    for name, family in sorted(families.items()):
        parts = [_part(family, entry, definitions) for entry in family]
        definitions[f"family {name}"] = {"anyOf": [{"enum": family.names()}, *parts]}
    whole = _plain(root, definitions)
    use = {"description": "Configs that this one is laid over, from left to right.", "type": ["string", "array"]}
    return {
        "$schema": DIALECT,
        "title": title,
        "type": "object",
        "additionalProperties": False,
        "properties": {"use": {**use, "items": {"type": "string"}}, **whole["properties"]},
        "$defs": dict(sorted(definitions.items())),
    }


def families_of(schema: type[Config], seen: set[Any]) -> Iterator[Family[Any]]:
    """Every family that a slot of `schema`, or of a config below it, is filled from."""
    if schema in seen:
        return
    seen.add(schema)
    for field in schema.model_fields.values():
        for item in [*field.metadata, *_items(field.annotation)]:
            if isinstance(item, Slot) and item.family.name not in seen:
                seen.add(item.family.name)
                yield item.family
                for entry in item.family:
                    yield from families_of(entry.part.Config, seen)
            elif isinstance(item, type) and issubclass(item, Config):
                yield from families_of(item, seen)


def _items(annotation: Any) -> Iterator[Any]:
    yield annotation
    for argument in get_args(annotation):
        yield from _items(argument)


def _part(family: Family[Any], entry: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    one = _plain(entry.part.Config, definitions)
    return {
        "title": f"{family.name}: {entry.name}",
        "description": entry.summary,
        "type": "object",
        "additionalProperties": False,
        # No `kind` is needed: a file may change some keys of a part that it takes from another file.
        "properties": {"kind": {"const": entry.name}, **one.get("properties", {})},
    }


def _plain(schema: type[Config], definitions: dict[str, Any]) -> dict[str, Any]:
    """pydantic's schema with families referred to, its nested models moved to `definitions`."""
    made: dict[str, Any] = _refer(schema.model_json_schema())
    for name, nested in made.pop("$defs", {}).items():
        # A file gives some keys of a section and leaves the others to what it uses.
        nested.pop("required", None)
        assert definitions.setdefault(name, nested) == nested, f"two configs are called {name}"
    return made


def _refer(node: Any) -> Any:
    if isinstance(node, list):
        return [_refer(item) for item in node]
    if not isinstance(node, dict):
        return node
    # The default of a section repeats those of its keys.
    dropped = {FAMILY_MARK} | ({"default"} if isinstance(node.get("default"), dict) else set())
    made = {key: _refer(item) for key, item in node.items() if key not in dropped}
    return {"$ref": f"#/$defs/family {node[FAMILY_MARK]}", **made} if FAMILY_MARK in node else made
