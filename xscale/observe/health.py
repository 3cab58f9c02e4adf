"""Health warnings: starving experts, loss spikes, steps that are not finite."""

import math
from collections import deque
from collections.abc import Callable

from xscale.core.errors import counted
from xscale.core.robust_threshold import spike_threshold
from xscale.observe.events import EndReport, StepReport
from xscale.observe.observer import Observer

STARVING = 0.1
"""Fraction of the mean expert load; Switch-style training recovers from more, seldom from less."""
HEAVY_DROPS = 0.3
"""Fraction of a layer's assignments whose drop is heavy: capacity leaves out a few per cent of a balanced load."""
DROPS_AVERAGED = 10
"""Reports that the dropped fraction is averaged over: a few, since drops are heaviest in a run's first steps."""
HISTORY = 50
"""Steps that a loss is compared with; no loss is a spike before half of them are known."""


class Health(Observer):
    """Sends a warning (by `message`, which reaches all observers) when a problem begins, and a note when it ends."""

    def __init__(self, message: Callable[[str], None], steps: int = 50) -> None:
        """`steps`: how many reports the load of an expert is averaged over."""
        self._message = message
        self._steps = steps
        self._loads: dict[str, tuple[int, list[float]]] = {}
        self._starving: dict[str, tuple[int, ...]] = {}
        self._drops: dict[str, deque[float]] = {}
        self._dropping: set[str] = set()
        self._losses: deque[float] = deque(maxlen=HISTORY)
        self._spiking = False
        self._skipped_before: int | None = None
        self._skipped = 0

    def step(self, report: StepReport) -> None:
        self._look_at_loss(report)
        for name, value in report.statistics.items():
            layer, _, statistic = name.rpartition("/")
            if isinstance(value, list) and statistic == "load":
                self._look_at_load(report.step, name, value)
            elif not isinstance(value, list) and statistic == "dropped":
                self._drops.setdefault(layer, deque(maxlen=DROPS_AVERAGED)).append(value)
        self._look_at_drops(report.step)

    def finish(self, report: EndReport) -> None:
        # The loop reports each when it happens; this is for a reader of the last lines.
        if skipped := self._skipped - (self._skipped_before or 0):
            self._message(
                f"warning: {counted(skipped, 'step')} of this process had a loss or gradient that was not finite"
            )

    def _look_at_loss(self, report: StepReport) -> None:
        if self._skipped_before is None:
            # `skipped` counts over restarts; subtract those of earlier processes, not a skipped first step of this one.
            self._skipped_before = report.skipped - (
                not math.isfinite(report.loss + report.grad_norm)
            )
        self._skipped = report.skipped
        if not math.isfinite(report.loss):
            return
        if len(self._losses) >= HISTORY // 2:
            self._look_for_spike(report)
        self._losses.append(report.loss)

    def _look_for_spike(self, report: StepReport) -> None:
        threshold = spike_threshold(self._losses, deviations=8.0, floor=0.05)
        if report.loss > threshold.limit and not self._spiking:
            self._message(
                f"warning: step {report.step}: the loss jumped to {report.loss:.4f}; "
                f"the median of the {counted(len(self._losses), 'step')} before is {threshold.median:.4f}"
            )
        self._spiking = report.loss > threshold.limit

    def _look_at_load(self, step: int, name: str, load: list[float]) -> None:
        # Consecutive windows, not a sliding one, which with hundreds of experts would take longer than some steps.
        count, total = self._loads.get(name, (0, [0.0] * len(load)))
        count, total = count + 1, [sum(pair) for pair in zip(total, load, strict=True)]
        if count < self._steps:
            self._loads[name] = (count, total)
            return
        del self._loads[name]
        starving = starved(total)
        before = self._starving.get(name, ())
        self._starving[name] = starving
        layer = name.rpartition("/")[0]
        if before and not starving:
            self._message(f"step {step}: every expert of {layer} gets tokens again")
        elif set(starving) - set(before):
            self._message(f"warning: step {step}: {layer} {_describe(starving, len(load))}")

    def _look_at_drops(self, step: int) -> None:
        means = {
            layer: sum(values) / len(values)
            for layer, values in self._drops.items()
            if len(values) == DROPS_AVERAGED
        }
        heavy = {layer: mean for layer, mean in means.items() if mean > HEAVY_DROPS}
        if new := heavy.keys() - self._dropping:
            worst = max(new, key=lambda layer: heavy[layer])
            further = f", {_layers(len(new) - 1)} over {HEAVY_DROPS:.0%}" if len(new) > 1 else ""
            self._message(
                f"warning: step {step}: {worst} drops {heavy[worst]:.0%} of its tokens' assignments{further}; "
                "more capacity_factor keeps them, a larger aux_loss_weight spreads them"
            )
        # A layer is well again at half of the bound, so that one at the bound is not said again and again.
        well = {layer for layer in self._dropping if means.get(layer, 1.0) < HEAVY_DROPS / 2}
        self._dropping = (self._dropping | new) - well
        if well and not self._dropping:
            self._message(
                f"step {step}: no layer drops more than {HEAVY_DROPS / 2:.0%} of its assignments any more"
            )


def starved(load: list[float]) -> tuple[int, ...]:
    """The experts whose load is below `STARVING` times the mean of `load` [E]."""
    total = sum(load)
    return tuple(
        expert for expert, value in enumerate(load) if value < STARVING * total / len(load)
    )


def _describe(starving: tuple[int, ...], experts: int) -> str:
    if 2 * len(starving) >= experts:
        return f"has collapsed onto {experts - len(starving)} of its {experts} experts"
    names = ", ".join(str(expert) for expert in starving)
    few = "expert" if len(starving) == 1 else "experts"
    return f"starves {few} {names} of {experts}: less than a tenth of the mean load"


def _layers(count: int) -> str:
    return f"{count} more layer" if count == 1 else f"{count} more layers"
