"""A schedule played without any model: when each action begins and ends, and how long ranks wait."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xscale.parallel.pipeline.schedule import Action, Kind, Table

COSTS: Mapping[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Time of an action in that of a forward through a stage of mean cost."""


class StuckError(AssertionError):
    """Ranks wait for each other: the table is no schedule."""


@dataclass(frozen=True)
class Timed:
    """An action in time, in forwards of a mean stage."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Played:
    """A schedule in time."""

    ranks: list[list[Timed]]
    """The actions of each rank, in order."""

    @property
    def span(self) -> float:
        """From the first action's start to the last one's end."""
        return max((timed.end for actions in self.ranks for timed in actions), default=0.0)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they wait."""
        busy = sum(timed.end - timed.start for actions in self.ranks for timed in actions)
        return 1 - busy / (self.span * len(self.ranks)) if self.span else 0.0

    def kept(self, rank: int) -> int:
        """The most forwards of a rank that were waiting for their whole backward at once."""
        held = most = 0
        for timed in self.ranks[rank]:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[timed.action.kind]
            most = max(most, held)
        return most


def needs(action: Action, stages: int, kinds: Mapping[tuple[int, int], Kind]) -> list[Action]:
    """What must have ended before; `kinds` says for each (stage, micro) whether its backward is B or I."""
    stage, micro = action.stage, action.micro
    if action.kind == "F":
        return [Action("F", stage - 1, micro)] if stage else []
    if action.kind == "W":
        return [Action("I", stage, micro)]
    wanted = [Action("F", stage, micro)]
    if stage + 1 < stages:
        wanted.append(Action(kinds[stage + 1, micro], stage + 1, micro))
    return wanted


def play(table: Table, costs: Sequence[float] | None = None) -> Played:
    """Each rank runs its actions in order, each as soon as what it needs has ended. StuckError when none can go on.

    `costs` are those of the stages; only their ratios matter.
    """
    stages = 1 + max(action.stage for actions in table for action in actions)
    given = list(costs) if costs else [1.0] * stages
    mean = sum(given) / len(given)
    kinds = {(one.stage, one.micro): one.kind for actions in table for one in actions if one.kind in ("B", "I")}
    ended: dict[Action, float] = {}
    ranks: list[list[Timed]] = [[] for _ in table]
    places = [0] * len(table)
    while any(place < len(actions) for place, actions in zip(places, table, strict=True)):
        moved = False
        for rank, actions in enumerate(table):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                wanted = needs(action, stages, kinds)
                if any(one not in ended for one in wanted):
                    break
                free = ranks[rank][-1].end if ranks[rank] else 0.0
                start = max([free, *(ended[one] for one in wanted)])
                ended[action] = start + COSTS[action.kind] * given[action.stage] / mean
                ranks[rank].append(Timed(action, start, ended[action]))
                places[rank] += 1
                moved = True
        if not moved:
            at = {rank: str(actions[places[rank]]) for rank, actions in enumerate(table) if places[rank] < len(actions)}
            raise StuckError(f"every rank waits for another: {at}")
    return Played(ranks)
