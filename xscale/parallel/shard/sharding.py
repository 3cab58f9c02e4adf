"""Shard parameters over tp and ep, by a table from the names of parameter axes to mesh axes (Lepikhin et al. 2020).

A sharded parameter is a DTensor on the tp axis of the dense mesh, or on the ep and tp axes of the experts' mesh.
`fully_shard` over the data-parallel axes of the same mesh, clipping and checkpoints read its placements. `DTensor` is
imported where it is used: that takes as long as half of torch, and a check of a config shards nothing.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from xscale.mesh.mesh import Mesh
from xscale.nn.axes import Axis
from xscale.nn.materialize import replace_parameters
from xscale.nn.module import Module, parameter_axes
from xscale.parallel.config import ParallelConfig

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def dense_mesh(mesh: Mesh, config: ParallelConfig) -> DeviceMesh:
    """Return the mesh of all parameters except experts that have a layout of their own."""
    device_mesh = mesh.replicas if config.zero.stage == 0 else mesh.dense
    assert device_mesh is not None, "a single process has no mesh"
    return device_mesh


def expert_mesh(mesh: Mesh, config: ParallelConfig) -> DeviceMesh:
    """Return the mesh of those experts."""
    device_mesh = mesh.expert_replicas if config.zero.stage == 0 else mesh.experts
    assert device_mesh is not None, "a single process has no mesh"
    return device_mesh


def data_parallel_mesh(mesh: DeviceMesh, replicate: str, shard: str) -> DeviceMesh:
    """Return the data-parallel ranks as one axis, or as two (hybrid sharding) when the sharded group is replicated."""
    names = mesh.mesh_dim_names or ()
    return mesh[replicate, shard] if mesh.size(names.index(replicate)) > 1 else mesh[shard]


RULES: dict[Axis, str] = {
    "heads": "tp",
    "kv_heads": "tp",
    "ffn": "tp",
    "vocab": "tp",
    "experts": "ep",
}
"""Axes that are not listed are replicated by tp and ep. ZeRO shards every parameter, by size and not by name."""


def placements(axes: tuple[Axis, ...], mesh: DeviceMesh) -> "tuple[Placement, ...]":
    """Return the placement of a parameter with those axes on each axis of `mesh`."""
    from torch.distributed.tensor import Replicate, Shard

    assert mesh.mesh_dim_names is not None
    mesh_axes = [RULES.get(axis) for axis in axes]
    return tuple(
        Shard(mesh_axes.index(name)) if name in mesh_axes else Replicate()
        for name in mesh.mesh_dim_names
    )


def holds_experts(module: Module) -> bool:
    """Return whether the module has parameters of experts."""
    return any("experts" in axes for axes in module.axes.values())


def shard_dim(parameter: torch.Tensor, axis: str) -> int | None:
    """Return the dim along which `parameter` is sharded over that mesh axis; None when it is replicated there."""
    from torch.distributed.tensor import DTensor, Shard

    # The DeepSpeed engine uses plain parameters; their placements are in the attribute `dtensor`.
    parameter = getattr(parameter, "dtensor", parameter)
    if not isinstance(parameter, DTensor):
        return None
    names = parameter.device_mesh.mesh_dim_names or ()
    if axis not in names:
        return None
    placement = parameter.placements[names.index(axis)]
    return placement.dim if isinstance(placement, Shard) else None


def apply(
    model: nn.Module, mesh: Mesh, config: ParallelConfig, replicated: Collection[str] = ()
) -> None:
    """Shard a model on meta; the parameters named in `replicated` are left as they are."""
    if mesh.dense is None or mesh.experts is None:
        return
    degrees = mesh.degrees
    dense = dense_mesh(mesh, config)["tp"] if degrees.tp > 1 else None
    experts = dense
    if degrees.has_expert_layout:
        axes = tuple(
            name for name, degree in (("ep", degrees.ep), ("tp", degrees.expert_tp)) if degree > 1
        )
        experts = expert_mesh(mesh, config)[axes] if axes else None
    shard_parameters(model, dense, experts, replicated)


def shard_parameters(
    model: nn.Module,
    dense: DeviceMesh | None,
    experts: DeviceMesh | None,
    replicated: Collection[str] = (),
) -> None:
    """Replace parameters by this rank's shards.

    `dense` has the axis tp; `experts` has ep, tp or both, for parameters with an `experts` axis. None: not sharded.
    """
    axes = parameter_axes(model)

    def shard(name: str, parameter: nn.Parameter) -> nn.Parameter:
        mesh = experts if "experts" in axes[name] else dense
        if mesh is None or name in replicated:
            return parameter
        layout = placements(axes[name], mesh)
        if not any(placement.is_shard() for placement in layout):
            return parameter
        return nn.Parameter(
            _local_shard(parameter, mesh, layout), requires_grad=parameter.requires_grad
        )

    replace_parameters(model, shard)


def _local_shard(
    full: nn.Parameter, mesh: DeviceMesh, layout: "tuple[Placement, ...]"
) -> "DTensor":
    from torch.distributed.tensor import DTensor, Shard

    assert full.is_meta, "a parameter is sharded before it has storage"
    shape = list(full.shape)
    for mesh_dim, placement in enumerate(layout):
        if isinstance(placement, Shard):
            size = -(-shape[placement.dim] // mesh.size(mesh_dim))
            shape[placement.dim] = max(
                0, min(size, shape[placement.dim] - mesh.get_local_rank(mesh_dim) * size)
            )
    local = torch.empty(shape, device="meta", dtype=full.dtype)
    return DTensor.from_local(
        local, mesh, layout, run_check=False, shape=full.shape, stride=full.stride()
    )
