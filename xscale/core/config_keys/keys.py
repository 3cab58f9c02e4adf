"""Config keys as the JSON schema describes them, for `xscale explain`, completion and the reference pages; no torch."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

from xscale.core.config import RENAMED_MARK
from xscale.core.files.file_safety import decode_json, read_regular
from xscale.core.key_words.config_problems import BOUND_SIGNS
from xscale.core.key_words.others_words import meant_by

FAMILY = "#/$defs/family "
TYPES = {
    "integer": "int",
    "number": "float",
    "string": "str",
    "boolean": "bool",
    "array": "list",
    "object": "mapping",
}
"""JSON's word for a type -> Python's."""
KEYWORDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
"""Name of a bound in pydantic -> in a JSON schema."""

BEGINNING = 4
"""Letters of the beginning of a word that say which is meant."""


class Need(NamedTuple):
    """A slot that must have one of some kinds, or its key does not exist."""

    slot: str
    """Dotted path of the slot."""
    family: str
    kinds: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Key:
    """One key of a config, or one of those that several parts define under the same path."""

    path: str
    """Dotted path; `[]` stands for an entry of a list: `model.stack.rules[].every`."""
    node: dict[str, Any]
    """Its JSON schema."""
    needs: tuple[Need, ...] = ()
    """Slots on its path of which not every kind has the key."""
    old_names: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2].removesuffix("[]")

    @property
    def sentence(self) -> str:
        return " ".join(str(self.node.get("description", "")).split())

    @property
    def type(self) -> str:
        """Type with its bounds: `int >= 1 or null`."""
        return type_text(self.node)

    @property
    def has_default(self) -> bool:
        return "default" in self.node


class ConfigKeys:
    """The keys below the root of a JSON schema that `xscale.core.config_keys.schema` wrote."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._definitions: dict[str, Any] = schema["$defs"]
        self.root = Key(
            "",
            {**schema, "properties": {k: v for k, v in schema["properties"].items() if k != "use"}},
        )

    def family(self, key: Key) -> str | None:
        """Name of the family whose part fills the slot, or each entry of it; None: the key is no slot."""
        for node in _branches(key.node):
            if str(node.get("$ref", "")).startswith(FAMILY):
                return str(node["$ref"]).removeprefix(FAMILY)
        return None

    def families(self) -> list[str]:
        """Name of each family."""
        return [
            name.removeprefix("family ") for name in self._definitions if name.startswith("family ")
        ]

    def parts(self, family: str) -> dict[str, dict[str, Any]]:
        """Kind -> JSON schema of each part of the family."""
        return {
            part["properties"]["kind"]["const"]: part
            for part in self._definitions[f"family {family}"]["anyOf"][1:]
        }

    def old_kinds(self, family: str) -> dict[str, str]:
        """Old name of a part -> its name now."""
        return dict(self._definitions[f"family {family}"].get(RENAMED_MARK, {}))

    def children(self, key: Key, kind: str | None = None) -> list[Key]:
        """Keys directly below a section or slot: those of one kind, or of all, with the kinds that have each."""
        family = self.family(key)
        if family is None:
            return [
                Key(f"{key.path}.{name}".lstrip("."), node, key.needs, old_names)
                for section in self._sections(key.node)
                for name, node, old_names in _properties(section)
            ]
        parts = self.parts(family)
        owners: dict[str, list[tuple[dict[str, Any], tuple[str, ...], list[str]]]] = {}
        for kind_name in parts if kind is None else [kind]:
            for name, node, old_names in _properties(parts[kind_name]):
                known = next(
                    (
                        entry
                        for entry in owners.setdefault(name, [])
                        if entry[:2] == (node, old_names)
                    ),
                    None,
                )
                if known is None:
                    owners[name].append((node, old_names, [kind_name]))
                else:
                    known[2].append(kind_name)
        return [
            Key(
                f"{key.path}.{name}",
                node,
                (*key.needs, Need(key.path, family, tuple(kinds))),
                old_names,
            )
            for name, entries in owners.items()
            for node, old_names, kinds in entries
        ]

    def at(self, path: str) -> list[Key]:
        """The keys at a dotted path, under old names too; empty when there are none."""
        keys = [self.root]
        for segment in path.split("."):
            name = segment.removesuffix("[]")
            below = [child for key in keys for child in self.children(key)]
            keys = [child for child in below if child.name == name] or [
                child for child in below if name in child.old_names
            ]
        return keys

    @cached_property
    def all(self) -> tuple[Key, ...]:
        """Every key, the shortest paths first; no part is entered from within its own family."""
        return tuple(self._walk())

    def paths_of(self, key: Key) -> list[str]:
        """Every path at which this key of this part, or section, may stand."""
        return self._paths[id(key.node)]

    @cached_property
    def _paths(self) -> dict[int, list[str]]:
        paths: dict[int, dict[str, None]] = {}
        for key in self.all:
            paths.setdefault(id(key.node), {})[key.path] = None
        return {node: list(known) for node, known in paths.items()}

    @cached_property
    def words(self) -> frozenset[str]:
        """Every word that may stand in a query: names of keys, families and kinds."""
        return frozenset(word for key in self.all for words in self._words(key) for word in words)

    def _walk(self) -> Iterator[Key]:
        level: list[tuple[Key, frozenset[str]]] = [(self.root, frozenset())]
        while level:
            below = []
            for key, entered in level:
                if key.path:
                    yield key
                names = {node["$ref"] for node in _branches(key.node) if "$ref" in node}
                if not names & entered:
                    below += [(child, entered | names) for child in self.children(key)]
            level = below

    def find(self, query: str) -> list[list[Key]]:
        """Keys that `query` names, those of one meaning together, the shortest path first.

        A query is a dotted path, or words of one in order, which may be kinds: `moe.capacity_factor`, `core.block`.
        """
        # The kind of a slot is the slot's own value.
        path = query.removesuffix(".kind")
        if exact := [key for key in self.at(path) if path == query or self.family(key)]:
            return [[key] for key in exact]
        words = [word.removesuffix("[]") for word in query.split(".")]
        if words[-1] == "kind" and len(words) > 1:
            return [group for group in self.find(path) if self.family(group[0])]
        groups: dict[int, list[Key]] = {}
        for key in self.all:
            if words[-1] in (key.name, *key.old_names) and self._leads(words[:-1], key):
                groups.setdefault(id(key.node), []).append(key)
        near = [group for group in groups.values() if self._is_below(words[-2:-1], group[0])]
        return near or list(groups.values())

    def find_part(self, query: str) -> list[tuple[Key, str]]:
        """Slots and kinds that `query` names by a kind in the end: `moe`, `ffn.moe`; each kind of a family once."""
        *above, kind = query.replace("[]", "").split(".")
        slots: dict[tuple[str, str], Key] = {}
        for key in self.all:
            family = self.family(key)
            name = kind if family is None else self.old_kinds(family).get(kind, kind)
            if (
                family is not None
                and name in self.parts(family)
                and (not above or self._leads(above, key, last=True))
            ):
                slots.setdefault((family, name), key)
        return [(key, name) for (_, name), key in slots.items()]

    def suggest(self, query: str) -> list[str]:
        """Paths of keys that a misspelt query may mean, the likeliest first."""
        if key := meant_by(query.rpartition(".")[2]):
            return [key]
        spellings = [self._spellings(word) for word in query.split(".")]
        candidates = [".".join(words) for words in islice(product(*spellings), 27)]
        paths = [
            group[0].path
            for candidate in candidates
            if candidate != query
            for group in self.find(candidate)
        ]
        paths += get_close_matches(
            query, list(dict.fromkeys(key.path for key in self.all)), n=3, cutoff=0.7
        )
        return list(dict.fromkeys(paths))[:3]

    def _spellings(self, word: str) -> list[str]:
        """Known words that are near, or that begin so; a word that is far from all means none: `bytes` is no `bits`."""
        if word in self.words:
            return [word]
        begun = sorted(
            known for known in self.words if len(word) >= BEGINNING and known.startswith(word)
        )
        return list(
            dict.fromkeys([*get_close_matches(word, self.words, n=3, cutoff=0.75), *begun])
        )[:3]

    def _sections(self, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for branch in _branches(node):
            reference = str(branch.get("$ref", ""))
            if reference and not reference.startswith(FAMILY):
                yield self._definitions[reference.removeprefix("#/$defs/")]
            elif "properties" in branch:
                yield branch

    def _words(self, key: Key) -> list[set[str]]:
        """Words that may stand for each step of the path: its name and, after a slot, its family and kinds."""
        needs = {need.slot: need for need in key.needs}
        steps: list[set[str]] = []
        path = ""
        for segment in key.path.split("."):
            path = f"{path}.{segment}".lstrip(".")
            steps.append({segment.removesuffix("[]")})
            if path in needs:
                steps[-1].add(needs[path].family)
                steps.append(set(needs[path].kinds))
        return steps

    def _is_below(self, word: list[str], key: Key) -> bool:
        """Whether the key is directly below the section, slot or kind `word`."""
        steps = self._words(key)[:-1]
        near = (
            steps[-2:]
            if key.needs and key.needs[-1].slot == key.path.rpartition(".")[0]
            else steps[-1:]
        )
        return any(name in step for name in word for step in near)

    def _leads(self, words: list[str], key: Key, *, last: bool = False) -> bool:
        """Whether the words stand, in order, among the steps above the key, or to it if `last`."""
        steps = iter(self._words(key) if last else self._words(key)[:-1])
        return all(any(word in step for step in steps) for word in words)


@cache
def read_keys(file: Path) -> ConfigKeys:
    """Read the JSON schema in `file`."""
    return ConfigKeys(decode_json(read_regular(file)))


def _properties(section: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], tuple[str, ...]]]:
    """Name of each key of an object, with `[]` if it is a list of sections or parts; its schema; its old names."""
    renamed = section.get(RENAMED_MARK, {})
    for name, node in section.get("properties", {}).items():
        if name == "kind" and "const" in node:
            continue
        listed = any(
            "$ref" in branch for array in _branches(node, items=False) for branch in _items(array)
        )
        yield (
            f"{name}[]" if listed else name,
            node,
            tuple(old for old, new in renamed.items() if new == name),
        )


def _items(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        *node.get("prefixItems", []),
        *([node["items"]] if isinstance(node.get("items"), dict) else []),
    ]


def _branches(node: dict[str, Any], *, items: bool = True) -> Iterator[dict[str, Any]]:
    """The node, its alternatives and, unless `items` is false, the entries of a list."""
    yield node
    for branch in [*node.get("anyOf", []), *(_items(node) if items else [])]:
        yield from _branches(branch, items=items)


def choices(node: dict[str, Any]) -> list[str]:
    """The values that a key can have if they are few: those of an enum, or true and false."""
    values: list[str] = []
    for branch in _branches(node, items=False):
        values += [value_text(value) for value in branch.get("enum", [])]
        values += {"boolean": ["true", "false"], "null": ["null"]}.get(str(branch.get("type")), [])
    return values if set(values) - {"null"} else []


def type_text(node: dict[str, Any]) -> str:
    """The type that a schema describes, with choices and bounds: `int >= 1 or null`, `one of a, b`."""
    reference = str(node.get("$ref", ""))
    if reference.startswith(FAMILY):
        return f"part of the family {reference.removeprefix(FAMILY)}"
    if reference:
        return "section"
    if "anyOf" in node:
        return " or ".join(type_text(branch) for branch in node["anyOf"])
    if "enum" in node:
        return f"one of {', '.join(map(value_text, node['enum']))}"
    if "const" in node:
        return value_text(node["const"])
    if node.get("type") == "array":
        entries = " and ".join(type_text(item) for item in _items(node)) or "values"
        least = f", at least {node['minItems']}" if node.get("minItems") else ""
        return f"list of {entries}{least}"
    if node.get("type") == "object" and isinstance(node.get("additionalProperties"), dict):
        return f"mapping of str to {type_text(node['additionalProperties'])}"
    word = TYPES.get(str(node.get("type")), str(node.get("type", "section")))
    return " ".join(filter(None, (word, _bounds(node))))


def _bounds(node: dict[str, Any]) -> str:
    bounds = {
        name: value_text(node[keyword]) for name, keyword in KEYWORDS.items() if keyword in node
    }
    multiple = f"a multiple of {node['multipleOf']}" if "multipleOf" in node else ""
    low, high = bounds.get("gt", bounds.get("ge")), bounds.get("lt", bounds.get("le"))
    if low is not None and high is not None:
        interval = (
            f"in {'(' if 'gt' in bounds else '['}{low}, {high}{')' if 'lt' in bounds else ']'}"
        )
        return ", ".join(filter(None, (interval, multiple)))
    signs = {name: sign for sign, name in BOUND_SIGNS.values()}
    return ", ".join(
        filter(None, (*(f"{signs[name]} {value}" for name, value in bounds.items()), multiple))
    )


def value_text(value: Any) -> str:
    """A value as a config writes it: `null`, `true`, `0.001`, `[a, b]`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {value_text(item)}' for key, item in value.items())}}}"
    return str(value)


def first_sentence(text: str) -> str:
    """Return the text up to the first full stop that ends a sentence, on one line."""
    line = " ".join(text.split())
    for offset, letter in enumerate(line):
        ends = (
            letter == "."
            and line[offset + 1 : offset + 2] in ("", " ")
            and line[offset - 5 : offset] != "et al"
        )
        if ends and not line[offset + 2 : offset + 3].islower():
            return line[: offset + 1]
    return line


def wrapped(text: str, indent: str, width: int = 110) -> list[str]:
    """Return the text as lines of at most `width` characters; no line for an empty one."""
    return textwrap.wrap(
        " ".join(text.split()), width, initial_indent=indent, subsequent_indent=indent
    )
