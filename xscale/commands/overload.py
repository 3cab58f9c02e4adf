"""The overload factor that `xscale plan` takes: as stated, or as a run has measured it."""

import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xscale.core.errors import ConfigError, counted
from xscale.observe.metrics import METRICS_FILE, read

if TYPE_CHECKING:
    from xscale.planning.overload import Overload

MEASURED_STEPS = 10
"""Last logged steps of a run whose overload factors are averaged."""
STATE_IT = "State a factor by --overload, or give another run."


@dataclass(frozen=True)
class OverloadOptions:
    """The options `--overload` and `--from-run`."""

    factor: float | None = None
    run: Path | None = None
    """Run folder."""

    def of(self, ep: int) -> "Overload":
        """Return the overload on `ep` expert-parallel ranks. ConfigError for an option that cannot hold there."""
        from xscale.planning.overload import Overload

        if self.factor is not None and self.run is not None:
            raise ConfigError(
                "--overload", "cannot be combined with --from-run", "Omit one of them."
            )
        if self.factor is not None:
            overload = Overload(self.factor, "--overload")
            overload.check("--overload", ep)
            return overload
        return Overload() if self.run is None else measured_overload(self.run, ep)


BALANCED = OverloadOptions()


def measured_overload(run: Path, ep: int) -> "Overload":
    """Return the mean over the mixtures and the last logged steps of a run, which may have another ep.

    ConfigError where there is none: `ep` is 1, or the run has no mixtures, or ep does not divide their experts.
    """
    from xscale.planning.overload import Overload

    if ep == 1:
        what = "parallel.mesh.ep is 1, so that no rank has more rows than another"
        raise ConfigError("--from-run", what, "Set parallel.mesh.ep above 1, or omit --from-run.")
    factors = {
        (layer, item["step"]): factor
        for item in _last_routed_rows(run)
        for layer, factor in _factors(item, run, ep).items()
        if math.isfinite(factor)
    }
    if not factors:
        what = f"{run} has logged no load of experts: its model has no mixture of experts"
        raise ConfigError("--from-run", what, STATE_IT)
    (layer, step), most = max(factors.items(), key=lambda entry: entry[1])
    layers, steps = ({key[index] for key in factors} for index in (0, 1))
    source = (
        f"measured by {run}, mean of {counted(len(layers), 'mixture')} in {counted(len(steps), 'logged step')} to step "
        f"{max(steps)}; at most {most:.2f}x, in {layer} at step {step}"
    )
    return Overload(max(1.0, sum(factors.values()) / len(factors)), source)


def _last_routed_rows(run: Path) -> "deque[dict[str, Any]]":
    """Return the last rows of the run's metrics that have the load of experts."""
    return deque(
        (
            item
            for item in read(run / METRICS_FILE)
            if any(isinstance(value, list) and key.endswith("/load") for key, value in item.items())
        ),
        MEASURED_STEPS,
    )


def _factors(item: dict[str, Any], run: Path, ep: int) -> dict[str, float]:
    """Return the overload factors of a row of the metrics, by layer."""
    import torch

    from xscale.parallel.expert import overload_factor, rows_of_experts

    lists = {
        key: torch.tensor(value, dtype=torch.float64)
        for key, value in item.items()
        if isinstance(value, list) and None not in value
    }
    factors = {}
    for layer, rows in rows_of_experts(lists).items():
        if len(rows) % ep:
            what = f"ep={ep} does not divide the {counted(len(rows), 'expert')} of {layer} in {run}"
            raise ConfigError("--from-run", what, STATE_IT)
        factors[layer] = overload_factor(rows, ep)
    return factors
