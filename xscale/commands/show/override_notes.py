"""Notes before a run starts or is planned: what overrides set and replaced, and values seldom meant."""

import sys
import warnings
from collections.abc import Iterator
from typing import Any

from xscale.core.compose import Composed
from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError
from xscale.core.key_words.renamed import RenamedWarning
from xscale.measure.flops import size
from xscale.observe.format import quantity
from xscale.planning import vocabulary_of
from xscale.recipe import Recipe, dropped_values
from xscale.settings.settings import build_on_meta

WITH_PARAMETERS = ("model", "data.tokenizer")
"""Beginnings of the paths of keys on which the number of parameters depends."""


def say_at_start(recipe: Recipe, composed: Composed) -> None:
    """Print notes on the overrides, and warnings, on stderr."""
    for note in notes(recipe, composed):
        print(f"xscale: {note}", file=sys.stderr, flush=True)
    for problem in [*dropped_values(recipe, composed), *recipe.warnings()]:
        print(f"xscale: warning: {problem}", file=sys.stderr, flush=True)


def notes(recipe: Recipe, composed: Composed) -> list[str]:
    """Return sentences on overrides that set several keys or one by its part, on what was fitted, and changed kinds."""
    lines = [
        f"{typed} is set at {', '.join(places)}" for typed, places in composed.resolved.items()
    ]
    lines += composed.fitted.values()
    before = _without_overrides(composed)
    if before is None:
        return lines
    kinds: dict[bool, list[str]] = {True: [], False: []}
    has_others = False
    for path, clause in _changes(encode(before), encode(recipe), ""):
        has_parameters = path.startswith(WITH_PARAMETERS)
        if clause:
            kinds[has_parameters].append(clause)
        has_others = has_others or (has_parameters and not clause)
    for has_parameters, clauses in kinds.items():
        if clauses:
            text = f"overrides change {'; '.join(clauses)}"
            lines += [
                text
                + (_parameters(before, recipe, has_others=has_others) if has_parameters else "")
            ]
    return lines


def _parameters(before: Recipe, now: Recipe, *, has_others: bool) -> str:
    """A clause on the parameters before and after; it says so where other changes than those of kinds may matter."""
    old, new = (size(build_on_meta(of, vocabulary_of(of))).parameters for of in (before, now))
    cause = "; with the other overrides of the model" if has_others else ":"
    return f"{cause} {quantity(old)} parameters become {quantity(new)}"


def _without_overrides(composed: Composed) -> Recipe | None:
    """The recipe as the files have it; None where an override is needed to make it one, so that nothing is changed."""
    if composed.from_files == composed.data:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RenamedWarning)
            before = decode(Recipe, composed.from_files)
        return None if before.check_model_config() else before
    except ConfigError:
        return None


def _changes(before: Any, now: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each change, with a clause on a part of another kind, whose parts are left out."""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from _changes(old, new, f"{path}[{index}]")
    elif isinstance(before, dict) and isinstance(now, dict):
        old, new = before.get("kind"), now.get("kind")
        if isinstance(old, str) and isinstance(new, str) and old != new:
            yield path, f"{path} from {old} to {new}"
            return
        for name in (name for name in before if name in now):
            yield from _changes(before[name], now[name], f"{path}.{name}".lstrip("."))
        if before.keys() != now.keys():
            yield path, ""
    elif before != now:
        yield path, ""
