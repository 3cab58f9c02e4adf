"""Layouts, made from the axes: each alone, each pair that `check` allows, and the larger ones that people run.

An option is one choice on one axis. A case joins options of different axes with a model, and takes its turn of the
habits of a run that no axis knows of: recomputation, clipping, tied tables, uneven stages.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from math import prod
from typing import Any

from tests.parallel.against_one import asked
from tests.parallel.models import MODELS, SHALLOW, changed
from xscale.recipe import Recipe

Sections = dict[str, Any]
AXES: dict[str, dict[str, Sections]] = {
    "pp": {
        schedule: {"mesh": {"pp": 2}, "pipeline": {"schedule": schedule}}
        for schedule in ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipe_v")
    },
    "dp_replicate": {"copies": {"mesh": {"dp_replicate": 2}}},
    "dp_shard": {f"zero{stage}": {"mesh": {"dp_shard": 2}, "zero": {"stage": stage}} for stage in range(4)},
    "cp": {style: {"mesh": {"cp": 2}, "context": {"style": style}} for style in ("ring", "ulysses")},
    "tp": {
        "tp": {"mesh": {"tp": 2}},
        "sequence": {"mesh": {"tp": 2}, "tensor": {"sequence": True}},
    },
    "ep": {
        "ep": {"mesh": {"ep": 2}},
        "whole_experts": {"mesh": {"ep": 2, "tp_in_experts": False}},
    },
}
"""Axis -> option -> what it asks of section `parallel`."""
OPTIONS = {option: axis for axis, options in AXES.items() for option in options}
LARGER = (
    "1f1b tp zero1",
    "1f1b tp zero3",
    "zero_bubble sequence zero2",
    "interleaved_1f1b ep zero1",
    "1f1b ep zero3",
    "zbv ep zero2",
    "tp ulysses zero1",
    "sequence ring zero3",
    "tp ep zero2",
    "sequence ep zero3",
    "sequence whole_experts zero1",
    "copies ep zero3",
    "copies tp zero3",
    "copies 1f1b zero2",
    "ring ep zero2",
    "1f1b ring zero1",
    "1f1b ulysses tp",
    "1f1b tp ep zero1",
    "interleaved_1f1b sequence ep zero2",
    "1f1b sequence ulysses ep",
    "zero_bubble ring ep zero2",
    "sequence ulysses ep zero3",
    "copies sequence ep zero3",
    "copies 1f1b sequence zero1",
)
"""Layouts that people run, up to eight ranks."""
SELECTIVE = -1
"""Replaces a period of recomputation: every block, which keeps what its products gave."""
HABITS: dict[str, tuple[Any, ...]] = {
    "recompute": (0, 1, 2, SELECTIVE),
    "clip": (0.5, None),
    "tied": (None, True, False),
}
"""Options that no axis knows of; the first of each is a plain run. `tied` None: as the model has it."""


@dataclass(frozen=True)
class Case:
    """A model on a layout."""

    model: str
    options: tuple[str, ...]
    recompute: int = 0
    clip: float | None = 0.5
    tied: bool | None = None
    micro: int = 2
    """Sequences of a micro-batch."""

    def __str__(self) -> str:
        period = "selective" if self.recompute == SELECTIVE else f"recompute{self.recompute}"
        habits = [period] * bool(self.recompute) + ["unclipped"] * (self.clip is None)
        habits += [] if self.tied is None else ["tied" if self.tied else "untied"]
        return "-".join((self.model, *self.options, *habits))

    @property
    def deep(self) -> bool:
        """Whether the model has all its blocks; without stages one of each kind shows as much in half the time."""
        return any(OPTIONS[option] == "pp" for option in self.options)

    @property
    def network(self) -> Sections:
        made = MODELS[self.model] if self.deep else SHALLOW[self.model]
        return made if self.tied is None else changed(made, tied=self.tied)

    @property
    def parallel(self) -> Sections:
        """Section `parallel` of a recipe."""
        found: Sections = {"mesh": {"dp_shard": 1}}
        for option in self.options:
            for key, value in AXES[OPTIONS[option]][option].items():
                found[key] = {**found.get(key, {}), **value}
        mesh = found["mesh"]
        if self.ep > self.folded:
            # Experts are folded over ranks that are there anyhow, or over more of them.
            mesh["dp_shard"] = 2
        if self.recompute == SELECTIVE:
            found["recompute"] = {"every": 1, "granularity": "selective"}
        elif self.recompute:
            found["recompute"] = {"every": self.recompute}
        return found

    @property
    def sections(self) -> Sections:
        """The other sections."""
        return {"train": {"clip_grad_norm": self.clip, "micro_batch_size": self.micro}}

    @property
    def ep(self) -> int:
        return 2 if any(OPTIONS[option] == "ep" for option in self.options) else 1

    @property
    def folded(self) -> int:
        """Ranks over which ep is folded."""
        over = {"dp_shard", "cp", "tp"} if "whole_experts" in self.options else {"dp_shard", "cp"}
        return prod(2 for option in self.options if OPTIONS[option] in over)

    @property
    def ranks(self) -> int:
        return prod(self.parallel["mesh"].get(axis, 1) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))

    def problems(self) -> list[str]:
        """Problems that `check` returns."""
        return [str(problem) for problem in self.recipe.check(self.ranks)]

    @property
    def recipe(self) -> Recipe:
        return asked(self.network, self.parallel, **self.sections)


@cache
def cases() -> tuple[Case, ...]:
    """All of them, in an order that never changes."""
    found: dict[str, Case] = {}
    for model in MODELS:
        for options in wanted(model):
            made = plain_or_changed(model, options)
            if made is not None:
                found[str(made)] = made
    return tuple(found.values())


def wanted(model: str) -> list[tuple[str, ...]]:
    """The options that a model is to be tried with; pairs that a larger layout joins are not tried by themselves."""
    larger = [tuple(words.split()) for words in LARGER if turn(model, words, 3) or "ep" in words]
    joined = {frozenset(pair) for options in larger for pair in combinations(options, 2)}
    pairs = [pair for pair in every_pair() if tried(model, *pair) and frozenset(pair) not in joined]
    experts = set(AXES["ep"])
    return [
        options
        for options in (*((option,) for option in OPTIONS), *pairs, *larger)
        if model == "mixture" or not experts & set(options)
    ]


def every_pair() -> list[tuple[str, str]]:
    """Two options of two axes."""
    return [pair for first, second in combinations(AXES, 2) for pair in product(AXES[first], AXES[second])]


def tried(model: str, *options: str) -> bool:
    """The commonest choices on two axes are tried with every model, each other pair with the one whose turn it is."""
    common = {"1f1b", "copies", "zero3", "ring", "sequence", "ep"}
    experts = bool(set(AXES["ep"]) & set(options))
    return experts or set(options) <= common or turn(model, "-".join(options), len(MODELS))


def turn(model: str, words: str, among: int) -> bool:
    """Whether it is this model's turn: by a number that depends on nothing but the words."""
    number = hashlib.blake2b(words.encode(), digest_size=2).digest()
    return int.from_bytes(number) % among == list(MODELS).index(model)


def plain_or_changed(model: str, options: tuple[str, ...]) -> Case | None:
    """The case with the habits whose turn it is, or without where they are refused; None where the layout is."""
    number = int.from_bytes(hashlib.blake2b("-".join((model, *options)).encode(), digest_size=4).digest())
    habits: dict[str, Any] = {}
    for name, values in HABITS.items():
        number, at = divmod(number, len(values))
        habits[name] = values[at]
    for chosen in (habits, {**habits, "recompute": 0}, {**habits, "recompute": 0, "tied": False}):
        for micro in (2, 1):
            case = Case(model, options, **chosen, micro=micro)
            if case.recipe.is_valid(case.ranks):
                return case
    return None
