"""The solver of requirements: it lists what contradicts, and advises the changes that it has found to be accepted.

A change may meet one requirement and break another. Then the solver looks for further changes that mend the other, and
names them together; a change for which there are none is not named, so that no two messages send a user in a circle.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from xscale.core.choices import LISTED, Choice, Edit, sentence
from xscale.core.errors import Problem
from xscale.core.requirements import Facts

Edits = tuple[Edit, ...]
Change = Callable[[Edits], Facts | None]
"""Makes the facts of the recipe with these edits; None: a value of them is refused by itself."""

INDEX = re.compile(r"\.([0-9]+)(?=\.|$)")
"""An index in the path of a problem: `cores.0.kind`, which an override writes `cores[0].kind`."""
TOGETHER = 2
"""At most so many further choices are made together with one."""
TRIALS = 120
"""At most so many changed recipes are checked for one problem."""
NOTHING = "No change that was tried is accepted."


def solve(facts: Facts, change: Change) -> list[Problem]:
    """List the problems of a recipe, each with the changes that would end it."""
    before = facts.problems()
    return [
        _Advice(name, problem, {key: len(value) for key, value in before.items()}, change).advised()
        for name, problems in before.items()
        for problem in problems
    ]


@dataclass
class _Advice:
    """Advice on one problem of the requirement `name`."""

    name: str
    problem: Problem
    before: dict[str, int]
    """Number of problems of each requirement."""
    change: Change
    trials: int = field(default=0, init=False)

    def advised(self) -> Problem:
        """Return the problem with the choices that work, and the sentence that says them."""
        if not self.problem.choices:
            return self.problem
        choices = tuple(self._working())
        key = _override_key(self.problem.path)
        texts = [sentence(choices, key) if choices else NOTHING, self.problem.fix]
        return replace(
            self.problem,
            is_solved=True,
            choices=choices,
            fix=" ".join(text for text in texts if text),
        )

    def _working(self) -> list[Choice]:
        """Return the choices that work; of those that set the same keys, the ones that need no other edit, if any."""
        groups: dict[tuple[str, ...], list[Choice]] = {}
        for choice in self.problem.choices:
            edits = _edits_at(choice, self.problem.path)
            group = groups.setdefault(tuple(key for key, _ in edits), [])
            if len(group) < LISTED and (completed := self._complete(edits, TOGETHER)):
                group.append(Choice(edits, completed[len(edits) :]))
        simple = [
            [choice for choice in group if not choice.further] or group for group in groups.values()
        ]
        choices = [choice for group in simple for choice in group]
        return [
            choice for choice in choices if not any(_is_part(other, choice) for other in choices)
        ]

    def _complete(self, edits: Edits, further: int) -> Edits | None:
        """Return the edits, with those of up to `further` other choices, that end the problem and add none."""
        self.trials += 1
        facts = None if self.trials > TRIALS else self.change(edits)
        if facts is None:
            return None
        after = facts.problems()
        if len(after.get(self.name, ())) >= self.before[self.name]:
            return None
        added = [
            problem
            for name, problems in after.items()
            if len(problems) > self.before.get(name, 0)
            for problem in problems
        ]
        if not added:
            return edits
        if further == 0:
            return None
        return self._mended(edits, added[0], further - 1)

    def _mended(self, edits: Edits, problem: Problem, further: int) -> Edits | None:
        """Return the edits with those that end a problem which they made."""
        keys = {key for key, _ in edits}
        for choice in problem.choices:
            more = _edits_at(choice, problem.path)
            if not any(_overlaps(key, other) for key, _ in more for other in keys):
                completed = self._complete((*edits, *more), further)
                if completed is not None:
                    return completed
        return None


def _is_part(choice: Choice, other: Choice) -> bool:
    """Whether a choice makes some of the edits of another, and no further ones: the others are for nothing."""
    some, every = (*choice.edits, *choice.further), (*other.edits, *other.further)
    return len(some) < len(every) and all(edit in every for edit in some)


def _overlaps(key: str, other: str) -> bool:
    """Whether an edit of one key undoes one of the other."""
    return key == other or other.startswith(f"{key}.")


def _override_key(path: str) -> str:
    """Return a path as an override writes it."""
    return INDEX.sub(r"[\1]", path)


def _edits_at(choice: Choice, path: str) -> Edits:
    return tuple((_override_key(key or path), value) for key, value in choice.edits)
