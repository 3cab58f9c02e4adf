"""JSON that another process wrote, decoded as a type: what is damaged or hostile is a sentence, never a traceback."""

import dataclasses
import json
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

LARGEST = 2**63
"""Integers beyond it are refused: arithmetic with them can fail."""
NAMES = {
    str: "a text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def decode_json(content: bytes | str, kind: Any) -> Any:
    """Decode JSON as a value of type `kind`; ValueError, with a clause, when it is not one.

    `kind`: str, int, float, bool, Any, `X | None`, list[X], dict[str, X], tuple[X, Y] or a dataclass, whose fields may
    be missing where they have a default, and beside which an object may have other keys. A text is valid Unicode
    without NUL.
    """
    try:
        data = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    return convert(data, kind)


def convert(data: Any, kind: Any, where: str = "it") -> Any:
    """Convert decoded JSON to the type `kind`; ValueError with a clause that names `where` in the data it is."""
    if kind is Any:
        return data
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (types.UnionType, Union):
        wanted = next(part for part in parts if part is not type(None))
        return None if data is None else convert(data, wanted, where)
    if dataclasses.is_dataclass(kind):
        return _build(data, kind, where)
    if origin is list and isinstance(data, list):
        return [convert(item, parts[0], f"{where}[{number}]") for number, item in enumerate(data)]
    if origin is tuple and isinstance(data, list) and len(data) == len(parts):
        items = zip(data, parts, strict=True)
        return tuple(
            convert(item, part, f"{where}[{number}]") for number, (item, part) in enumerate(items)
        )
    if origin is dict and isinstance(data, dict):
        return {
            _text(key, where): convert(item, parts[1], f"{where}.{key}")
            for key, item in data.items()
        }
    if origin is str and isinstance(data, str):
        return _text(data, where)
    if origin in (int, float) and type(data) is int and abs(data) < LARGEST:
        return origin(data)
    if type(data) is origin and origin in (float, bool):
        return data
    raise ValueError(f"{where} is not {NAMES.get(origin, f'a list of {len(parts)}')}")


def _build(data: Any, kind: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} is not an object")
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and field.name not in data:
            raise ValueError(f"{where} lacks '{field.name}'")
    known = [field.name for field in dataclasses.fields(kind) if field.name in data]
    return kind(**{name: convert(data[name], hints[name], f"{where}.{name}") for name in known})


def _text(text: str, where: str) -> str:
    """Return `text`; ValueError for half of a surrogate pair, which no stream can print, or NUL, which ends names."""
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{where} has a character that no text has")
    return text
