"""Expert parallelism (Lepikhin et al. 2021): each rank holds some experts, and rows travel to theirs and back."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from xscale.core.errors import Problem
from xscale.mesh.collectives import exchange, exchange_counts
from xscale.mesh.mesh import Mesh
from xscale.nn.module import Module, parameter_axes
from xscale.nn.moe.dispatch import Dispatch, RowsToRows


def check(model: nn.Module, ep: int, path: str) -> list[Problem]:
    """Experts that ep does not divide, and ep without any experts."""
    problems = {}
    counts = [
        parameter.shape[axes.index("experts")]
        for (_, axes), (_, parameter) in zip(parameter_axes(model).items(), model.named_parameters(), strict=True)
        if "experts" in axes
    ]
    if ep > 1 and not counts:
        return [Problem(f"{path}.ep", f"ep is {ep} and the model has no experts", "Take ep=1, or an ffn of kind moe.")]
    for experts in counts:
        if experts % ep:
            fits = ", ".join(str(degree) for degree in range(1, experts + 1) if experts % degree == 0)
            what = f"{experts} experts cannot be dealt evenly to ep = {ep}"
            problems[what] = Problem(f"{path}.ep", what, f"Take ep among {fits}.")
    return list(problems.values())


def apply(model: nn.Module, mesh: Mesh) -> None:
    """Substitute the dispatch of each mixture, whose experts are cut over ep."""
    if mesh.degrees.ep == 1 or mesh.experts is None:
        return
    group = mesh.experts["ep"].get_group()
    for module in model.modules():
        if isinstance(module, Module) and hasattr(module, "dispatch"):
            setattr(module, "dispatch", AllToAll(group))  # noqa: B010  (a seam, not a submodule)


class Share:
    """The dispatch of a mixture whose rows are known to every rank of a group: each sends on a share of them."""

    def __init__(self, dispatch: Dispatch, group: dist.ProcessGroup) -> None:
        self.dispatch = dispatch
        self.group = group

    def __call__(self, rows: Tensor, counts: Tensor, experts: RowsToRows) -> Tensor:
        """Rows [M, D] sorted by expert, counts [E] -> the outputs of this rank's rows, zeros for the others: [M, D]."""
        rank, ranks, total = self.group.rank(), self.group.size(), len(rows)
        first, end = total * rank // ranks, total * (rank + 1) // ranks
        ends = counts.cumsum(0)
        mine = ends.clamp(first, end) - (ends - counts).clamp(first, end)
        made = self.dispatch(rows[first:end], mine, experts)
        return F.pad(made, (0, 0, first, total - end))


class AllToAll:
    """The dispatch of a mixture whose experts are spread over a group: rows go to their ranks and come back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, rows: Tensor, counts: Tensor, experts: RowsToRows) -> Tensor:
        """Rows [M, D] sorted by expert, and how many each of all E experts gets -> the experts' outputs [M, D]."""
        ranks = self.group.size()
        sent = counts.view(ranks, -1)  # [R, E/R]
        came = exchange_counts(sent, self.group)
        outgoing, incoming = self.sizes(sent, came)
        arrived = exchange(rows, outgoing, incoming, self.group)
        # Arrived by (rank, expert); the experts want (expert, rank).
        order, back = _by_expert(came, len(arrived))
        made = experts(arrived[order], came.sum(0))
        return exchange(made[back], incoming, outgoing, self.group)

    def sizes(self, sent: Tensor, came: Tensor) -> tuple[list[int], list[int]]:
        """Rows to each rank and from each; the one place that waits for counts [R, E/R]."""
        outgoing, incoming = torch.stack((sent.sum(1), came.sum(1))).tolist()
        return outgoing, incoming


def _by_expert(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """From rows ordered by (rank, expert) to rows ordered by (expert, rank), and back; counts [R, E] sum to `rows`."""
    ranks, experts = counts.shape
    label = torch.arange(experts, device=counts.device).repeat(ranks)
    label = label.repeat_interleave(counts.flatten(), output_size=rows)
    order = label.argsort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return order, back
