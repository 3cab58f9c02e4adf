"""Config schemas: frozen, strict pydantic models; a part of a family fills each `kind:` slot.

The numbers that most keys hold have a type each, which refuses what is out of bounds.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic
from pydantic import ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from xscale.core.errors import ConfigError, nearest
from xscale.core.key_words.config_problems import PartFamily, problems_of_faults
from xscale.core.key_words.renamed import rename_old_keys

ConfigT = TypeVar("ConfigT", bound="Config")

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
"""From 0 to 1, both included."""
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]
"""From 0 to 1, without 1: of what is dropped, something is left."""

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


class Slot:
    """Annotation of a field that holds the config of any part of a family: `CoreSlot`.

    In data the slot is a mapping with a `kind`, or the kind alone for its defaults.
    """

    def __init__(self, family: PartFamily) -> None:
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
        raise ConfigError(problems_of_faults(schema, error.errors(), (), origin)) from None


def _tuples(value: Any) -> Any:
    """Convert lists to tuples: a config is frozen."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_tuples(item) for item in value)
    return value


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
