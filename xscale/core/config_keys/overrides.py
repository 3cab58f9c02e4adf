"""The keys that an override sets in a config, by its path, by the index of an entry of a list, or by what a part is."""

from difflib import get_close_matches
from typing import Any

from xscale.core.config_keys.keys import ConfigKeys
from xscale.core.config_keys.override_path import (
    KeyPath,
    Segment,
    Target,
    is_index,
    is_plain,
    parse_path,
    path_text,
    with_brackets,
)
from xscale.core.config_keys.present_keys import (
    PresentKey,
    Word,
    below,
    entry,
    kind_of,
    root_of,
    walk,
)
from xscale.core.errors import ConfigError, nearest

Between = tuple[frozenset[str], ...]
"""Names of the steps between a word and a key below it."""
LISTED = 6
"""At most so many paths are listed in a message."""


def resolve(keys: ConfigKeys, data: dict[str, Any], text: str) -> list[Target]:
    """Return what the typed path sets in the config `data`; ConfigError where it is nothing, or not clear.

    A path whose first word is no section names keys by what they are: `moe.capacity_factor` is that of every mixture.
    """
    segments = parse_path(text)
    if is_plain(data, segments):
        return [Target(tuple(segment.name for segment in segments))]
    first = segments[0].name
    sections = {name for key in keys.children(keys.root) for name in (key.name, *key.old_names)}
    if first in sections or first in data or len(segments) == 1:
        steps = [step for segment in segments for step in (segment.name, *segment.entries)]
        targets = _by_path(keys, root_of(keys, data), steps, text)
    elif first in keys.words or any(
        first in key.words[-1].names for key in walk(keys, root_of(keys, data), "kind")
    ):
        ending = ("kind",) if segments[-1].name == "kind" else ()
        targets = [(*key.path, *ending) for key in find_present(keys, data, with_brackets(text))]
    else:
        # A misspelt section: the schema says so.
        targets = [tuple(segment.name for segment in segments)]
    return [Target(path, _defaults(keys, data, path)) for path in targets]


def find_present(keys: ConfigKeys, data: dict[str, Any], text: str) -> list[PresentKey]:
    """Return the keys of the config that the words name; ConfigError where there is none, or they mean several.

    The words stand, in order, for steps of the key's path: a name, a family, the kind of a part.
    """
    meanings: list[list[tuple[PresentKey, Between]]] = []
    for key, between in matching(keys, data, parse_path(text)):
        for group in meanings:
            if (group[0][1], group[0][0].key.node) == (between, key.key.node):
                group.append((key, between))
                break
        else:
            meanings.append([(key, between)])
    if not meanings and (unset := _below_null(keys, data, text)):
        return unset
    if not meanings:
        raise ConfigError(text, *_why_absent(keys, data, text))
    if len(meanings) > 1:
        paths = [path_text(key.path) for group in meanings for key, _ in group]
        more = f" and {len(paths) - LISTED} more" if len(paths) > LISTED else ""
        fix = f"Give the one that you mean: {', '.join(paths[:LISTED])}{more}."
        raise ConfigError(text, "may mean several keys of this recipe", fix)
    return [key for key, _ in meanings[0]]


def _below_null(keys: ConfigKeys, data: dict[str, Any], text: str) -> list[PresentKey]:
    """Return the keys that the words name in a section that is null in this config, and becomes one by them."""
    *above, last = parse_path(text)
    if len(above) < 2:
        return []
    return [
        PresentKey((*section.path, child.name), child, None, section.words, given=False)
        for section, between in matching(keys, data, above)
        if section.value is None and not between and keys.family(section.key) is None
        for child in keys.children(section.key)
        if last.name in (child.name, *child.old_names)
    ]


def matching(
    keys: ConfigKeys, data: dict[str, Any], segments: list[Segment]
) -> list[tuple[PresentKey, Between]]:
    """Return the keys that the words name, with the names between the last word but one and the key.

    Keys directly below that word are preferred to those further below it. `kind` stands for the slot itself.
    """
    *above, last = segments
    matches = []
    for key in walk(keys, root_of(keys, data), last.name):
        steps = list(key.words)
        if last.name == "kind":
            kind = (
                None
                if isinstance(key.value, list | tuple) or keys.family(key.key) is None
                else kind_of(key)
            )
            if kind is None:
                continue
            steps += [Word(frozenset({kind}), is_kind=True), Word(frozenset({"kind"}))]
        is_entry = isinstance(key.path[-1], int)
        if not _stands_for(last, steps[-1]) or (is_entry and not last.entries):
            continue
        anchor = _anchor(above, steps[:-1])
        if anchor is not None:
            between = tuple(step.names for step in steps[anchor:-1] if not step.is_kind)
            matches.append((key, between))
    return [match for match in matches if not match[1]] or matches


def below_path(keys: ConfigKeys, data: dict[str, Any], text: str) -> list[PresentKey]:
    """Return the keys directly below a typed path, or below words such as `moe`; none where there is no such place."""
    root = root_of(keys, data)
    if not text:
        return below(keys, root)
    segments = parse_path(text)
    if segments[0].name not in {key.name for key in keys.children(keys.root)}:
        anchors = [(key, _anchor(segments, list(key.words[:-1]))) for key in walk(keys, root)]
        return [
            key
            for key, anchor in anchors
            if anchor is not None and all(word.is_kind for word in key.words[anchor:-1])
        ]
    reached = [root]
    for segment in segments:
        reached = [
            key for above in reached for key in below(keys, above) if segment.name == key.key.name
        ]
        for index in segment.entries:
            lists = [key for key in reached if isinstance(key.value, list | tuple)]
            reached = [
                entry
                for key in lists
                for entry in below(keys, key)
                if index in (None, entry.path[-1])
            ]
    return [
        key for above in reached for key in below(keys, above) if not isinstance(key.path[-1], int)
    ]


def _stands_for(segment: Segment, step: Word) -> bool:
    """Whether a typed word names this step of a path, and one of the entries that it means."""
    if segment.name not in step.names:
        return False
    return not segment.entries or (
        step.index is not None and segment.entries[0] in (None, step.index)
    )


def _anchor(segments: list[Segment], steps: list[Word]) -> int | None:
    """Number of the steps up to the one of the last word, the nearest to the key; None: the words do not lead there."""
    end = len(steps)
    anchor = 0
    for segment in reversed(segments):
        end = next((at for at in reversed(range(end)) if _stands_for(segment, steps[at])), -1)
        if end < 0:
            return None
        anchor = anchor or end + 1
    return anchor


def _by_path(
    keys: ConfigKeys,
    above: PresentKey,
    steps: list[str | int | None],
    text: str,
    *,
    must_exist: bool = False,
) -> list[KeyPath]:
    """Return the paths that the steps below `above` mean, None being all entries of a list.

    Keys that do not exist are left to the schema to refuse, or to be left out where `must_exist`.
    """
    if not steps:
        return [above.path]
    step, *after = steps
    if isinstance(above.value, list | tuple):
        return _entries(
            keys,
            above,
            int(step) if isinstance(step, str) and is_index(step) else step,
            after,
            text,
        )
    if not isinstance(step, str):
        what = "has no entries in this recipe" if above.value is None else "is no list"
        raise ConfigError(
            text,
            f"{path_text(above.path)} {what}",
            f"`xscale explain {above.key.path}` says what it is.",
        )
    for child in below(keys, above, _last_name(after)):
        if step in (child.key.name, *child.key.old_names):
            return _by_path(keys, child, after, text, must_exist=must_exist)
    if must_exist and not (step == "kind" and kind_of(above) is not None):
        return []
    names = [name for name in after if isinstance(name, str)]
    if len(names) < len(after):
        near = nearest(step, [child.key.name for child in below(keys, above)])
        raise ConfigError(text, f"{path_text(above.path) or 'a recipe'} has no key '{step}'", near)
    return [(*above.path, step, *names)]


def _entries(
    keys: ConfigKeys,
    above: PresentKey,
    step: str | int | None,
    after: list[str | int | None],
    text: str,
) -> list[KeyPath]:
    """Return the paths that the steps after an index, or after the None of all entries, mean in a list."""
    name, count = path_text(above.path), len(above.value)
    full_list = f"{name}='[...]'"
    if count == 0:
        raise ConfigError(
            text, f"{name} has no entries in this recipe", f"Give the whole list: {full_list}."
        )
    choice = f"{name}[0]" if count == 1 else f"{name}[0] to {name}[{count - 1}]"
    if isinstance(step, str):
        fix = (
            f"Give {choice}, or all entries by {name}[*]: '{name}[*].{_text(step, *after)}=VALUE'."
        )
        raise ConfigError(text, f"{name} is a list, whose entries have keys and not the list", fix)
    if step is not None:
        if step >= count:
            entries_text = "1 entry" if count == 1 else f"{count} entries, counted from 0"
            raise ConfigError(text, f"{name} has {entries_text}", f"There is {choice}.")
        return _by_path(keys, entry(above, step), after, text)
    entries = [entry(above, index) for index in range(count)]
    paths = [
        path for item in entries for path in _by_path(keys, item, after, text, must_exist=True)
    ]
    if not paths:
        known = [_text(*key.path[len(item.path) :]) for item in entries for key in walk(keys, item)]
        wanted = _text(*after)
        close = get_close_matches(wanted, dict.fromkeys(known), n=2)
        fix = f"Did you mean {' or '.join(f'{name}[*].{path}' for path in close)}?" if close else ""
        raise ConfigError(
            text,
            f"no entry of {name} has the key {wanted}",
            fix or f"`xscale explain {name}` has them.",
        )
    return paths


def _last_name(steps: list[str | int | None]) -> str:
    names = [step for step in steps if isinstance(step, str)]
    return names[-1] if names else ""


def _text(*steps: str | int | None) -> str:
    return path_text(tuple("*" if step is None else step for step in steps))


def _defaults(
    keys: ConfigKeys, data: dict[str, Any], path: KeyPath
) -> tuple[tuple[KeyPath, Any], ...]:
    """List what the config leaves at its default above the key: lists and parts, of which only one key is given now."""
    above, defaults = root_of(keys, data), list[tuple[KeyPath, Any]]()
    for number, step in enumerate(path[:-1]):
        if isinstance(step, int):
            above = entry(above, step)
        else:
            child = next((child for child in below(keys, above) if child.path[-1] == step), None)
            if child is None:
                break
            above = child
        is_part = keys.family(above.key) is not None and path[number + 1] != "kind"
        if not above.given and above.value and (is_part or isinstance(above.value, list)):
            defaults.append(
                (above.path, {"kind": above.value} if isinstance(above.value, str) else above.value)
            )
    return tuple(defaults)


def _why_absent(keys: ConfigKeys, data: dict[str, Any], text: str) -> tuple[str, str]:
    """A clause and a sentence on a key that this recipe does not have."""
    *above, last = parse_path(text)
    query = ".".join(segment.name for segment in (*above, last))
    groups = keys.find(query)
    if groups and groups[0][0].needs:
        need = groups[0][0].needs[-1]
        what = (
            f"this recipe has no {need.family} {' or '.join(need.kinds[:LISTED])}, whose key it is"
        )
        return what, f"`xscale explain {query}` says where it may stand."
    if last.name == "kind" and (parts := keys.find_part(query.removesuffix(".kind"))):
        return (
            f"this recipe has no {keys.family(parts[0][0])} {parts[0][1]}",
            "`xscale list` shows all parts.",
        )
    # Keys that the words before the last lead to, and which the last may be meant to be.
    present = walk(keys, root_of(keys, data))
    names = dict.fromkeys(
        key.key.name for key in present if _anchor(above, list(key.words[:-1])) is not None
    )
    close = [
        ".".join([*query.split(".")[:-1], name])
        for name in get_close_matches(last.name, names, n=2)
    ]
    close = close or keys.suggest(query)
    return "there is no such config key", f"Did you mean {' or '.join(close)}?" if close else ""
