"""Simulation of a pipeline schedule: when each action starts and ends, the bubble, and a drawing of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from xscale.parallel.config import PipelineConfig
from xscale.parallel.pipeline.schedule import Action, ActionKind, ActionTable, schedule_of
from xscale.parallel.pipeline.split import block_costs, block_paths, split

COSTS: Mapping[ActionKind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Time of an action; the unit is a forward through a stage of mean cost."""


class StuckError(AssertionError):
    """Deadlock: ranks wait for each other."""


@dataclass(frozen=True)
class TimedAction:
    """An action with its start and end, in forwards of a mean stage."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A schedule with the times of its actions."""

    ranks: list[list[TimedAction]]
    """The actions of each rank, in order."""

    @property
    def duration(self) -> float:
        """Time from the first action's start to the last one's end."""
        return max((timed.end for actions in self.ranks for timed in actions), default=0.0)

    @property
    def bubble(self) -> float:
        """Fraction of the ranks' time in which they wait."""
        busy = sum(timed.end - timed.start for actions in self.ranks for timed in actions)
        return 1 - busy / (self.duration * len(self.ranks)) if self.duration else 0.0

    def peak_saved(self, rank: int) -> int:
        """Return the peak number of forwards of a rank whose activations are saved for backward."""
        saved = peak = 0
        for timed in self.ranks[rank]:
            saved += {"F": 1, "B": -1, "I": 0, "W": -1}[timed.action.kind]
            peak = max(peak, saved)
        return peak


def dependencies(
    action: Action, stages: int, kinds: Mapping[tuple[int, int], ActionKind]
) -> list[Action]:
    """Return the actions that must end before; `kinds`: (stage, micro) -> whether its backward is B or I."""
    stage, micro = action.stage, action.micro
    if action.kind == "F":
        return [Action("F", stage - 1, micro)] if stage else []
    if action.kind == "W":
        return [Action("I", stage, micro)]
    wanted = [Action("F", stage, micro)]
    if stage + 1 < stages:
        wanted.append(Action(kinds[stage + 1, micro], stage + 1, micro))
    return wanted


def simulate(table: ActionTable, costs: Sequence[float] | None = None) -> Simulation:
    """Run each rank's actions in order, each as soon as its dependencies have ended. StuckError on a deadlock.

    `costs` are those of the stages; only their ratios matter.
    """
    stages = 1 + max(action.stage for actions in table for action in actions)
    stage_costs = list(costs) if costs else [1.0] * stages
    mean = sum(stage_costs) / len(stage_costs)
    kinds = {
        (action.stage, action.micro): action.kind
        for actions in table
        for action in actions
        if action.kind in ("B", "I")
    }
    ended: dict[Action, float] = {}
    ranks: list[list[TimedAction]] = [[] for _ in table]
    positions = [0] * len(table)
    while any(position < len(actions) for position, actions in zip(positions, table, strict=True)):
        moved = False
        for rank, actions in enumerate(table):
            while positions[rank] < len(actions):
                action = actions[positions[rank]]
                wanted = dependencies(action, stages, kinds)
                if any(dependency not in ended for dependency in wanted):
                    break
                free = ranks[rank][-1].end if ranks[rank] else 0.0
                start = max([free, *(ended[dependency] for dependency in wanted)])
                ended[action] = start + COSTS[action.kind] * stage_costs[action.stage] / mean
                ranks[rank].append(TimedAction(action, start, ended[action]))
                positions[rank] += 1
                moved = True
        if not moved:
            blocked = {
                rank: str(actions[positions[rank]])
                for rank, actions in enumerate(table)
                if positions[rank] < len(actions)
            }
            raise StuckError(f"every rank waits for another: {blocked}")
    return Simulation(ranks)


COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#eeca3b", "W": "#54a24b"}
NAMES = {"F": "forward", "B": "backward", "I": "backward to inputs", "W": "backward to weights"}


def draw_text(simulation: Simulation, columns: int = 120) -> str:
    """Draw a line for each rank.

    F3 and B3 are micro-batch 3's forward and backward, I3 and W3 the two parts of a split backward; dots are bubble.
    Lines are truncated to `columns`.
    """
    stages = 1 + max(timed.action.stage for actions in simulation.ranks for timed in actions)
    several = stages > len(simulation.ranks)
    label = {
        timed.action: f"{timed.action.kind}{timed.action.micro}"
        + (f"/{timed.action.stage}" if several else "")
        for actions in simulation.ranks
        for timed in actions
    }
    cell = 1 + max(len(text) for text in label.values())
    lines = []
    for rank, actions in enumerate(simulation.ranks):
        line = ""
        for timed in actions:
            line = line.ljust(round(timed.start * cell), ".")
            line += (
                label[timed.action].ljust(max(cell, round(timed.end * cell) - len(line)), "-")[:-1]
                + " "
            )
        head = f"rank {rank}  "
        full = head + line.ljust(round(simulation.duration * cell), ".")
        lines.append(full if len(full) <= columns else full[: columns - 1] + ">")
    return "\n".join(lines)


def draw_picture(simulation: Simulation, path: Path, title: str = "") -> None:
    """Write the schedule to `path`, in the format of its suffix (.svg, .png)."""
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(min(24.0, 2 + 0.35 * simulation.duration), 1 + 0.5 * len(simulation.ranks)),
        layout="constrained",
    )
    axes = figure.add_subplot()
    for rank, actions in enumerate(simulation.ranks):
        for timed in actions:
            width, colour = timed.end - timed.start, COLOURS[timed.action.kind]
            axes.barh(rank, width, left=timed.start, color=colour, edgecolor="white", height=0.9)
            axes.text(
                timed.start + width / 2,
                rank,
                str(timed.action.micro),
                ha="center",
                va="center",
                fontsize=7,
            )
    axes.set_yticks(
        range(len(simulation.ranks)), [f"rank {rank}" for rank in range(len(simulation.ranks))]
    )
    axes.invert_yaxis()
    axes.set_xlabel(f"time in forwards of a stage; {simulation.bubble:.1%} bubble")
    axes.set_title(title)
    used = {timed.action.kind for actions in simulation.ranks for timed in actions}
    for kind in COLOURS:
        if kind in used:
            axes.barh(0, 0, color=COLOURS[kind], label=NAMES[kind])
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7)
    figure.savefig(path)


def simulate_schedule(
    model: nn.Module, config: PipelineConfig, pp: int, micros: int, length: int
) -> Simulation:
    """Simulate the schedule of a step with the cost of each stage; `model` is the full one, on meta."""
    return simulate(
        schedule_of(config).table(config, pp, micros), _costs(model, config, pp, length)
    )


def estimate(
    model: nn.Module, config: PipelineConfig, pp: int, micros: int, length: int
) -> dict[str, object]:
    """Estimate blocks and cost of each stage, the bubble and the saved micro-batches, and draw the schedule."""
    simulation = simulate_schedule(model, config, pp, micros, length)
    count = schedule_of(config).stages(config, pp)
    costs = _costs(model, config, pp, length)
    return {
        "schedule": config.schedule,
        "blocks": [len(paths) for paths in split(model, config, count, length)],
        "cost_shares": [cost / sum(costs) for cost in costs],
        "bubble": simulation.bubble,
        "micro_batches_kept": [simulation.peak_saved(rank) for rank in range(pp)],
        "drawing": draw_text(simulation),
    }


def _costs(model: nn.Module, config: PipelineConfig, pp: int, length: int) -> list[float]:
    costs_of_blocks, head = block_costs(model, length)
    by_path = dict(zip(block_paths(model), costs_of_blocks, strict=True))
    stage_blocks = split(model, config, schedule_of(config).stages(config, pp), length)
    costs = [sum(by_path[path] for path in paths) for paths in stage_blocks]
    costs[-1] += head
    return costs
