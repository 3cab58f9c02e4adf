"""Groups of ranks along the axes of the mesh, by which messages and dumps name them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from xscale.mesh.mesh import Mesh
from xscale.mesh.torch_private import (
    _resolve_process_group,
)

AXIS_NAMES = {"dp_replicate": "dp", "dp_shard": "dp", "expert_shard": "expert_dp"}
"""Shorter names for the axes of data parallelism."""


@dataclass(frozen=True)
class RankGroup:
    """Ranks and axes of a process group."""

    axes: tuple[str, ...]
    """Axes of the group: several when axes with the same ranks share it."""
    ranks: tuple[int, ...]

    @property
    def axis(self) -> str:
        return self.axes[0]

    def within(self, node: int) -> bool:
        """Whether all ranks are on one node of `node` ranks."""
        return self.ranks[0] // node == self.ranks[-1] // node


def groups_of(mesh: Mesh) -> dict[str, RankGroup]:
    """Return this rank's groups by name."""
    by_name: dict[str, RankGroup] = {}
    groups: list[tuple[str, dist.ProcessGroup]] = []
    for layout in (mesh.dense, mesh.experts, mesh.replicas, mesh.expert_replicas):
        if layout is not None:
            groups += [
                (AXIS_NAMES.get(axis, axis), layout[axis].get_group())
                for axis in layout.mesh_dim_names or ()
            ]
    for axis, pp_or_cp in (("cp", mesh.context), ("pp", mesh.pp_forward), ("pp", mesh.pp_backward)):
        groups += [(axis, pp_or_cp)] if pp_or_cp is not None else []
    for axis, group in groups:
        ranks, before = tuple(dist.get_process_group_ranks(group)), by_name.get(group.group_name)
        axes = (axis,) if before is None else tuple(dict.fromkeys((*before.axes, axis)))
        by_name[group.group_name] = RankGroup(axes, ranks)
    if dist.is_initialized():
        everyone = dist.group.WORLD
        assert everyone is not None
        by_name.setdefault(
            everyone.group_name, RankGroup(("all",), tuple(range(mesh.degrees.world)))
        )
    return by_name


def group_of_collective(arguments: Sequence[Any]) -> tuple[str, int]:
    """Return name and size of the group in the arguments of a collective operator."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and str(argument._type()).endswith(
            ".ProcessGroup"
        ):
            group = dist.ProcessGroup.unbox(argument)
            return group.group_name, group.size()
    name = next(argument for argument in reversed(arguments) if isinstance(argument, str))
    return name, _resolve_process_group(name).size()
