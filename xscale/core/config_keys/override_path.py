"""Paths of config keys as overrides have them, `model.stack.rules[0].every`, and plain data that is set at one."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from xscale.core.errors import ConfigError

KeyPath = tuple[str | int, ...]
"""Names of keys and indices of entries, from the root: `("model", "stack", "rules", 0, "every")`."""
SEGMENT = re.compile(r"([^\[\]]+)((?:\[(?:[0-9]{1,9}|\*|)\])*)")
"""A name and the entries of a list that are meant: `rules[0]`, or all of them: `rules[*]`, `rules[]`."""
EXAMPLE = "For example train.steps=20."
SHOWN = 60
"""Characters of a part of a key that a message shows."""


class Segment(NamedTuple):
    """One segment of a typed path."""

    name: str
    entries: tuple[int | None, ...] = ()
    """For each list, one within the other, the index of an entry, or None for all."""


@dataclass(frozen=True)
class Target:
    """A key that an override sets."""

    path: KeyPath
    defaults: tuple[tuple[KeyPath, Any], ...] = ()
    """Values that the config leaves at their default above the key: lists, and the parts of slots."""


def is_index(text: str) -> bool:
    """Whether the text is the index of an entry of a list."""
    return re.fullmatch("[0-9]{1,9}", text) is not None


def parse_path(text: str) -> list[Segment]:
    """Parse a typed path; ConfigError where it is none."""
    segments = []
    for part in text.split("."):
        match = SEGMENT.fullmatch(part)
        if match is None:
            fix = f"{EXAMPLE} An entry of a list is written name[0], and all of them name[*]."
            shown = part if len(part) <= SHOWN else f"{part[:SHOWN]}..."
            raise ConfigError(text, f"'{shown}' is no part of a key", fix)
        indices = re.findall(r"\[([0-9]*|\*)\]", match[2])
        segments.append(
            Segment(match[1], tuple(int(index) if is_index(index) else None for index in indices))
        )
    return segments


def typed_key(text: str) -> str:
    """Return the key of what was typed: without the value of an override, and entries of lists as `name[0]`.

    Messages name an entry by `name.0`, and completion leaves the dot behind a section.
    """
    key = text.partition("=")[0].strip().removesuffix(".")
    return with_brackets(key).replace("[*]", "[]")


def with_brackets(path: str) -> str:
    """Return the path with the index of an entry in brackets: `rules.0.every`, which needs no quotes, as `rules[0]`."""
    return re.sub(r"\.([0-9]{1,9})(?=\.|$)", r"[\1]", path)


def without_indices(key: str) -> str:
    """Return the key with `[]` for each entry of a list that is named by its index."""
    return re.sub(r"\[[0-9]{1,9}\]", "[]", key)


def is_plain(data: dict[str, Any], segments: list[Segment]) -> bool:
    """Whether the path is that of a key in sections and parts that the config has, and enters no list."""
    value: Any = data
    for segment in segments[:-1]:
        if segment.entries or not isinstance(value, dict) or segment.name not in value:
            return False
        value = value[segment.name]
    return isinstance(value, dict) and not segments[-1].entries


def path_text(path: KeyPath) -> str:
    """Return the path as an override has it: `model.stack.rules[0].every`."""
    return "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" for step in path
    ).removeprefix(".")


def nested(path: KeyPath, value: Any) -> Any:
    """Return the value within a mapping for each name of the path."""
    for name in reversed(path):
        value = {name: value}
    return value


def set_absent(data: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Set a copy of the value at the path, unless there is one; sections above it that are absent are added."""
    holder: Any = data
    for step in path[:-1]:
        holder = holder.setdefault(step, {}) if isinstance(holder, dict) else holder[step]
    if path[-1] not in holder:
        holder[path[-1]] = _copy(value)


def own_list(data: dict[str, Any], path: KeyPath) -> list[Any]:
    """Return the list at the path, after copying it: YAML's aliases let one object stand at several places."""
    holder: Any = data
    for step in path[:-1]:
        if isinstance(holder[step], list | tuple):
            holder[step] = _copy(holder[step])
        holder = holder[step]
    holder[path[-1]] = _copy(holder[path[-1]])
    entries: list[Any] = holder[path[-1]]
    return entries


def _copy(value: Any) -> Any:
    """A copy in which no object stands twice, as in one by `deepcopy` it would."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list | tuple) else value
