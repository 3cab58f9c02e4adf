"""Norms by statistics of a batch: sums over the ranks of data and context parallelism, which have other tokens."""

import torch.distributed as dist
from torch import Tensor, nn

from xscale.mesh.collectives import copy_in, sum_out
from xscale.mesh.mesh import Mesh
from xscale.nn.module import substitute
from xscale.nn.norm import BatchNorm


def apply(model: nn.Module, mesh: Mesh) -> int:
    """Substitute how batch norms sum over the tokens; return how many there are."""
    norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
    if mesh.replicas is None:
        return 0
    group = mesh.replicas["dp_replicate"].get_group()
    if dist.get_world_size(group) == 1:
        return 0
    for norm in norms:
        substitute(norm, "sum_over_batch", SumOverGroup(group))
    return len(norms)


class SumOverGroup:
    """All-reduce of sums, whose gradient is all-reduced too: each rank's loss depends on the tokens of all."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        return copy_in(sum_out(x, self.group), self.group)
