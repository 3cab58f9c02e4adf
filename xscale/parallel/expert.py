"""Expert parallelism (Lepikhin et al. 2021): each rank holds some experts, and rows travel to theirs and back."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from xscale.core.errors import Problem
from xscale.mesh.collectives import exchange, exchange_counts
from xscale.mesh.mesh import Mesh
from xscale.nn.module import Module, parameter_axes


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
    """Cut every parameter with an `experts` axis over ep, and substitute the dispatch of each mixture."""
    if mesh.degrees.ep == 1 or mesh.experts is None:
        return
    along = mesh.experts["ep"]
    for module in model.modules():
        if not isinstance(module, Module):
            continue
        for name, axes in module.axes.items():
            if "experts" in axes:
                _cut(module, name, axes.index("experts"), along)
        if hasattr(module, "dispatch"):
            setattr(module, "dispatch", AllToAll(along.get_group()))  # noqa: B010  (a seam, not a submodule)


def _cut(module: Module, name: str, dim: int, along: Any) -> None:
    """Replace a parameter on meta by this rank's part of it, as a DTensor."""
    whole = getattr(module, name)
    assert whole.is_meta
    assert dim == 0, "experts are the first axis"
    shape = (whole.shape[0] // along.size(), *whole.shape[1:])
    local = torch.empty(shape, device="meta", dtype=whole.dtype)
    part = DTensor.from_local(local, along, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    setattr(module, name, nn.Parameter(part))


class AllToAll:
    """The dispatch of a mixture whose experts are spread over a group: rows go to their ranks and come back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, rows: Tensor, counts: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Rows [M, D] sorted by expert, and how many each of all E experts gets -> the experts' outputs [M, D]."""
        ranks = self.group.size()
        sent = counts.view(ranks, -1)  # [R, E/R]
        came = exchange_counts(sent, self.group)
        outgoing, incoming = torch.stack((sent.sum(1), came.sum(1))).tolist()
        arrived = exchange(rows, outgoing, incoming, self.group)
        # Arrived by (rank, expert); the experts want (expert, rank).
        order, back = _by_expert(came)
        made = experts(arrived[order], came.sum(0))
        return exchange(made[back], incoming, outgoing, self.group)


def _by_expert(counts: Tensor) -> tuple[Tensor, Tensor]:
    """From rows ordered by (rank, expert) to rows ordered by (expert, rank), and back; counts [R, E]."""
    ranks, experts = counts.shape
    label = torch.arange(experts, device=counts.device).repeat(ranks).repeat_interleave(counts.flatten())
    order = label.argsort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return order, back
