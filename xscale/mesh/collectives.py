"""Collectives, named by what they do to the forward value; those on activations carry gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sum_scalars(values: list[float], device: torch.device) -> list[float]:
    """Each value summed over all ranks, in double precision; itself when there is one process."""
    if not dist.is_initialized():
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    summed: list[float] = total.tolist()
    return summed


def sum_tensor(value: Tensor) -> Tensor:
    """The tensor summed over all ranks."""
    if dist.is_initialized():
        value = value.clone()
        dist.all_reduce(value)
    return value


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; its gradient is the exchange the other way."""

    @staticmethod
    def forward(context: Any, rows: Tensor, outgoing: list[int], incoming: list[int], group: Any) -> Tensor:
        context.outgoing, context.incoming, context.group = outgoing, incoming, group
        received = rows.new_empty((sum(incoming), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), incoming, outgoing, group=group)
        return received

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        back = gradient.new_empty((sum(context.outgoing), *gradient.shape[1:]))
        dist.all_to_all_single(back, gradient.contiguous(), context.outgoing, context.incoming, group=context.group)
        return back, None, None, None


def exchange(rows: Tensor, outgoing: list[int], incoming: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send `outgoing[r]` consecutive rows to each rank r of the group and receive `incoming[r]` from it.

    [sum(outgoing), ...] -> [sum(incoming), ...]; every rank of the group must call it.
    """
    received: Tensor = _Exchange.apply(rows, outgoing, incoming, group)  # type: ignore[no-untyped-call]
    return received


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...] -> [ranks, ...]: row r goes to rank r, row r of the result came from it."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    return received


def mean_tensors(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each value averaged over all ranks; every rank must hold the same names and shapes."""
    if not dist.is_initialized() or not values:
        return values
    names = sorted(values)
    flat = torch.cat([values[name].flatten() for name in names])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([values[name].numel() for name in names])
    return {name: part.view(values[name].shape) for name, part in zip(names, parts, strict=True)}
