"""`xscale explain`: a config key's type, default, choices, meaning and override; the keys of a section; no torch."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from xscale.core.compose import configs_folder
from xscale.core.errors import ConfigError
from xscale.core.keys import ConfigKeys, Key, first_sentence, read_keys, value_text, wrapped

SCHEMA = "recipe.schema.json"
SECTION = "its keys' defaults"
FULL = 2
"""At most so many paths of one name are explained in full; more are listed."""


@cache
def config_keys() -> ConfigKeys:
    """Return every key of a recipe, from the JSON schema that comes with xscale."""
    return read_keys(configs_folder() / SCHEMA)


def explain(query: str | None, *, as_json: bool = False) -> None:
    """Print what `query` names: a key, a section, a part's kind; all sections if it is None.

    ConfigError with the nearest keys for an unknown one.
    """
    keys = config_keys()
    if query is None:
        entries = [[child] for child in keys.children(keys.root)]
        if as_json:
            print(json.dumps([_entry(keys, group) for group in entries], indent=2))
        else:
            print("Sections of a config; `xscale explain SECTION` lists the keys of one:")
            print("\n".join(_lines(keys, keys.root)))
        return
    groups = keys.find(query)
    parts = [] if groups else keys.find_part(query)
    if not groups and not parts:
        close = keys.suggest(query)
        fix = f"Did you mean {' or '.join(close)}?" if close else "`xscale explain` lists the sections of a config."
        raise ConfigError(query, "there is no such config key", fix)
    if as_json:
        parts_json = [{"slot": key.path, "kind": kind, **_part_entry(keys, key, kind)} for key, kind in parts]
        print(json.dumps([_entry(keys, group) for group in groups] or parts_json, indent=2))
    elif parts:
        print("\n\n".join("\n".join(_part_lines(keys, key, kind)) for key, kind in parts))
    else:
        paths: dict[str, list[list[Key]]] = {}
        for group in groups:
            paths.setdefault(group[0].path, []).append(group)
        if len(paths) > FULL:
            print(f"{len(groups)} keys are called so; give more of the path, or a kind, as in {_hint(groups)}:")
            print("\n".join(f"  {_headline(keys, group[0])}{_parts_of(group[0])}" for group in groups))
        else:
            print("\n\n".join("\n".join(_path_lines(keys, alternatives)) for alternatives in paths.values()))


def _hint(groups: list[list[Key]]) -> str:
    key = next((group[0] for group in groups if group[0].needs), groups[0][0])
    return f"{key.needs[-1].kinds[0]}.{key.name}" if key.needs else key.path


def _parts_of(key: Key) -> str:
    return f" [{key.needs[-1].family} {', '.join(key.needs[-1].kinds)}]" if key.needs else ""


def _path_lines(keys: ConfigKeys, alternatives: list[list[Key]]) -> Iterator[str]:
    """Lines on the keys that parts define under one path: in full on that of the defaults, else on the first."""
    first = min(alternatives, key=lambda group: "kind=" in override_of(keys, group[0]))
    yield from _key_lines(keys, first)
    # A part is in several groups where several mixers hold it.
    lines = {f"{_parts_of(first[0])}: {_about(keys, first[0])}"}
    for group in alternatives:
        other = f"{_parts_of(group[0])}: {_about(keys, group[0])}"
        if other not in lines:
            yield f"  otherwise in{other}"
        lines.add(other)


def _key_lines(keys: ConfigKeys, group: list[Key]) -> Iterator[str]:
    """Lines on a key, at the shortest of its paths, and on what is below it."""
    key, family = group[0], keys.family(group[0])
    yield f"{key.path.removesuffix('[]')}: {key.type}"
    yield from wrapped(key.sentence, "  ")
    yield f"  default: {default_text(keys, key)}"
    if key.needs:
        yield f"  {_owner(key)}"
    yield f"  override: {override_of(keys, key)}"
    if key.old_names:
        yield f"  old name, read for one version: {', '.join(key.old_names)}"
    if len(group) > 1:
        shown = [other.path for other in group[1:4]]
        more = f" and {len(group) - 4} more" if len(group) > 4 else ""
        yield from wrapped(f"the same key at: {', '.join(shown)}{more}", "  ")
    if family is not None:
        yield "  kinds:"
        for kind, part in keys.parts(family).items():
            old = [name for name, new in keys.old_kinds(family).items() if new == kind]
            yield f"    {kind}: {first_sentence(part['description'])}{f' Old name: {old[0]}.' if old else ''}"
        chosen = _default_kind(key)
        if chosen is not None and (lines := _lines(keys, key, chosen)):
            yield f"  keys of {chosen}, the default (`xscale explain {family}.KIND` lists those of another kind):"
            yield from (f"  {line}" for line in lines)
    elif lines := _lines(keys, key):
        yield "  keys:"
        yield from (f"  {line}" for line in lines)


def _part_lines(keys: ConfigKeys, key: Key, kind: str) -> Iterator[str]:
    """Lines on a kind of a slot: what it is, how it is chosen, its keys."""
    family = keys.family(key)
    assert family is not None
    yield f"{kind}: part of the family {family}, chosen by {key.path}{'' if '[]' in key.path else f'={kind}'}"
    yield from wrapped(keys.parts(family)[kind]["description"], "  ")
    lines = _lines(keys, key, kind)
    yield "  keys:" if lines else "  It has no keys."
    yield from (f"  {line}" for line in lines)


def _lines(keys: ConfigKeys, above: Key, kind: str | None = None) -> list[str]:
    return [f"  {_headline(keys, child)}" for child in keys.children(above, kind)]


def _headline(keys: ConfigKeys, key: Key) -> str:
    """A key in one line: path, type, default, the first sentence of its meaning."""
    return f"{key.path.removesuffix('[]')}: {_about(keys, key)}"


def _about(keys: ConfigKeys, key: Key) -> str:
    """Type, default and the first sentence of the meaning."""
    default = default_text(keys, key)
    about = key.type if default == SECTION else f"{key.type}, default {default}"
    return f"{about}. {first_sentence(key.sentence)}"


def default_text(keys: ConfigKeys, key: Key) -> str:
    """Return the default as a config writes it; a word if the key has none, or is a section."""
    if key.has_default:
        return value_text(key.node["default"])
    return SECTION if keys.family(key) is None and keys.children(key) else "none; the key is required"


def _owner(key: Key) -> str:
    """The kinds that have the key, with those of the slots above, such as `ffn moe (in model decoder)`."""
    clauses = [f"{need.family} {', '.join(need.kinds)}" for need in key.needs]
    return f"parts with this key: {clauses[-1]}" + (f" (in {'; '.join(clauses[:-1])})" if clauses[:-1] else "")


def override_of(keys: ConfigKeys, key: Key) -> str:
    """Return the words of a command line that set the key, and the kinds above it where they are not the default.

    `VALUE` stands for a value if the default is null. Entries of lists have no override of their own.
    """
    if "[]" in key.path:
        head = key.path.partition("[]")[0]
        return f"the whole list: {head}='[...]'"
    if keys.family(key) is None and keys.children(key):
        return f"a key of it: {keys.children(key)[0].path}=VALUE"
    chosen: list[str] = []
    for depth, need in enumerate(key.needs):
        slots = [slot for slot in keys.at(need.slot) if slot.needs == key.needs[:depth]]
        defaults = [kind for slot in slots if (kind := _default_kind(slot)) in need.kinds]
        # Another kind has none of the parts that the config gave the default one.
        if chosen or not defaults:
            chosen.append(f"{need.slot}.kind={(defaults or need.kinds)[0]}")
    value = key.node.get("default")
    example = value_text(value) if isinstance(value, str | int | float) and value != "" else "VALUE"
    return " ".join([*chosen, f"{key.path}={example}"])


def _default_kind(key: Key) -> str | None:
    default = key.node.get("default")
    kind = default.get("kind") if isinstance(default, dict) else default
    return kind if isinstance(kind, str) else None


def _entry(keys: ConfigKeys, group: list[Key]) -> dict[str, Any]:
    """A key as JSON data; `schema` is its JSON schema, with type, bounds and choices."""
    key, family = group[0], keys.family(group[0])
    return {
        "key": key.path.removesuffix("[]"),
        "type": key.type,
        "default": key.node.get("default"),
        "required": default_text(keys, key).startswith("none;"),
        "meaning": key.sentence,
        "override": override_of(keys, key),
        "needs": [need._asdict() for need in key.needs],
        "old_names": key.old_names,
        "same_key_at": [other.path for other in group[1:]],
        "kinds": [] if family is None else list(keys.parts(family)),
        "keys": [child.path for child in keys.children(key)] if family is None else [],
    }


def _part_entry(keys: ConfigKeys, key: Key, kind: str) -> dict[str, Any]:
    family = keys.family(key)
    assert family is not None
    meaning = keys.parts(family)[kind]["description"]
    return {"family": family, "meaning": meaning, "keys": [child.path for child in keys.children(key, kind)]}
