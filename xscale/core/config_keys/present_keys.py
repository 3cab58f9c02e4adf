"""The keys that one config has: those of the parts that it chooses, each entry of a list by its index, with values."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from xscale.core.config_keys.keys import ConfigKeys, Key
from xscale.core.config_keys.override_path import KeyPath


@dataclass(frozen=True)
class Word:
    """Names that may stand for one step of a path in a query."""

    names: frozenset[str]
    """The name of a key, with that of the family if it is a slot; or the kind of the part in it."""
    index: int | None = None
    """Which entry of a list."""
    is_kind: bool = False


@dataclass(frozen=True)
class PresentKey:
    """A key that a config has, whether the config gives its value or not."""

    path: KeyPath
    key: Key
    value: Any
    """The value, as the config gives it; otherwise the default."""
    words: tuple[Word, ...] = ()
    """The steps of the path: a slot has one for its name, and a part in it one for its kind."""
    given: bool = True
    """Whether the config gives the value."""


def root_of(keys: ConfigKeys, data: dict[str, Any]) -> PresentKey:
    """Return the config as a whole."""
    return PresentKey((), keys.root, data)


def walk(keys: ConfigKeys, above: PresentKey, extra: str = "") -> Iterator[PresentKey]:
    """Yield every key below `above`, slots, sections, lists and entries of lists too.

    The schema does not know the parts of plugins: they have the keys that the config gives, and a key `extra`.
    """
    for child in below(keys, above, extra):
        yield child
        yield from walk(keys, child, extra)


def below(keys: ConfigKeys, above: PresentKey, extra: str = "") -> list[PresentKey]:
    """Return the entries of a list, or the keys directly below a section or the part in a slot."""
    if isinstance(above.value, list | tuple):
        return [entry(above, index) for index in range(len(above.value))]
    family = keys.family(above.key)
    if family is None:
        if above.value is None and above.path:
            return []
        values = above.value if isinstance(above.value, dict) else {}
        return [_child(keys, above, key, values, above.words) for key in keys.children(above.key)]
    kind = kind_of(above)
    if kind is None:
        return []
    kind = keys.old_kinds(family).get(kind, kind)
    values = above.value if isinstance(above.value, dict) else {}
    words = (*above.words, Word(frozenset({kind}), is_kind=True))
    if kind in keys.parts(family):
        return [_child(keys, above, key, values, words) for key in keys.children(above.key, kind)]
    names = dict.fromkeys([*values, *([extra] if extra else [])])
    unknown = [Key(f"{above.key.path}.{name}", {}) for name in names if name != "kind"]
    return [_child(keys, above, key, values, words) for key in unknown]


def entry(above: PresentKey, index: int) -> PresentKey:
    """Return one entry of a list, which has the keys of the list's schema."""
    last = above.words[-1]
    words = (*above.words[:-1], Word(last.names, index))
    return PresentKey((*above.path, index), above.key, above.value[index], words, above.given)


def kind_of(slot: PresentKey) -> str | None:
    """Return the kind of the part in a slot; None where it is empty."""
    chosen = slot.value
    if isinstance(chosen, dict) and "kind" not in chosen:
        chosen = slot.key.node.get("default")
    kind = chosen.get("kind") if isinstance(chosen, dict) else chosen
    return kind if isinstance(kind, str) else None


def _child(
    keys: ConfigKeys, above: PresentKey, key: Key, values: dict[str, Any], words: tuple[Word, ...]
) -> PresentKey:
    """The key below `above`, under its own name or an old one that the config uses."""
    name = next((name for name in (key.name, *key.old_names) if name in values), key.name)
    value = values[name] if name in values else key.node.get("default")
    family = keys.family(key)
    names = frozenset({key.name, *key.old_names, *([family] if family else [])})
    # A section at its defaults has none of its own.
    is_section = name not in values and not key.has_default
    return PresentKey(
        (*above.path, name), key, {} if is_section else value, (*words, Word(names)), name in values
    )
