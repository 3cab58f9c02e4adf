"""Contrastive losses over the sentences of all data-parallel ranks: each rank's are negatives of the others'."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xscale.mesh.mesh import Mesh
from xscale.nn.module import substitute
from xscale.nn.roles import Role
from xscale.parallel.batch_statistics import SumOverGroup
from xscale.parallel.roles import seams_in


def apply(model: nn.Module, mesh: Mesh) -> bool:
    """Substitute where the model's contrastive loss finds its negatives; return whether it has one, and others."""
    losses = list(seams_in(model.modules(), Role.NEGATIVES))
    if mesh.replicas is None or mesh.degrees.dp == 1:
        return False
    group = mesh.replicas["dp_replicate"].get_group()
    for loss, seam, _ in losses:
        substitute(loss, seam, GatherOverGroup(group, mesh.data_rank, mesh.degrees.dp))
    return bool(losses)


class GatherOverGroup:
    """All-gather of rows, whose gradients are summed over the ranks: each rank's loss depends on the rows of all.

    Ranks of cp, which have the same rows, have a part of them each.
    """

    def __init__(self, group: dist.ProcessGroup, reader: int, readers: int) -> None:
        """`reader`: index among the ranks that read different samples, of which there are `readers` in the group."""
        self.reader, self.readers, self.sum = reader, readers, SumOverGroup(group)
        self.fraction = readers / dist.get_world_size(group)

    def __call__(self, rows: Tensor) -> tuple[Tensor, int]:
        count, first = len(rows), self.reader * len(rows)
        before = rows.new_zeros(first, *rows.shape[1:])
        after = rows.new_zeros((self.readers - self.reader - 1) * count, *rows.shape[1:])
        return self.sum(torch.cat((before, rows * self.fraction, after))), first
