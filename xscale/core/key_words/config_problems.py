"""Problems in the data of a config: the faults that pydantic found, each with an edit that would work."""

import re
from collections.abc import Iterator
from typing import Any, Protocol

import pydantic

from xscale.core.errors import Problem, is_near, nearest, plain
from xscale.core.key_words.others_words import OTHERS_VALUES, meant_by, way_of

PROBLEMS_LISTED = 50
"""Problems of a config that a message lists; it counts the others."""
VALUE_CHARACTERS = 200
"""Characters of a key or a value that a message shows."""


class PartFamily(Protocol):
    """A family of parts as a slot reads it; `xscale.core.registry.Family` is one, and itself needs configs."""

    name: str
    aliases: dict[str, str]

    def names(self) -> list[str]: ...

    def get(self, name: str, path: str = "") -> Any: ...

    def __contains__(self, name: object) -> bool: ...

    def __iter__(self) -> Iterator[Any]: ...


def problems_of_faults(
    schema: Any,
    faults: Any,
    above: tuple[Any, ...],
    origin: dict[str, str],
    family: PartFamily | None = None,
) -> list[Problem]:
    """The faults that pydantic found in data of `schema`, which lies at `above` and is a part of `family` if any."""
    problems: list[Problem] = []
    for number, fault in enumerate(faults):
        if len(problems) >= PROBLEMS_LISTED:
            return [
                *problems,
                Problem(".".join(map(str, above)), f"{len(faults) - number} more problems"),
            ]
        where = above + tuple(fault["loc"])
        if fault["type"] == "too_short" and any(
            _is_inside(other["loc"], fault["loc"]) for other in faults
        ):
            # pydantic counts the items that are right; each of the others has a problem of its own.
            continue
        if fault["type"] == "part":
            part = fault["ctx"]
            problems += problems_of_faults(
                part["schema"], part["faults"], where, origin, part["family"]
            )
        else:
            problems.append(
                _problem(schema, fault, ".".join(str(part) for part in where), origin, family)
            )
    return problems


def _is_inside(loc: tuple[Any, ...], outer: tuple[Any, ...]) -> bool:
    """Whether a fault at `loc` is one of an item of the value at `outer`."""
    return len(loc) > len(outer) and loc[: len(outer)] == outer


def _problem(
    schema: Any, fault: Any, path: str, origin: dict[str, str], family: PartFamily | None
) -> Problem:
    key_path = plain(path, VALUE_CHARACTERS) + (f" ({origin[path]})" if path in origin else "")
    if fault["type"] == "extra_forbidden":
        return _unknown_key(schema, fault["loc"], path, key_path, family)
    if fault["type"] == "xscale":
        return Problem(
            key_path, fault["ctx"]["what"], fault["ctx"]["fix"], fault["ctx"]["unknown_kind"]
        )
    if fault["type"] == "missing":
        return Problem(key_path, "required key is missing")
    if fault["type"] == "string_type" and isinstance(fault["input"], dict):
        # YAML takes `summarize: ` for a key without a value.
        fix = f"Put a text with a colon in quotes: {path.rpartition('.')[2]}='\"text: \"'."
        return Problem(key_path, "must be a text, got a mapping", fix)
    if fault["type"] == "model_type" and not isinstance(fault["input"], dict):
        what = "is a section with keys of its own, got "
        what += plain(repr(fault["input"]), VALUE_CHARACTERS)
        fix = f"Set one of them: {_listed(_keys(schema, fault['loc']))}."
        fix = way_of(path) or way_of(str(fault["input"])) or fix
        return Problem(key_path, what, fix)
    if fault["type"] in BOUND_SIGNS:
        what = _bounds(schema, fault)
    else:
        what = fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        what = what[0].lower() + what[1:]
    value = fault["input"]
    got = (
        ""
        if isinstance(value, dict | pydantic.BaseModel)
        else f", got {plain(repr(value), VALUE_CHARACTERS)}"
    )
    return Problem(key_path, what + got, _other_spelling(fault["type"], value))


KINDS_LISTED = 5


def _listed(names: list[str]) -> str:
    return ", ".join(names[:KINDS_LISTED]) + (" and others" if len(names) > KINDS_LISTED else "")


def _unknown_key(
    schema: Any, loc: tuple[Any, ...], path: str, key_path: str, family: PartFamily | None
) -> Problem:
    """The problem of an unknown key at `loc` of `schema`, with the key or the kind that may be meant."""
    if family is not None and (kinds := _kinds_with(family, schema, loc)):
        what = f"unknown key for {family.name} '{schema.kind}'"
        choice = f"choose one, as by {path.rpartition('.')[0]}.kind={kinds[0]}"
        return Problem(key_path, what, f"It is a key of {_listed(kinds)}: {choice}.")
    inside = ".".join(str(part) for part in loc)
    if meant := _known_key(schema, loc, path.removesuffix(inside)):
        return Problem(key_path, "unknown key", meant)
    near = nearest(str(loc[-1]), _keys(schema, loc[:-1]))
    return Problem(key_path, "unknown key", near, unknown_key=path)


def _kinds_with(family: PartFamily, schema: Any, loc: tuple[Any, ...]) -> list[str]:
    """Kinds of the family that have the unknown key at `loc`; none where it is rather a misspelling of one here."""
    key = str(loc[-1])
    if len(loc) > 1 or is_near(key, _keys(schema, ())):
        return []
    return [entry.name for entry in family if key in entry.part.Config.model_fields]


def _other_spelling(fault: str, value: Any) -> str:
    """A sentence for a choice as other trainers write it, or a text that YAML 1.1 took for a number or a truth."""
    if value is None:
        return "Give a value, or leave the key out."
    if fault == "int_from_float" or (fault == "int_type" and isinstance(value, float)):
        return f"Write it in digits: {int(value)}." if value.is_integer() else ""
    if not isinstance(value, str):
        return ""
    if fault.startswith(("int", "float")):
        return _other_number(value)
    if fault == "literal_error" and value.lower() in OTHERS_VALUES:
        return f"Did you mean '{OTHERS_VALUES[value.lower()]}'?"
    if fault.startswith("bool") and value.lower() in ("yes", "no", "on", "off", "y", "n"):
        return "YAML 1.2 has true and false alone."
    return ""


def _other_number(text: str) -> str:
    """A sentence for a number with underscores, with a letter for thousands, or behind a second `=`."""
    if text.startswith("="):
        return f"Write one `=`, got {text.lstrip('=')!r} behind two."
    if re.fullmatch(r"[-+]?[0-9][0-9_]{1,40}", text) and "_" in text:
        return f"Write it without underscores: {text.replace('_', '')}."
    if match := re.fullmatch(r"([0-9]{1,6})([kKmMbBgG])", text):
        zeros = {"k": 3, "m": 6, "b": 9, "g": 9}[match[2].lower()]
        return f"Write it in digits: {match[1]}{'0' * zeros}."
    return ""


BOUND_SIGNS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}
"""pydantic's error of a bound -> its sign, and the name of the bound in the error and in `Field`."""


def _bounds(schema: Any, fault: Any) -> str:
    """`must be >= 1`; `must be in (0, 1]` for a field that is bounded on both sides."""
    sign, name = BOUND_SIGNS[fault["type"]]
    loc = fault["loc"]
    model = _model_at(schema, loc[:-1])
    field = None if model is None or not loc else model.model_fields.get(loc[-1])
    bounds = {
        name: bound
        for metadata in ([] if field is None else field.metadata)
        for name in ("gt", "ge", "lt", "le")
        if (bound := getattr(metadata, name, None)) is not None
    }
    low, high = bounds.get("gt", bounds.get("ge")), bounds.get("lt", bounds.get("le"))
    if name in bounds and low is not None and high is not None:
        return f"must be in {'(' if 'gt' in bounds else '['}{low}, {high}{')' if 'lt' in bounds else ']'}"
    bound = bounds.get(name, fault["ctx"][name])
    return f"must be {sign} {bound}"


def _known_key(schema: Any, loc: tuple[Any, ...], above: str) -> str:
    """A sentence for an unknown key: the nearest of its section, sections below `above` that have that key, or the key
    that other trainers call so; empty where none is meant."""
    key, keys = str(loc[-1]), _keys(schema, loc[:-1])
    if ":" in key:
        # YAML takes {kind:byte} for one key without a value.
        return f"A value needs a space before it: {{{key.replace(':', ': ', 1)}}}."
    # `lr` is not a misspelling of the section `lora`, but `train.step` is one of `train.steps`.
    sections = sorted(_paths(schema, key), key=lambda path: path.count("."))
    section = above + "".join(f"{name}." for name in loc[:-1])
    # `path` of a source that has `paths` is a misspelling.
    way = "" if f"{key}s" in keys else way_of(f"{section}{key}")
    if (meant := meant_by(key)) or way:
        *_, last = meant.split(".")
        return way or f"Did you mean '{f'{section}{last}' if last in keys else meant}'?"
    if is_near(key, keys) and (len(loc) > 1 or not sections):
        return nearest(key, keys)
    if not sections:
        return ""
    return f"Did you mean {' or '.join(repr(f'{above}{path}') for path in sections[:3])}?"


def _paths(schema: Any, key: str, above: str = "") -> Iterator[str]:
    """Yield the dotted paths of the keys of that name; of a family's parts only the default one has paths."""
    for name, field in schema.model_fields.items():
        if name == key:
            yield f"{above}{name}"
        default = field.get_default(call_default_factory=True, validated_data={})
        section = (
            type(default)
            if isinstance(default, pydantic.BaseModel)
            else _model_in(field.annotation)
        )
        if section is not None:
            yield from _paths(section, key, f"{above}{name}.")


def _keys(schema: Any, path: tuple[Any, ...]) -> list[str]:
    """Keys of `schema` at `path`."""
    model = _model_at(schema, path)
    return [] if model is None else list(model.model_fields)


def _model_at(schema: Any, path: tuple[Any, ...]) -> Any:
    """The config class at `path` below `schema`; None where there is none."""
    model = schema
    for key in path:
        if isinstance(key, str) and model is not None and key in model.model_fields:
            model = _model_in(model.model_fields[key].annotation)
    return model


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        if (model := _model_in(argument)) is not None:
            return model
    return None
