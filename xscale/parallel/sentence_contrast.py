"""Contrastive losses over the sentences of all data-parallel ranks: each rank's are negatives of the others'."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xscale.mesh.mesh import Mesh
from xscale.nn.module import substitute
from xscale.nn.sentence_contrast import SentenceContrast
from xscale.parallel.batch_statistics import SumOverGroup


def apply(model: nn.Module, mesh: Mesh) -> bool:
    """Substitute where the model's contrastive loss finds its negatives; return whether it has one, and others."""
    losses = [module for module in model.modules() if isinstance(module, SentenceContrast)]
    if mesh.replicas is None:
        return False
    group = mesh.replicas["dp_replicate"].get_group()
    if dist.get_world_size(group) == 1:
        return False
    for loss in losses:
        substitute(loss, "gather", GatherOverGroup(group))
    return bool(losses)


class GatherOverGroup:
    """All-gather of rows, whose gradients are summed over the ranks: each rank's loss depends on the rows of all."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.sum = group, SumOverGroup(group)

    def __call__(self, rows: Tensor) -> tuple[Tensor, int]:
        count, rank = len(rows), dist.get_rank(self.group)
        before = rows.new_zeros(rank * count, *rows.shape[1:])
        after = rows.new_zeros((dist.get_world_size(self.group) - rank - 1) * count, *rows.shape[1:])
        return self.sum(torch.cat((before, rows, after))), rank * count
