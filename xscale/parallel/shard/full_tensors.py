"""Full tensors behind DTensor shards: gathered, computed on by optimizers that are not elementwise, and written.

A matrix that is sharded over one mesh axis is gathered by one owner: in each round every rank of the axis's group owns
another matrix, gets its shards by all-to-all, computes, and sends the shards of the result back. So the ranks share the
work, and hold one matrix each, or a part of a stack of experts. Over a further axis (tp, within shards of ZeRO) all
ranks gather the matrix and compute the same. Axes that shard only the stack of experts leave matrices whole.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from xscale.mesh.collectives import all_gather
from xscale.mesh.differentiable_collectives import all_to_all
from xscale.mesh.torch_private import _StridedShard
from xscale.nn.post_step import WeightWriter
from xscale.optim.full_tensors import (
    LocalSum,
    MatrixFunction,
    MatrixPart,
    UnshardedTensors,
    parts_of,
)
from xscale.parallel.shard.sharded import shard_like, to_local


@dataclass(frozen=True)
class ShardedDim:
    """A dim of a parameter that one mesh axis shards, in chunks of which the last ones may be smaller or empty."""

    dim: int
    group: dist.ProcessGroup
    length: int
    """Length of the dim before this axis shards it."""

    @property
    def chunk(self) -> int:
        return -(-self.length // self.group.size())

    def sizes(self) -> list[int]:
        """Length of each rank's shard."""
        return [
            max(0, min(self.chunk, self.length - rank * self.chunk))
            for rank in range(self.group.size())
        ]

    def shard(self, x: Tensor) -> Tensor:
        """View of this rank's shard of `x`, which has all of the dim."""
        rank = self.group.rank()
        return x.narrow(self.dim, min(rank * self.chunk, self.length), self.sizes()[rank])

    def gather(self, shard: Tensor) -> Tensor:
        """All-gather the shards along the dim."""
        shape = list(shard.shape)
        shape[self.dim] = self.chunk - shape[self.dim]
        padded = torch.cat((shard, shard.new_zeros(shape)), self.dim) if shape[self.dim] else shard
        return all_gather(padded, self.dim, self.group).narrow(self.dim, 0, self.length)


def sharded_dims(parameter: Tensor) -> list[ShardedDim]:
    """Return the sharded dims of a parameter: first that of the axis that sharded last and is gathered first."""
    if not isinstance(parameter, DTensor):
        return []
    mesh, lengths, dims = parameter.device_mesh, list(parameter.shape), []
    # The last mesh axes sharded first: fully_shard shards what tp and ep left, and its axes stand before theirs.
    for axis in reversed(range(mesh.ndim)):
        placement = parameter.placements[axis]
        if isinstance(placement, Shard | _StridedShard) and mesh.size(axis) > 1:
            sharded = ShardedDim(placement.dim, mesh.get_group(axis), lengths[placement.dim])
            lengths[placement.dim] = sharded.sizes()[sharded.group.rank()]
            dims.append(sharded)
    assert tuple(lengths) == parameter.to_local().shape, (
        f"shard {lengths} of {parameter.placements}"
    )
    return dims[::-1]


def gather_full(parameter: Tensor) -> Tensor:
    """Return a parameter in full, without a gradient; of one that is not sharded, its own values. Collective."""
    value = to_local(parameter.detach())
    for sharded in sharded_dims(parameter):
        value = sharded.gather(value)
    return value


def free_gathered_weights(model: nn.Module) -> None:
    """Free the weights that `fully_shard` has gathered: the shards are about to change, or have."""
    # Imported where used: it takes as long as half of torch.
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class ShardedWeightWriter(WeightWriter):
    """Reads and writes the parameters of a model by their shards, other than in an optimizer's step.

    After a forward without a backward, such as an evaluation's, modules keep the weights that they gathered (at stage 3
    the root does) in place of their parameters. What is written to those is lost when they are freed, and what is
    written to the shards is not seen before. So this frees them; make another writer after the next forward.
    """

    def __init__(self, model: nn.Module) -> None:
        free_gathered_weights(model)
        self._shards = {id(parameter) for parameter in model.parameters()}

    def read(self, parameter: Tensor) -> Tensor:
        self._require_shard(parameter)
        return gather_full(parameter)

    def update(self, parameter: Tensor, function: Callable[..., Tensor], *full: Tensor) -> None:
        self._require_shard(parameter)
        super().update(parameter, function, *full)

    @torch.no_grad()
    def write_shard(self, parameter: Tensor, local: Tensor) -> None:
        """Replace this rank's shard of the parameter by `local`, of the shard's shape."""
        self._require_shard(parameter)
        to_local(parameter.detach()).copy_(local)

    def shard_like(self, full: Tensor, parameter: Tensor) -> Tensor:
        return shard_like(full, parameter)

    def _require_shard(self, parameter: Tensor) -> None:
        assert id(parameter) in self._shards, "a weight that modules do not store: it was gathered"


@dataclass(frozen=True)
class ShardedTensors:
    """The full tensors of a list of parameters; see `xscale.optim.full_tensors.FullTensors`. Collective."""

    parameters: Sequence[Tensor]

    @cached_property
    def sharded_dims(self) -> list[list[ShardedDim]]:
        """Sharded dims of each parameter."""
        return [sharded_dims(parameter) for parameter in self.parameters]

    def shape(self, weight: int) -> tuple[int, ...]:
        return tuple(self.parameters[weight].shape)

    def means(self, sums: Sequence[LocalSum]) -> list[Tensor]:
        values = [total.value for total in sums]
        by_groups: dict[tuple[str, ...], tuple[list[dist.ProcessGroup], list[int]]] = {}
        for index, total in enumerate(sums):
            groups = [
                sharded.group
                for sharded in self.sharded_dims[total.weight]
                if sharded.dim in total.dims
            ]
            by_groups.setdefault(tuple(group.group_name for group in groups), (groups, []))[
                1
            ].append(index)
        for groups, indices in by_groups.values():
            if not groups:
                continue
            # One all-reduce for the sums of all parameters that are sharded over the same ranks.
            flat = torch.cat([values[index].flatten() for index in indices])
            for group in groups:
                dist.all_reduce(flat, group=group)
            sizes = [values[index].numel() for index in indices]
            for index, piece in zip(indices, _split(flat, sizes), strict=True):
                values[index] = piece.view(values[index].shape)
        counts = [math.prod(self.shape(total.weight)[dim] for dim in total.dims) for total in sums]
        return [value / count for value, count in zip(values, counts, strict=True)]

    def map_matrices(
        self,
        weights: Sequence[int],
        operand: Callable[[MatrixPart], Tensor],
        function: MatrixFunction,
    ) -> Iterator[tuple[MatrixPart, Tensor]]:
        unsplit: list[int] = []
        by_group: dict[str, list[_SplitPart]] = {}
        local_tensors = [to_local(parameter) for parameter in self.parameters]
        for weight in weights:
            local = local_tensors[weight]
            splits = [
                sharded for sharded in self.sharded_dims[weight] if sharded.dim >= local.dim() - 2
            ]
            if not splits:
                unsplit.append(weight)
                continue
            group = splits[0].group
            by_group.setdefault(group.group_name, []).extend(
                _SplitPart(part, splits, local)
                for part in parts_of(weight, tuple(local.shape), group.size())
            )
        yield from UnshardedTensors(local_tensors).map_matrices(unsplit, operand, function)
        for split_parts in by_group.values():
            # None where this rank has no expert of a stack; the other ranks of the group have none either.
            ranks = split_parts[0].splits[0].group.size() if split_parts else 1
            for first in range(0, len(split_parts), ranks):
                yield from _one_round(split_parts[first : first + ranks], operand, function)


@dataclass(frozen=True)
class _SplitPart:
    """Matrices of which several ranks have shards."""

    part: MatrixPart
    splits: list[ShardedDim]
    """Dims of the matrices that mesh axes shard; the ranks of the first one take turns as owners."""
    local: Tensor
    """This rank's shard of the parameter."""

    def shapes(self) -> list[tuple[int, ...]]:
        """Shape of the part's shard on each rank of the first group."""
        shape, owners = list(self.part.of(self.local).shape), self.splits[0]
        return [(*shape[: owners.dim], size, *shape[owners.dim + 1 :]) for size in owners.sizes()]


def _one_round(
    split_parts: list[_SplitPart], operand: Callable[[MatrixPart], Tensor], function: MatrixFunction
) -> Iterator[tuple[MatrixPart, Tensor]]:
    """Compute as many parts as the group has ranks, or fewer: rank r owns part r."""
    group = split_parts[0].splits[0].group
    ranks, rank = group.size(), group.rank()
    owned = split_parts[rank] if rank < len(split_parts) else None
    outgoing = [split.part.of(split.local).numel() for split in split_parts] + [0] * (
        ranks - len(split_parts)
    )
    shapes = [] if owned is None else owned.shapes()
    incoming = [math.prod(shape) for shape in shapes] or [0] * ranks
    shards = [operand(split.part) for split in split_parts]
    result = received = all_to_all(
        torch.cat([shard.flatten() for shard in shards]), outgoing, incoming, group
    )
    del shards
    if owned is not None:
        owners, *inner_dims = owned.splits
        pieces = [
            piece.view(shape)
            for piece, shape in zip(_split(received, incoming), shapes, strict=True)
        ]
        computed = _on_whole(torch.cat(pieces, owners.dim), inner_dims, function)
        result = torch.cat(
            [piece.flatten() for piece in _split(computed, owners.sizes(), owners.dim)]
        )
    returned = all_to_all(result, incoming, outgoing, group)
    for split, piece in zip(split_parts, _split(returned, outgoing), strict=False):
        yield split.part, piece.view(split.part.of(split.local).shape)


def _split(x: Tensor, sizes: list[int], dim: int = 0) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = x.split(sizes, dim)  # type: ignore[no-untyped-call]
    return pieces


def _on_whole(matrices: Tensor, splits: list[ShardedDim], function: MatrixFunction) -> Tensor:
    """Apply `function` to matrices that further axes shard; every rank of theirs gathers them."""
    for sharded in splits:
        matrices = sharded.gather(matrices)
    result = function(matrices)
    for sharded in reversed(splits):
        result = sharded.shard(result)
    return result
