"""Changes of a recipe that may end a problem, and the sentence that says them."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from xscale.core.yaml_writer import flow_text, override_word

Edit = tuple[str, Any]
"""Dotted key of a recipe, and a value for it."""
OF_PART = ":"
"""Stands between a kind of parts and a key of theirs."""
LISTED = 6
"""At most so many values of one key are tried until they work, and named."""


@dataclass(frozen=True)
class Choice:
    """A change of a recipe that may end a problem."""

    edits: tuple[Edit, ...]
    """Keys with their values; an empty key is the one at fault, `FAMILY KIND` every part of that kind, and
    `FAMILY KIND:KEY` that key of each."""
    further: tuple[Edit, ...] = ()
    """Edits that must go with them, which the solver has found."""


def of_same_keys(choices: Iterable[Choice]) -> list[list[Choice]]:
    """Return the choices in groups that set the same keys, in the order of their first."""
    groups: dict[tuple[str, ...], list[Choice]] = {}
    for choice in choices:
        groups.setdefault(tuple(key for key, _ in choice.edits), []).append(choice)
    return list(groups.values())


def untried(choices: tuple[Choice, ...], path: str) -> str:
    """Say the first choices of each key, where no recipe is there to try them in; `path` is the key at fault."""
    first = [choice for group in of_same_keys(choices) for choice in islice(group, LISTED)]
    return sentence(tuple(first), path) if first else ""


def sentence(choices: tuple[Choice, ...], path: str) -> str:
    """Say choices: those that set the same keys together, those of the key at fault first."""
    groups: dict[tuple[str, ...], list[Choice]] = {}
    for choice in choices:
        keys = tuple(key for key, _ in choice.edits)
        distinct = {flow_text(value) for _, value in choice.edits}
        # Different values of several keys are one choice; one value for all of them is listed with others.
        groups.setdefault(keys if len(distinct) == 1 else (*keys, *distinct), []).append(choice)
    ordered = sorted(groups.values(), key=lambda group: group[0].edits[0][0] not in ("", path))
    return f"Take {', or '.join(_phrase(group, path) for group in ordered)}."


def _phrase(group: list[Choice], path: str) -> str:
    """Say choices that set the same keys."""
    first = group[0]
    if len({flow_text(value) for _, value in first.edits}) > 1:
        return _with("", (*first.edits, *first.further), path)
    (key, _), *further_keys = first.edits
    family, _, kind = key.partition(" ")
    shared = first.further if all(choice.further == first.further for choice in group) else ()
    start = "" if key in ("", path) else f"{key}="
    texts = [flow_text(choice.edits[0][1]) for choice in group]
    if (
        start
        and " " not in key
        and any(shlex.quote(start + text) != start + text for text in texts)
    ):
        start, texts = "", [shlex.quote(start + text) for text in texts]
    values = [
        text + ("" if shared or not choice.further else _with(" with ", choice.further, path))
        for choice, text in zip(group, texts, strict=True)
    ]
    listed = listed_names(values)
    kind, of_part, inner = kind.partition(OF_PART)
    if of_part:
        return f"{inner}={listed} of the {family} '{kind}'"
    if kind:
        return f"the {family} {listed} in place of '{kind}'"
    also = f", and so {' and '.join(key for key, _ in further_keys)}" if further_keys else ""
    apiece = ", each" if len(group) > 1 and shared else ""
    return f"{start}{listed}{also}{apiece}{_with(' with ', shared, path) if shared else ''}"


def _with(start: str, edits: tuple[Edit, ...], path: str) -> str:
    return start + " and ".join(_edit(key or path, value) for key, value in edits)


def _edit(key: str, value: Any) -> str:
    """Return `key=value` as it is typed; a key of parts, which has a space, is none that is typed."""
    return f"{key}={flow_text(value)}" if " " in key else override_word(key, value)


def listed_names(names: list[str]) -> str:
    """Say names as a list of alternatives."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
