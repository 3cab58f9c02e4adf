"""JSON schema of a config, for editors: one definition per family and nested model, so that patterns may nest."""

from collections.abc import Iterator
from typing import Any, get_args

from xscale.core.config import FAMILY_MARK, RENAMED_MARK, Config, Slot
from xscale.core.key_words.config_problems import PartFamily

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(root: type[Config], title: str) -> dict[str, Any]:
    """JSON schema of files that are composed into `root`: any of its keys, and `use`; none is required."""
    definitions: dict[str, Any] = {}
    families = {family.name: family for family in families_of(root, set())}
    for name, family in sorted(families.items()):
        parts = [_part(family, entry, definitions) for entry in family]
        definitions[f"family {name}"] = {"anyOf": [{"enum": family.names()}, *parts]} | _renamed(
            family.aliases
        )
    schema = _plain(root, definitions)
    use = {
        "description": "Configs that this one overrides; later ones win.",
        "type": ["string", "array"],
    }
    return {
        "$schema": DIALECT,
        "title": title,
        "type": "object",
        "additionalProperties": False,
        "properties": {"use": {**use, "items": {"type": "string"}}, **schema["properties"]},
        "$defs": dict(sorted(definitions.items())),
    }


def families_of(schema: type[Config], seen: set[Any]) -> Iterator[PartFamily]:
    """Every family that fills a slot of `schema` or of a config below it."""
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


def _part(family: PartFamily, entry: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    config_schema = _plain(entry.part.Config, definitions)
    return {
        "title": f"{family.name}: {entry.name}",
        "description": entry.summary,
        "type": "object",
        "additionalProperties": False,
        # `kind` is not required: a file may change some keys of a part that another file chooses.
        "properties": {"kind": {"const": entry.name}, **config_schema.get("properties", {})},
        **_renamed(entry.part.Config.renamed),
    }


def _renamed(names: dict[str, str]) -> dict[str, Any]:
    return {RENAMED_MARK: dict(names)} if names else {}


def _plain(schema: type[Config], definitions: dict[str, Any]) -> dict[str, Any]:
    """pydantic's schema with references to families, its nested models moved to `definitions`."""
    plain: dict[str, Any] = _refer(schema.model_json_schema())
    for name, nested in plain.pop("$defs", {}).items():
        # A file gives some keys of a section; the files it uses give the others.
        nested.pop("required", None)
        assert definitions.setdefault(name, nested) == nested, f"two configs are called {name}"
    return plain


def _refer(node: Any) -> Any:
    if isinstance(node, list):
        return [_refer(item) for item in node]
    if not isinstance(node, dict):
        return node
    # The default of a section repeats those of its keys.
    repeats = (
        isinstance(node.get("default"), dict) and bool(node["default"]) and FAMILY_MARK not in node
    )
    dropped = {FAMILY_MARK} | ({"default"} if repeats else set())
    referring = {key: _refer(item) for key, item in node.items() if key not in dropped}
    return (
        {"$ref": f"#/$defs/family {node[FAMILY_MARK]}", **referring}
        if FAMILY_MARK in node
        else referring
    )
