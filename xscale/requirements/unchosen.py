"""Sentences on the parts that no config chooses, and on the configs that come with xscale and choose them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from xscale.core.compose import Composed, configs_folder, parse_file
from xscale.core.errors import Problem

LISTED = 4
"""At most so many configs are named for one part."""


def name_unchosen(problems: Sequence[Problem], composed: Composed) -> list[Problem]:
    """Return the problems, each with a sentence on every part that would end it and that no file or override chooses.

    The message of such a problem is else about a default, of which the user's file says nothing.
    """
    named = []
    for problem in problems:
        sentences = [problem.fix, *_sentences(problem, composed)]
        named.append(replace(problem, fix=" ".join(text for text in sentences if text)))
    return named


def _sentences(problem: Problem, composed: Composed) -> Iterator[str]:
    kinds: dict[str, list[Any]] = {}
    for choice in problem.choices:
        for key, value in choice.edits:
            path, _, last = (key or problem.path).rpartition(".")
            if last == "kind" and path and not choice.further:
                kinds.setdefault(path, []).append(value)
    for path, values in kinds.items():
        if not _is_chosen(path, composed):
            yield _sentence(path, shipped_configs(path, values))


def _sentence(path: str, configs: list[str]) -> str:
    unchosen = f"No config chooses {path}, which has its default"
    if not configs:
        return f"{unchosen}."
    more = " ..." if len(configs) > LISTED else ""
    listed = f"one of {', '.join(configs[:LISTED])}{more}" if len(configs) > 1 else configs[0]
    return f"{unchosen}: add {listed} to `use`."


def _is_chosen(path: str, composed: Composed) -> bool:
    """Whether a config gives the part, or its kind: one that gives a key of the default chooses nothing."""
    return path in composed.origin or f"{path}.kind" in composed.origin


def shipped_configs(path: str, kinds: Sequence[Any]) -> list[str]:
    """Return the names for `use` of the configs of one section alone whose part at `path` is of the kinds."""
    section, *names = path.split(".")
    configs = []
    for file in sorted((configs_folder() / section).glob("*.yaml")):
        data = parse_file(file)
        part: Any = data if set(data) == {section} else {}
        for name in (section, *names):
            part = part.get(name) if isinstance(part, dict) else None
        kind = part.get("kind") if isinstance(part, dict) else part
        if kind in kinds:
            configs.append(f"{section}/{file.stem}")
    return configs
