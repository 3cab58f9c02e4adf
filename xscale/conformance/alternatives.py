"""Configs beside a config: those that differ from it in one field."""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pydantic

from xscale.core.config import Config


def neighbours(config: Config) -> Iterator[Config]:
    """Configs that differ in one field, as far as the schema allows."""
    for name, field in type(config).model_fields.items():
        for value in alternatives(field.annotation, getattr(config, name)):
            try:
                yield type(config).model_validate({**dict(config), name: value})
            except pydantic.ValidationError:
                continue


def alternatives(annotation: Any, value: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return [choice for choice in get_args(annotation) if choice != value]
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, value * 2]
        case float():
            return [value / 3, value + 0.1, 1e-30]
        case str():
            return [f"{value}x", "1e-3", "null", "yes", "ä: [#"]
        case None:
            return [1, "1", 0.5, True]
        case tuple():
            return [(*value, "x"), (*value, 1)]
    return []
