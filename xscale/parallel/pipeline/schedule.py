"""Schedules: which rank runs which micro-batch through which stage, forward or backward, in which order.

GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019, PipeDream), interleaved 1F1B (Narayanan et al. 2021), zero
bubble H1 (Qi et al. 2023); ZB-V and DualPipeV are torch's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from xscale.parallel.config import PipelineConfig
from xscale.parallel.pipeline import torch_tables

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward; backward to the stage's input only; the rest of that backward, to the weights."""


@dataclass(frozen=True, order=True)
class Action:
    """One micro-batch in one stage."""

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}@{self.stage}"


Table = list[list[Action]]
"""The actions of each rank of pp, in order."""
Maker = Callable[[int, int, int], Table]
"""From the ranks of pp, stages a rank, and micro-batches."""


@dataclass(frozen=True)
class Schedule:
    """A way through the stages."""

    name: str
    make: Maker
    several: bool = False
    """Whether a rank has as many stages as `parallel.pipeline.chunks` says; else one, or two if it `turns`."""
    turns: bool = False
    """Whether stages lie as a V: the last one is on the first rank."""
    splits: bool = False
    """Whether a backward is split in two."""

    def chunks(self, config: PipelineConfig) -> int:
        """Stages of a rank."""
        return config.chunks if self.several else 2 if self.turns else 1

    def stages(self, config: PipelineConfig, pp: int) -> int:
        """Stages in all."""
        return pp * self.chunks(config)

    def rank_of(self, stage: int, pp: int) -> int:
        """Who has the stage."""
        turn, at = divmod(stage, pp)
        return pp - 1 - at if self.turns and turn % 2 else at

    def table(self, config: PipelineConfig, pp: int, micros: int) -> Table:
        """The actions of a step of so many micro-batches on each rank."""
        return self.make(pp, self.chunks(config), micros)


def gpipe(pp: int, chunks: int, micros: int) -> Table:
    """All forwards, then all backwards."""
    return [[Action(kind, rank, micro) for kind in ("F", "B") for micro in range(micros)] for rank in range(pp)]


def one_f_one_b(pp: int, chunks: int, micros: int) -> Table:
    """No rank keeps more micro-batches than there are ranks behind it, itself included."""
    return [_steady(pp, 1, micros, rank, min(micros, pp - rank - 1)) for rank in range(pp)]


def interleaved(pp: int, chunks: int, micros: int) -> Table:
    """Each rank has several stages, far apart, so the pipeline fills sooner; micro-batches go in rounds of pp."""
    total = micros * chunks
    warm = [min(total, 2 * (pp - rank - 1) + (chunks - 1) * pp) for rank in range(pp)]
    return [_steady(pp, chunks, micros, rank, warm[rank]) for rank in range(pp)]


def _steady(pp: int, chunks: int, micros: int, rank: int, warm: int) -> list[Action]:
    def forward(number: int) -> Action:
        chunk, micro = _place(number, pp, chunks)
        return Action("F", chunk * pp + rank, micro)

    def backward(number: int) -> Action:
        chunk, micro = _place(number, pp, chunks)
        return Action("B", (chunks - 1 - chunk) * pp + rank, micro)

    total = micros * chunks
    actions = [forward(number) for number in range(warm)]
    for number in range(total - warm):
        actions += [forward(warm + number), backward(number)]
    return actions + [backward(number) for number in range(total - warm, total)]


def _place(number: int, pp: int, chunks: int) -> tuple[int, int]:
    """Chunk and micro-batch of a rank's n-th forward: a round of pp micro-batches through each chunk in turn."""
    if chunks == 1:
        return 0, number
    round_, within = divmod(number, pp * chunks)
    return within // pp, round_ * pp + within % pp


def zero_bubble(pp: int, chunks: int, micros: int) -> Table:
    """As 1F1B, with the weights' part of each backward put off, on later ranks longer, into what would be bubble."""
    table = []
    for rank in range(pp):
        actions: list[Action] = []
        for action in _steady(pp, 1, micros, rank, min(micros, pp - rank - 1)):
            if action.kind == "F":
                actions.append(action)
                continue
            actions.append(Action("I", rank, action.micro))
            if action.micro >= rank:
                actions.append(Action("W", rank, action.micro - rank))
        actions += [Action("W", rank, micro) for micro in range(max(0, micros - rank), micros)]
        table.append(actions)
    return table


def _torch(make: Callable[[int, int], list[list[tuple[Kind, int, int]]]]) -> Maker:
    return lambda pp, chunks, micros: [[Action(*one) for one in actions] for actions in make(pp, micros)]


SCHEDULES = {
    one.name: one
    for one in (
        Schedule("gpipe", gpipe),
        Schedule("1f1b", one_f_one_b),
        Schedule("interleaved_1f1b", interleaved, several=True),
        Schedule("zero_bubble", zero_bubble, splits=True),
        Schedule("zbv", _torch(torch_tables.zbv), turns=True, splits=True),
        Schedule("dualpipe_v", _torch(torch_tables.dualpipe_v), turns=True, splits=True),
    )
}


def schedule_of(config: PipelineConfig) -> Schedule:
    """The schedule that the config names."""
    return SCHEDULES[config.schedule]
