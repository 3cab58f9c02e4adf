"""Collectives with gradients: those at the boundaries of sharded regions, and the all-to-all."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xscale.mesh import collectives
from xscale.mesh.collectives import pad_to_multiple


class _AllToAll(torch.autograd.Function):
    """All-to-all of rows; backward is the reverse all-to-all."""

    @staticmethod
    def forward(
        context: Any, rows: Tensor, outgoing: list[int], incoming: list[int], group: Any
    ) -> Tensor:
        context.outgoing = outgoing
        context.incoming = incoming
        context.group = group
        received = rows.new_empty((sum(incoming), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), incoming, outgoing, group=group)
        return received

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        back = gradient.new_empty((sum(context.outgoing), *gradient.shape[1:]))
        dist.all_to_all_single(
            back, gradient.contiguous(), context.outgoing, context.incoming, group=context.group
        )
        return back, None, None, None


def all_to_all(
    rows: Tensor, outgoing: list[int], incoming: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send `outgoing[r]` consecutive rows to each rank r of the group and receive `incoming[r]` from it.

    [sum(outgoing), ...] -> [sum(incoming), ...]; every rank of the group must call it.
    """
    received: Tensor = _AllToAll.apply(rows, outgoing, incoming, group)  # type: ignore[no-untyped-call]
    return received


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Any) -> Tensor:
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return collectives.all_reduce(gradient, context.group), None


def copy_in(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Enter a region with the replicated `x` (Megatron's f): identity forward, all-reduce of the gradient backward."""
    copied: Tensor = _CopyIn.apply(x, group)  # type: ignore[no-untyped-call]
    return copied


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Any) -> Tensor:
        return collectives.all_reduce(x, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return gradient, None


def sum_out(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Leave a region with partial sums `x` (Megatron's g): all-reduce forward, identity backward."""
    total: Tensor = _SumOut.apply(x, group)  # type: ignore[no-untyped-call]
    return total


class _GatherIn(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, length: int, group: Any) -> Tensor:
        context.group = group
        # Contiguous, so that an operator that reads it as a matrix saves no copy.
        return collectives.all_gather(x, 1, group).narrow(1, 0, length).contiguous()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return (
            collectives.reduce_scatter(
                pad_to_multiple(gradient, 1, context.group.size()), 1, context.group
            ),
            None,
            None,
        )


def gather_in(x: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
    """Enter a region with sharded sequences: all-gather [B, T/R, D] -> [B, T, D], reduce-scatter backward."""
    gathered: Tensor = _GatherIn.apply(x, length, group)  # type: ignore[no-untyped-call]
    return gathered


class _ScatterOut(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Any) -> Tensor:
        context.length, context.group = x.shape[1], group
        return collectives.reduce_scatter(pad_to_multiple(x, 1, group.size()), 1, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return collectives.all_gather(gradient, 1, context.group).narrow(1, 0, context.length), None


def scatter_out(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Leave a region with partial sums [B, T, D]: reduce-scatter to [B, T/R, D], all-gather backward.

    A sequence that the ranks do not divide is padded at its end.
    """
    shard: Tensor = _ScatterOut.apply(x, group)  # type: ignore[no-untyped-call]
    return shard


class _SliceIn(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Any) -> Tensor:
        context.length, context.group = x.shape[1], group
        shard: Tensor = (
            pad_to_multiple(x, 1, group.size()).chunk(group.size(), 1)[group.rank()].clone()
        )
        return shard

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return collectives.all_gather(gradient, 1, context.group).narrow(1, 0, context.length), None


def slice_in(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Slice replicated [B, T, D] to this rank's [B, T/R, D], padded like `scatter_out`. Backward all-gathers."""
    shard: Tensor = _SliceIn.apply(x, group)  # type: ignore[no-untyped-call]
    return shard


class _GatherOut(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, length: int, group: Any) -> Tensor:
        context.group = group
        context.size = x.shape[-1]
        context.shard_size = -(-length // group.size())
        return collectives.all_gather(pad_to_multiple(x, -1, context.shard_size), -1, group).narrow(
            -1, 0, length
        )

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return (
            gradient.narrow(
                -1, context.group.rank() * context.shard_size, context.size
            ).contiguous(),
            None,
            None,
        )


def gather_out(x: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
    """Leave a region sharded along the last dim: all-gather to `length`, slice the gradient backward.

    Each shard but the last is ceil(length / R) long. The gradient is not summed: it is the same on every rank.
    """
    gathered: Tensor = _GatherOut.apply(x, length, group)  # type: ignore[no-untyped-call]
    return gathered
