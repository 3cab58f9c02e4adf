"""`xscale explain`: a config key's type, default, choices, meaning and override; the keys of a section; no torch."""

import json
from collections.abc import Iterator
from typing import Any

from xscale.commands.show.explain_override import (
    has_default_kinds,
    location_word,
    locations_in,
    override_of,
    words_of,
)
from xscale.core.compose import SCHEMA, Composed, configs_folder
from xscale.core.config_keys.keys import (
    ConfigKeys,
    Key,
    first_sentence,
    read_keys,
    value_text,
    wrapped,
)
from xscale.core.config_keys.override_path import path_text, typed_key, without_indices
from xscale.core.config_keys.overrides import find_present
from xscale.core.config_keys.present_keys import PresentKey, below, kind_of, root_of, walk
from xscale.core.errors import ConfigError
from xscale.core.key_words.others_words import way_of
from xscale.core.yaml_writer import override_word

SECTION = "its keys' defaults"
FULL = 2
"""At most so many paths of one name are explained in full; more are listed."""


def config_keys() -> ConfigKeys:
    """Return every key of a recipe, from the JSON schema that comes with xscale."""
    return read_keys(configs_folder() / SCHEMA)


def explain(
    query: str | None,
    recipe: Composed | None = None,
    name: str = "",
    *,
    what_else: str = "",
    as_json: bool = False,
) -> None:
    """Print what `query` names: a key, a section, a part's kind; all sections if it is None.

    It may be an override, whose key is meant, and name an entry of a list by its index.
    With a recipe, called `name`, also where it has the key, and its value there. ConfigError for an unknown one, with
    the sentence `what_else` on what the word is if it is no key, else with the nearest keys.
    """
    keys = config_keys()
    if query is None:
        _print_sections(keys, as_json=as_json)
        return
    typed, query = query, typed_key(query)
    named = without_indices(query)
    groups = keys.find(named)
    parts = [] if groups else keys.find_part(named)
    if not groups and not parts:
        close = keys.suggest(named)
        fix = (
            f"Did you mean {' or '.join(close)}?"
            if close
            else "`xscale explain` lists the sections of a config."
        )
        raise ConfigError(typed, "there is no such config key", what_else or way_of(named) or fix)
    if as_json:
        parts_json = [
            {"slot": key.path, "kind": kind, **_part_entry(keys, key, kind)} for key, kind in parts
        ]
        entries = [_entry(keys, group) for group in groups] or parts_json
        if recipe is not None:
            entries = [
                {**entry, "in_recipe": _locations_entry(keys, recipe, query, groups, parts)}
                for entry in entries
            ]
        print(json.dumps(entries, indent=2))
        return
    if parts:
        print("\n\n".join("\n".join(_part_lines(keys, key, kind)) for key, kind in parts))
    else:
        _print_keys(keys, groups)
    if recipe is not None:
        print("\n".join(_recipe_lines(keys, recipe.data, query, groups, parts, name)))


def _print_sections(keys: ConfigKeys, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([_entry(keys, [child]) for child in keys.children(keys.root)], indent=2))
        return
    print("Sections of a config; `xscale explain SECTION` lists the keys of one:")
    print("\n".join(_lines(keys, keys.root)))


def _print_keys(keys: ConfigKeys, groups: list[list[Key]]) -> None:
    """Print keys in full; a line on each if they stand at many paths."""
    paths: dict[str, list[list[Key]]] = {}
    for group in groups:
        paths.setdefault(group[0].path, []).append(group)
    if len(paths) > FULL:
        print(
            f"{len(groups)} keys are called so; give more of the path, or a kind, as in {_hint(groups)}:"
        )
        print("\n".join(f"  {_headline(keys, group[0])}{_parts_of(group[0])}" for group in groups))
    else:
        print(
            "\n\n".join(
                "\n".join(_path_lines(keys, alternatives)) for alternatives in paths.values()
            )
        )


def _locations(
    keys: ConfigKeys,
    data: dict[str, Any],
    query: str,
    groups: list[list[Key]],
    parts: list[tuple[Key, str]],
) -> list[PresentKey]:
    """Where the recipe has the keys, or parts of the kinds."""
    if groups:
        return locations_in(keys, data, query, groups)
    kinds = {(keys.family(slot), kind) for slot, kind in parts}
    return [
        key
        for key in walk(keys, root_of(keys, data))
        if (keys.family(key.key), kind_of(key)) in kinds
    ]


def _recipe_lines(
    keys: ConfigKeys,
    data: dict[str, Any],
    query: str,
    groups: list[list[Key]],
    parts: list[tuple[Key, str]],
    name: str,
) -> Iterator[str]:
    """Lines on where the recipe has the key, each as the override that sets the value that it has there."""
    locations = _locations(keys, data, query, groups, parts)
    if not locations:
        yield f"{name} has no such {'key' if groups else 'part'}."
        return
    yield f"in {name}:"
    for location in locations:
        leaves = [location]
        if (
            keys.family(location.key) is None
            and isinstance(location.value, dict)
            and keys.children(location.key)
        ):
            leaves = [child for child in below(keys, location) if not keys.children(child.key)]
        elif parts:
            leaves += [
                child
                for child in below(keys, location)
                if child.given and not keys.children(child.key)
            ]
        yield from (f"  {location_word(keys, leaf)}" for leaf in leaves)
    words = words_of(keys, locations[0].key)
    if len(locations) > 1 and groups and words is not None:
        try:
            named = find_present(keys, data, words)
            is_all = [key.path for key in named] == [key.path for key in locations]
        except ConfigError:
            # The words mean more than these.
            is_all = False
        if is_all:
            yield f"  all of them: {override_word(words, locations[0].value)}"


def _locations_entry(
    keys: ConfigKeys,
    recipe: Composed,
    query: str,
    groups: list[list[Key]],
    parts: list[tuple[Key, str]],
) -> list[dict[str, Any]]:
    locations = _locations(keys, recipe.data, query, groups, parts)
    return [{"key": path_text(location.path), "value": location.value} for location in locations]


def _of_its_key(keys: ConfigKeys, key: Key) -> str:
    is_section = keys.family(key) is None and not key.path.endswith("[]") and keys.children(key)
    return " of one of its keys" if is_section else ""


def _hint(groups: list[list[Key]]) -> str:
    key = next((group[0] for group in groups if group[0].needs), groups[0][0])
    return f"{key.needs[-1].kinds[0]}.{key.name}" if key.needs else key.path


def _parts_of(key: Key) -> str:
    return f" [{key.needs[-1].family} {', '.join(key.needs[-1].kinds)}]" if key.needs else ""


def _path_lines(keys: ConfigKeys, alternatives: list[list[Key]]) -> Iterator[str]:
    """Lines on the keys that parts define under one path: in full on that of the defaults, else on the first."""
    first = min(alternatives, key=lambda group: not has_default_kinds(keys, group[0]))
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
    yield f"  override{_of_its_key(keys, key)}: {override_of(keys, key)}"
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
    return (
        SECTION if keys.family(key) is None and keys.children(key) else "none; the key is required"
    )


def _owner(key: Key) -> str:
    """The kinds that have the key, with those of the slots above, such as `ffn moe (in model decoder)`."""
    clauses = [f"{need.family} {', '.join(need.kinds)}" for need in key.needs]
    return f"parts with this key: {clauses[-1]}" + (
        f" (in {'; '.join(clauses[:-1])})" if clauses[:-1] else ""
    )


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
    return {
        "family": family,
        "meaning": meaning,
        "keys": [child.path for child in keys.children(key, kind)],
    }
