"""Statistics of a step, such as the load of the experts: their means over all ranks, and their values for the log."""

from collections.abc import Mapping

from torch import Tensor

from xscale.mesh.collectives import MeanOverOwners, mean_tensors
from xscale.mesh.mesh import Mesh
from xscale.nn.ffn.moe.statistics import copy_to_cpu, load_balance_metrics
from xscale.nn.forward import Stats
from xscale.observe.events import Statistic
from xscale.parallel.expert import overload_factor, rows_of_experts


class StepStatistics:
    """Reduces what the parts of the model observed in the micro-batches of a step."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._mean_over_stages = MeanOverOwners(mesh.background)

    def means(self, tally: Stats) -> dict[str, Tensor]:
        """Return the means over all ranks, by name; a stage of a pipeline has those of its own layers. Collective."""
        if self._mesh.degrees.pp < 2:
            return mean_tensors(tally.means())
        return self._mean_over_stages(*tally.copy(), self._mesh.device)


def logged_values(
    means: dict[str, Tensor], group_norms: Mapping[str, float], ep: int
) -> dict[str, Statistic]:
    """Return what a row of the metrics has of the means and of the gradient norms by group. The host waits here.

    `ep`: the expert-parallel ranks; with several, `<path>/overload` is the overload factor of a mixture's busiest rank.
    """
    on_cpu = copy_to_cpu(means)
    norms = {f"{group}/grad_norm": norm for group, norm in group_norms.items()}
    values = {name: value.tolist() for name, value in on_cpu.items() if value.dim() < 2}
    overload = {
        f"{path}/overload": overload_factor(rows, ep)
        for path, rows in rows_of_experts(on_cpu).items()
        if ep > 1
    }
    return {**values, **load_balance_metrics(on_cpu), **overload, **norms}
