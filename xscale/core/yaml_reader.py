"""The one reader of YAML: the core schema of YAML 1.2, in bounds, so that no text takes the process down.

`1e-3` is a number, `010` is ten, `0o10` is eight; `12:30`, `1_000`, a date, `yes`, `no`, `on` and `off` are text, as in
YAML 1.2. `<<` merges mappings, as in YAML 1.1. There are no other types.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import yaml

from xscale.core.errors import ConfigError, Problem, plain
from xscale.core.files.file_safety import open_regular
from xscale.core.yaml_writer import PREFIX, SCALARS

TEXT_BYTES = 4 << 20
"""Largest text."""
DEPTH = 64
"""Deepest nesting of lists and mappings."""
NODES = 50_000
"""Most values, each alias counted as what it stands for."""
SMALLEST, LARGEST = -(1 << 63), (1 << 64) - 1
"""Integers beyond them are refused: torch has none, and arithmetic with them fails far from here."""
INTEGER_CHARACTERS = 24
"""Longest text of such an integer, in any base, with a sign and a prefix."""
EXPLAINED_BYTES = 64 << 10
"""Texts up to this size are read again by the slow parser, which explains mistakes better."""


class _Loader(yaml.SafeLoader):
    """Makes plain data of YAML text, and lists duplicate keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    yaml_constructors: ClassVar[dict[Any, Any]] = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.duplicates: list[Problem] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        mark = node.start_mark
        for name in [name for name, times in names.items() if times > 1]:
            line, what = f"{self.name}:{mark.line + 1}", f"the key '{name}' is given twice"
            self.duplicates.append(Problem(line, what, "Keep one of them."))
        return super().construct_mapping(node, deep=deep)


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    value = None
    if len(text) <= INTEGER_CHARACTERS and re.fullmatch(SCALARS["int"][0], text):
        value = int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if value is None or not SMALLEST <= value <= LARGEST:
        raise yaml.constructor.ConstructorError(
            None, None, f"{_cut(text)} is no integer of 64 bits", node.start_mark
        )
    return value


def _float(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node)
    if not re.fullmatch(SCALARS["float"][0], text):
        raise yaml.constructor.ConstructorError(
            None, None, f"{_cut(text)} is no number", node.start_mark
        )
    return float(
        text.replace(".inf", "inf").replace(".nan", "nan") if text[-1:].isalpha() else text
    )


def _boolean(loader: _Loader, node: yaml.ScalarNode) -> bool:
    text = loader.construct_scalar(node)
    if not re.fullmatch(SCALARS["bool"][0], text):
        raise yaml.constructor.ConstructorError(
            None, None, f"{_cut(text)} is not true or false", node.start_mark
        )
    return text.lower() == "true"


def _text(loader: _Loader, node: yaml.ScalarNode) -> str:
    text = str(loader.construct_scalar(node))
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        # Escaped in quotes, where the reader does not see it: no file could hold it.
        raise yaml.constructor.ConstructorError(
            None, None, "half of a surrogate pair is no text", node.start_mark
        )
    return text


def _unknown_type(loader: _Loader, node: yaml.Node) -> Any:
    what = f"{_cut(node.tag)} is no type of a config"
    raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)


def _cut(text: str) -> str:
    return (
        f"'{text[:20]}...' ({len(text)} characters)"
        if len(text) > 2 * INTEGER_CHARACTERS
        else f"'{text}'"
    )


for _name, (_pattern, _first) in SCALARS.items():
    _Loader.add_implicit_resolver(PREFIX + _name, re.compile(f"^(?:{_pattern})$"), _first)
for _name in ("null", "seq", "map"):
    _Loader.add_constructor(PREFIX + _name, yaml.SafeLoader.yaml_constructors[PREFIX + _name])
_Loader.add_constructor(PREFIX + "str", _text)
_Loader.add_constructor(PREFIX + "int", _integer)
_Loader.add_constructor(PREFIX + "float", _float)
_Loader.add_constructor(PREFIX + "bool", _boolean)
_Loader.add_constructor(None, _unknown_type)


if yaml.__with_libyaml__:
    from yaml._yaml import CParser

    class _FastLoader(CParser, _Loader):
        """`_Loader` on libyaml's parser, which takes a sixth of the time and explains mistakes less well."""

        def __init__(self, text: str) -> None:
            CParser.__init__(self, text)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)
            self.duplicates = []

else:
    _FastLoader = _Loader  # type: ignore[misc,assignment]


def parse(text: str, name: str) -> Any:
    """Parse YAML text to plain data; a ConfigError names the line, or those of all duplicate keys.

    `name` is the file, or what else the text is. ConfigError too for what is too large or nested too deeply.
    """
    if len(text) > TEXT_BYTES:
        raise ConfigError(name, f"the text has {len(text)} characters, and may have {TEXT_BYTES}")
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(name.encode(errors="replace").decode(), "this is not UTF-8 text")
    try:
        try:
            data, duplicates = _load(_FastLoader, text, name)
        except yaml.YAMLError:
            if len(text) > EXPLAINED_BYTES:
                raise
            data, duplicates = _load(_Loader, text, name)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"{name}:{mark.line + 1}" if mark else name
        raise ConfigError(line, f"this is not YAML: {_reason(error)}") from None
    if duplicates:
        raise ConfigError(duplicates)
    return data


def _reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f"position {error.position} holds a character that YAML does not allow"
    return str(getattr(error, "problem", None) or error)


def _load(loader_class: type[_Loader], text: str, name: str) -> tuple[Any, list[Problem]]:
    _check_bounds(text, name, loader_class)
    loader = loader_class(text)
    loader.name = name
    try:
        return loader.get_single_data(), loader.duplicates
    finally:
        loader.dispose()


def _check_bounds(text: str, name: str, loader_class: type[_Loader]) -> None:
    """Raise ConfigError for nesting, aliases and sizes beyond the bounds, before anything is composed of the text.

    The composer recurses, in C too: what is nested too deeply would end the process.
    """
    sizes: dict[str | None, int] = {}
    opened: list[tuple[str | None, int]] = []  # anchor, nodes before it
    nodes = 0
    for event in yaml.parse(text, Loader=loader_class):
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in opened):
                raise _refused(
                    event,
                    name,
                    f"the alias '{plain(str(event.anchor), 20)}' is inside its own value",
                )
            nodes += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            nodes += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, nodes))
            nodes += 1
            if len(opened) > DEPTH:
                raise _refused(event, name, f"it is nested more than {DEPTH} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor is not None:
                sizes[anchor] = nodes - before
        if nodes > NODES:
            raise _refused(
                event,
                name,
                f"it has more than {NODES} values, aliases counted as what they stand for",
            )


def _refused(event: yaml.Event, name: str, what: str) -> ConfigError:
    line = "" if event.start_mark is None else f":{event.start_mark.line + 1}"
    return ConfigError(f"{name}{line}", what)


def read_text(file: Path) -> str:
    """Read a text of at most `TEXT_BYTES`; OSError, UnicodeDecodeError, and ConfigError where it is larger."""
    with open_regular(file) as opened:
        content = opened.read(TEXT_BYTES + 1)
    if len(content) > TEXT_BYTES:
        raise ConfigError(
            str(file), f"the file has more than {TEXT_BYTES >> 20} MiB, and no config has"
        )
    return content.decode("utf-8")
