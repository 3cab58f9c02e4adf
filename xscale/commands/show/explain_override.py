"""The override that sets a config key: by its path, or by what the part is that has it."""

from typing import Any

from xscale.commands.show.example_values import example
from xscale.core.config_keys.keys import ConfigKeys, Key
from xscale.core.config_keys.override_path import parse_path, path_text
from xscale.core.config_keys.overrides import matching
from xscale.core.config_keys.present_keys import PresentKey, kind_of, root_of, walk
from xscale.core.yaml_writer import override_word


def override_of(keys: ConfigKeys, key: Key) -> str:
    """Return the word of a command line that sets the key in a recipe that has it, with an example of a value.

    A key of a part that recipes have at several locations, and that is not the default there, is set by what the part
    is: `moe.capacity_factor=2.0`. A section has the override of one of its keys.
    """
    if (
        keys.family(key) is None
        and not key.path.endswith("[]")
        and (children := keys.children(key))
    ):
        return override_of(
            keys, next((child for child in children if not keys.children(child)), children[0])
        )
    path = key.path.removesuffix("[]").replace("[]", "[*]")
    if "[" not in path and not has_default_kinds(keys, key) and len(keys.paths_of(key)) > 1:
        path = words_of(keys, key) or path
    return override_word(path, example(keys, key))


def words_of(keys: ConfigKeys, key: Key) -> str | None:
    """Return the fewest words that name the key by the part that has it, and no other key: `moe.capacity_factor`."""
    if not key.needs:
        return None
    need = key.needs[-1]
    *above, slot = need.slot.replace("[]", "").split(".")
    inside = key.path.replace("[]", "")[len(need.slot.replace("[]", "")) + 1 :]
    roots = {child.name for child in keys.children(keys.root)}
    starts = [*need.kinds[:1], *(f"{slot}.{kind}" for kind in need.kinds[:1])]
    starts += [f"{above[-1]}.{start}" for start in starts if above]
    for words in (f"{start}.{inside}" for start in starts if start.partition(".")[0] not in roots):
        groups = keys.find(words)
        if groups and all(group[0].node == key.node for group in groups):
            return words
    return None


def has_default_kinds(keys: ConfigKeys, key: Key) -> bool:
    """Whether the kinds that have the key are those at the defaults, so that a recipe need not choose them."""
    for depth, need in enumerate(key.needs):
        slots = [slot for slot in keys.at(need.slot) if slot.needs == key.needs[:depth]]
        if not any(
            kind_of(PresentKey((), slot, slot.node.get("default"))) in need.kinds for slot in slots
        ):
            return False
    return True


def locations_in(
    keys: ConfigKeys, data: dict[str, Any], query: str, groups: list[list[Key]]
) -> list[PresentKey]:
    """Return where a config has the keys `groups`, which `query` names; elsewhere under the same part if not there."""
    present = list(walk(keys, root_of(keys, data)))
    paths = {key.path for group in groups for key in group}
    if query.removesuffix(".kind") in paths:
        exact = [
            key
            for key in present
            if key.key.path == query.removesuffix(".kind") and not _is_entry(key)
        ]
    else:
        exact = [key for key, _ in matching(keys, data, parse_path(query.replace("[]", "")))]
    nodes = [group[0].node for group in groups]
    return exact or [key for key in present if key.key.node in nodes and not _is_entry(key)]


def _is_entry(key: PresentKey) -> bool:
    return isinstance(key.path[-1], int)


def location_word(keys: ConfigKeys, location: PresentKey) -> str:
    """Return the override that sets the key at this location of a recipe to the value that it has there."""
    path = path_text(location.path)
    is_slot = keys.family(location.key) is not None and not isinstance(location.value, list | tuple)
    return (
        override_word(f"{path}.kind", kind_of(location))
        if is_slot and location.value is not None
        else override_word(path, location.value)
    )
