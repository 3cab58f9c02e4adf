"""Config schemas: frozen, strict pydantic models; a part of a family fills each `kind:` slot."""

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import pydantic
from pydantic import ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from xscale.core.errors import ConfigError, Problem, is_near, nearest, plain
from xscale.core.key_words.others_words import OTHERS_VALUES, meant_by, way_of
from xscale.core.key_words.renamed import rename_old_keys

ConfigT = TypeVar("ConfigT", bound="Config")

PROBLEMS_LISTED = 50
"""Problems of a config that a message lists; it counts the others."""
VALUE_CHARACTERS = 200
"""Characters of a key or a value that a message shows."""
FAMILY_MARK = "x-family"
"""Key in a JSON schema that refers to all parts of a family."""
RENAMED_MARK = "x-renamed"
"""Key in a JSON schema with the old names of its keys or kinds: old -> new. Editors ignore it."""


class Config(pydantic.BaseModel):
    """Plain data: frozen, strictly typed, without unknown keys. `decode(encode(c)) == c`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )
    kind: ClassVar[str | None] = None
    """The name under which the part that owns this class is registered."""
    family: ClassVar[str | None] = None
    renamed: ClassVar[dict[str, str]] = {}
    """Old name of a key -> its name now: read for one version, with a warning."""
    folded: ClassVar[dict[str, tuple[str, Callable[[Any, Any], Any]]]] = {}
    """Old name of a key -> the key of which it is a part now, and (old value, value of that key, None if it is not
    given) -> the value of that key; None: the two contradict. Read for one version, with a warning."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Add each field's sentence, the default kind of each slot, and the old names of keys to the JSON schema."""
        json_schema = handler(schema)
        resolved = handler.resolve_ref_schema(json_schema)
        fields = resolved.get("properties", {})
        keys = {name: field.alias or name for name, field in cls.model_fields.items()}
        for name, text in sentences(cls).items():
            fields[keys[name]].setdefault("description", text)
        for name, field in cls.model_fields.items():
            name = keys[name]
            if FAMILY_MARK in fields[name] and isinstance(field.default, Config):
                fields[name]["default"] = _shortest(field.default)
            elif isinstance(field.default, tuple) and any(
                isinstance(part, Config) for part in field.default
            ):
                fields[name]["default"] = [_shortest(part) for part in field.default]
        if cls.renamed or cls.folded:
            resolved[RENAMED_MARK] = {
                **cls.renamed,
                **{old: new for old, (new, _) in cls.folded.items()},
            }
        return json_schema


def _shortest(config: Config) -> Any:
    """The shortest data of a part's config: its kind, with the values that are not the kind's defaults."""
    defaults = encode(type(config)())
    changes = {name: value for name, value in encode(config).items() if value != defaults[name]}
    return {"kind": config.kind, **changes} if changes else config.kind


class PartFamily(Protocol):
    """A family of parts as a slot reads it; `xscale.core.registry.Family` is one, and itself needs configs."""

    name: str
    aliases: dict[str, str]

    def names(self) -> list[str]: ...

    def get(self, name: str, path: str = "") -> Any: ...

    def __contains__(self, name: object) -> bool: ...

    def __iter__(self) -> Iterator[Any]: ...


class Slot:
    """Annotation of a field that holds the config of any part of a family: `Annotated[Core.Config, Slot(CORES)]`.

    In data the slot is a mapping with a `kind`, or the kind alone for its defaults.
    """

    def __init__(self, family: "PartFamily") -> None:
        self.family = family

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self._decode, serialization=core_schema.plain_serializer_function_ser_schema(encode)
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        # Parts may contain parts of their own family, so this refers to the family; core/schema.py defines it once.
        return {FAMILY_MARK: self.family.name}

    def _decode(self, value: Any) -> Config:
        if isinstance(value, Config):
            if value.family != self.family.name:
                raise _refuse(
                    f"must be a {self.family.name}, got a {value.family or type(value).__qualname__}"
                )
            return value
        if isinstance(value, str):
            value = {"kind": value}
        if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
            raise _refuse(
                f"a {self.family.name} is chosen by 'kind'",
                f"Choose one of: {', '.join(self.family.names())}.",
            )
        kind = str(self.family.aliases.get(value["kind"], value["kind"]))
        if kind not in self.family:
            what = f"there is no {self.family.name} of kind '{kind}'"
            raise _refuse(what, nearest(kind, self.family.names()), unknown_kind=kind)
        fields = {key: item for key, item in value.items() if key != "kind"}
        schema: type[Config] = self.family.get(kind).part.Config
        try:
            return schema.model_validate(fields)
        except pydantic.ValidationError as error:
            # pydantic would flatten the part's errors into one string; passed as data they keep their paths.
            context = {"schema": schema, "faults": error.errors(), "family": self.family}
            raise PydanticCustomError("part", "faults", context) from None


def _refuse(what: str, fix: str = "", unknown_kind: str = "") -> PydanticCustomError:
    return PydanticCustomError(
        "xscale", "{what}", {"what": what, "fix": fix, "unknown_kind": unknown_kind}
    )


def encode(config: Config) -> dict[str, Any]:
    """Encode to plain data (mappings, lists, numbers, strings) from which `decode` makes an equal config."""
    data: dict[str, Any] = {} if config.kind is None else {"kind": config.kind}
    for name, field in type(config).model_fields.items():
        data[field.alias or name] = _plain(getattr(config, name))
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return encode(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def decode(
    schema: type[ConfigT], data: dict[str, Any], origin: dict[str, str] | None = None
) -> ConfigT:
    """Validate `data` into `schema`; a ConfigError lists every problem with its dotted path.

    `origin` maps dotted paths to the file or command line that gave the value, for the messages.
    """
    origin = {} if origin is None else origin
    try:
        return schema.model_validate(_tuples(rename_old_keys(schema, data, origin)))
    except pydantic.ValidationError as error:
        raise ConfigError(_problems(schema, error.errors(), (), origin)) from None


def _tuples(value: Any) -> Any:
    """Convert lists to tuples: a config is frozen."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_tuples(item) for item in value)
    return value


def _problems(
    schema: Any,
    faults: Any,
    above: tuple[Any, ...],
    origin: dict[str, str],
    family: "PartFamily | None" = None,
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
            problems += _problems(part["schema"], part["faults"], where, origin, part["family"])
        else:
            problems.append(
                _problem(schema, fault, ".".join(str(part) for part in where), origin, family)
            )
    return problems


def _is_inside(loc: tuple[Any, ...], outer: tuple[Any, ...]) -> bool:
    """Whether a fault at `loc` is one of an item of the value at `outer`."""
    return len(loc) > len(outer) and loc[: len(outer)] == outer


def _problem(
    schema: Any, fault: Any, path: str, origin: dict[str, str], family: "PartFamily | None"
) -> Problem:
    key_path = (
        f"{plain(path, VALUE_CHARACTERS)} ({origin[path]})"
        if path in origin
        else plain(path, VALUE_CHARACTERS)
    )
    if fault["type"] == "extra_forbidden":
        if family is not None and (kinds := _kinds_with(family, schema, fault["loc"])):
            what = f"unknown key for {family.name} '{schema.kind}'"
            listed = ", ".join(kinds[:KINDS_LISTED]) + (
                " and others" if len(kinds) > KINDS_LISTED else ""
            )
            slot = path.rpartition(".")[0]
            return Problem(
                key_path,
                what,
                f"It is a key of {listed}: choose one, as by {slot}.kind={kinds[0]}.",
            )
        inside = ".".join(str(part) for part in fault["loc"])
        if meant := _known_key(schema, fault["loc"], path.removesuffix(inside)):
            return Problem(key_path, "unknown key", meant)
        return Problem(
            key_path,
            "unknown key",
            nearest(str(fault["loc"][-1]), _keys(schema, fault["loc"][:-1])),
            unknown_key=path,
        )
    if fault["type"] == "xscale":
        return Problem(
            key_path, fault["ctx"]["what"], fault["ctx"]["fix"], fault["ctx"]["unknown_kind"]
        )
    if fault["type"] == "missing":
        return Problem(key_path, "required key is missing")
    if fault["type"] == "string_type" and isinstance(fault["input"], dict):
        # YAML takes `summarize: ` for a key without a value.
        quoted = f"{path.rpartition('.')[2]}='\"text: \"'"
        return Problem(
            key_path,
            "must be a text, got a mapping",
            f"Put a text with a colon in quotes: {quoted}.",
        )
    if fault["type"] == "model_type" and not isinstance(fault["input"], dict):
        keys = _keys(schema, fault["loc"])
        listed = ", ".join(keys[:KINDS_LISTED]) + (
            " and others" if len(keys) > KINDS_LISTED else ""
        )
        got = plain(repr(fault["input"]), VALUE_CHARACTERS)
        return Problem(
            key_path, f"is a section with keys of its own, got {got}", f"Set one of them: {listed}."
        )
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


def _kinds_with(family: "PartFamily", schema: Any, loc: tuple[Any, ...]) -> list[str]:
    """Kinds of the family that have the unknown key at `loc`; none where it is rather a misspelling of one here."""
    key = str(loc[-1])
    if len(loc) > 1 or is_near(key, _keys(schema, ())):
        return []
    return [entry.name for entry in family if key in entry.part.Config.model_fields]


def _other_spelling(fault: str, value: Any) -> str:
    """A sentence for a choice as other trainers write it, or a text that YAML 1.1 took for a number or a truth."""
    if not isinstance(value, str):
        return ""
    if fault == "literal_error" and value.lower() in OTHERS_VALUES:
        return f"Did you mean '{OTHERS_VALUES[value.lower()]}'?"
    if fault.startswith("bool") and value.lower() in ("yes", "no", "on", "off", "y", "n"):
        return "YAML 1.2 has true and false alone."
    if (
        fault.startswith(("int", "float"))
        and "_" in value
        and re.fullmatch(r"[-+]?[0-9][0-9_]{1,40}", value)
    ):
        return f"Write it without underscores: {value.replace('_', '')}."
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
        section = type(default) if isinstance(default, Config) else _model_in(field.annotation)
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


def sentences(schema: type[pydantic.BaseModel]) -> dict[str, str]:
    """Field -> its sentence, inherited fields too; without fields that have none.

    They are read from the source on demand: pydantic can collect them when a class is created, but that takes longer
    than importing the rest of xscale.
    """
    by_field: dict[str, str] = {}
    for owner in reversed(schema.__mro__):
        file = getattr(sys.modules.get(owner.__module__), "__file__", None)
        if issubclass(owner, pydantic.BaseModel) and file is not None:
            # A redeclared field has the new sentence, or none.
            by_field = {
                name: text
                for name, text in by_field.items()
                if name not in vars(owner).get("__annotations__", ())
            }
            by_field |= _sentences_of_file(file).get(owner.__qualname__, {})
    return {name: by_field[name] for name in schema.model_fields if name in by_field}


@functools.cache
def _sentences_of_file(file: str) -> dict[str, dict[str, str]]:
    """Qualified name of each class of a file -> its fields' sentences."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return {name: _sentences_of_class(node) for name, node in _classes(tree, "")}


def _classes(node: ast.AST, above: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield above + child.name, child
            yield from _classes(child, f"{above}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _classes(child, f"{above}{child.name}.<locals>.")
        elif isinstance(
            child, ast.stmt | ast.excepthandler | ast.match_case
        ):  # an expression defines no class
            yield from _classes(child, above)


def _sentences_of_class(node: ast.ClassDef) -> dict[str, str]:
    by_field: dict[str, str] = {}
    for line, after in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(line, ast.AnnAssign)
            and isinstance(line.target, ast.Name)
            and isinstance(after, ast.Expr)
        ):
            value = after.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                by_field[line.target.id] = inspect.cleandoc(value.value)
    return by_field
