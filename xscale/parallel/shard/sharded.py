"""Sharded parameters: name, local shard and layout, read off the parameter itself; they get their storage here."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from xscale.mesh.torch_private import (
    _StridedShard,
    compute_local_shape_and_global_offset,
    reset_sharded_parameters,
)
from xscale.nn.init import draw
from xscale.nn.materialize import replace_parameters
from xscale.nn.module import (
    linear_map_names,
    parameter_axes,
    parameter_decays,
    parameter_inits,
    parameter_width_ratios,
)


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter of the model as this rank stores it."""

    name: str
    parameter: nn.Parameter
    axes: tuple[str, ...]
    decays: bool
    """Whether weight decay applies to it."""
    copies: int = 1
    """How many pipeline stages have a copy of it."""
    linear_map: bool = False
    """Whether it is the matrix of a linear map, or a stack of them."""
    width_ratio: float = 1.0
    """Width over base width, by which muP scales its learning rate."""

    @property
    def local(self) -> Tensor:
        """This rank's shard; writing to it writes the parameter."""
        return to_local(self.parameter.detach())

    @property
    def gradient(self) -> Tensor | None:
        """This rank's shard of the gradient."""
        gradient = self.parameter.grad
        return None if gradient is None else to_local(gradient)

    @property
    def shards(self) -> int:
        """Number of different shards of the full parameter."""
        value = self.parameter
        if not isinstance(value, DTensor):
            return 1
        # A dim that is sharded twice is a _StridedShard on one of the axes, which is no subclass of Shard.
        is_sharded = [
            isinstance(placement, Shard | _StridedShard) for placement in value.placements
        ]
        return math.prod(
            value.device_mesh.size(dim) for dim, sharded in enumerate(is_sharded) if sharded
        )

    def from_local_like(
        self, local: Tensor, reduced_dim: int | None = None, block: int = 1
    ) -> Tensor:
        """Return a local shard, such as an optimizer state's, with this parameter's global shape and placements.

        `reduced_dim`, counted from the last as -1: a dim that the state lacks, over whose shards it is the same.
        `block`: elements of the last dim for which the state has one.
        """
        value = self.parameter
        if not isinstance(value, DTensor):
            return local
        shape, stride, placements = value.shape, value.stride(), value.placements
        if block != 1:
            shape = torch.Size([*shape[:-1], shape[-1] // block])
            stride = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
        if reduced_dim is not None:
            dim = value.dim() + reduced_dim
            shape = torch.Size([*shape[:dim], *shape[dim + 1 :]])
            stride = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
            placements = tuple(_without_dim(placement, dim) for placement in placements)
        return DTensor.from_local(
            local, value.device_mesh, placements, run_check=False, shape=shape, stride=stride
        )


def _without_dim(placement: Placement, dim: int) -> Placement:
    """Return the placement of a tensor's mean over `dim`."""
    if not isinstance(placement, Shard | _StridedShard) or placement.dim < dim:
        return placement
    if placement.dim == dim:
        return Replicate()
    if isinstance(placement, _StridedShard):
        strided: Placement = _StridedShard(placement.dim - 1, split_factor=placement.split_factor)
        return strided
    return Shard(placement.dim - 1)


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class StagedModel(nn.Module):
    """A pipelined model: this rank's stages, each a model with the parameter names of the full one."""

    def __init__(self, models: list[nn.Module], copies: dict[str, int]) -> None:
        """`copies`: name of each parameter that several stages have -> how many."""
        super().__init__()
        self.models = nn.ModuleList(models)
        self.copies = copies

    def wait_sends(self) -> None:
        """Wait until everything that forwards sent to other ranks has left. Call it after the last forward."""

    def report_waits(self, report: Callable[[object | None], object]) -> None:
        """Call `report` with each message between stages before this rank waits for it, and with None afterwards."""


def stage_models(model: nn.Module) -> list[nn.Module]:
    """Return the models of this rank's pipeline stages, or the model itself without a pipeline."""
    return list(model.models) if isinstance(model, StagedModel) else [model]


def sharded_parameters(model: nn.Module) -> list[ShardedParameter]:
    """Return every parameter of this rank once, in the model's order."""
    if isinstance(model, StagedModel):
        parameters = [
            parameter for stage in model.models for parameter in sharded_parameters(stage)
        ]
        return [
            replace(parameter, copies=model.copies.get(parameter.name, 1))
            for parameter in parameters
        ]
    axes, decays, linear_maps = (
        parameter_axes(model),
        parameter_decays(model),
        linear_map_names(model),
    )
    ratios = parameter_width_ratios(model)
    return [
        ShardedParameter(
            name,
            parameter,
            axes[name],
            decays[name],
            linear_map=name in linear_maps,
            width_ratio=ratios.get(name, 1.0),
        )
        for name, parameter in model.named_parameters()
    ]


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Shard a tensor that every rank has in full as `like` is sharded."""
    if not isinstance(like, DTensor):
        return full
    shape, offset = local_shape_and_offset(like)
    local = full
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        local = local.narrow(dim, start, length)
    return DTensor.from_local(
        local.contiguous(),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def local_shape_and_offset(parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's shard and its offset in the full tensor."""
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape), (0,) * parameter.dim()
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(shape), tuple(offset)


def empty_like_local(parameter: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Allocate storage for this rank's shard."""
    shape, _ = local_shape_and_offset(parameter)
    return torch.empty(shape, device=device, dtype=dtype)


def materialize(
    model: nn.Module,
    seed: int,
    device: torch.device,
    master: torch.dtype,
    *,
    draw_weights: bool = True,
) -> None:
    """Fill a model on meta with the initial weights of (seed, name): the same full tensors on every layout.

    Without `draw_weights` with NaN, for a model whose weights are about to be read.
    """
    inits = {name: init for name, _, init in parameter_inits(model)}

    def value(name: str, parameter: nn.Parameter) -> Tensor:
        shape, offset = local_shape_and_offset(parameter)
        if not draw_weights:
            return torch.full(shape, float("nan"), device=device, dtype=master)
        rows = range(offset[0], offset[0] + shape[0])
        drawn = draw(inits[name], tuple(parameter.shape), seed, name, rows)
        for dim in range(1, len(shape)):
            drawn = drawn.narrow(dim, offset[dim], shape[dim])
        return drawn.to(device, master, copy=True).contiguous()

    fill_parameters(model, value)


def fill_parameters(model: nn.Module, value: Callable[[str, nn.Parameter], Tensor]) -> None:
    """Replace the storage of every parameter by `value(name, parameter)`, this rank's shard."""

    def fill(name: str, parameter: nn.Parameter) -> nn.Parameter:
        local = value(name, parameter)
        if isinstance(parameter, DTensor):
            local = DTensor.from_local(
                local,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        return nn.Parameter(local, requires_grad=parameter.requires_grad)

    with torch.no_grad():
        replace_parameters(model, fill)
        reset_sharded_parameters(model)
