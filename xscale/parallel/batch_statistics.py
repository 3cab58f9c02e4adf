"""Norms by statistics of a batch: sums over the ranks of data and context parallelism, which have other tokens."""

import torch.distributed as dist
from torch import Tensor, nn

from xscale.mesh.differentiable_collectives import copy_in, sum_out
from xscale.mesh.mesh import Mesh
from xscale.nn.module import substitute
from xscale.nn.roles import Role
from xscale.parallel.roles import seams_in


def apply(model: nn.Module, mesh: Mesh) -> int:
    """Substitute how batch norms sum over the tokens; return how many there are."""
    norms = list(seams_in(model.modules(), Role.SUM_OVER_BATCH))
    if mesh.replicas is None:
        return 0
    group = mesh.replicas["dp_replicate"].get_group()
    if dist.get_world_size(group) == 1:
        return 0
    for norm, seam, _ in norms:
        substitute(norm, seam, SumOverGroup(group))
    return len(norms)


class SumOverGroup:
    """All-reduce of sums, whose gradient is all-reduced too: each rank's loss depends on the tokens of all."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        return copy_in(sum_out(x, self.group), self.group)
