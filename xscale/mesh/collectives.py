"""Collectives under torch's names, and pairs of collectives for activations whose backward is the dual collective."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xscale.mesh.torch_private import _get_default_store, c10d_functional

OPERATORS = c10d_functional
"""Functional collectives, which `torch.compile` keeps in its graphs."""


def sum_scalars(values: list[float], device: torch.device) -> list[float]:
    """All-reduce (sum) each value over all ranks in double precision."""
    if not dist.is_initialized():
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    sums: list[float] = total.tolist()
    return sums


class PendingSum:
    """An all-reduce (sum) of values over all ranks that has begun; every rank must begin it, and may drop the answer.

    On a GPU the answer is copied to the host behind the kernels that are queued now: `wait` waits for these, and for
    none that is queued later.
    """

    def __init__(self, values: list[float], device: torch.device) -> None:
        self._work: dist.Work | None = None
        self._copied: torch.cuda.Event | None = None
        self._sums = torch.tensor(values, dtype=torch.float64, pin_memory=device.type == "cuda")
        if not dist.is_initialized():
            return
        if device.type == "cuda":
            total = self._sums.to(device, non_blocking=True)
            dist.all_reduce(total)
            self._sums = torch.empty_like(self._sums, pin_memory=True).copy_(
                total, non_blocking=True
            )
            self._copied = torch.cuda.current_stream(device).record_event()
        else:
            self._work = dist.all_reduce(self._sums, async_op=True)

    def wait(self) -> list[float]:
        """Return the sums once they are there."""
        if self._work is not None:
            self._work.wait()
        if self._copied is not None:
            self._copied.synchronize()
        sums: list[float] = self._sums.tolist()
        return sums


def sum_tensor(values: Tensor) -> Tensor:
    """All-reduce (sum) a tensor over all ranks, in place, and return it; the host does not wait."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def broadcast_int(value: int, device: torch.device) -> int:
    """Return rank 0's value on every rank."""
    if not dist.is_initialized():
        return value
    element = torch.tensor([value], device=device)
    dist.broadcast(element, 0)
    return int(element)


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait until all ranks have called this; over `group`, for as long as its timeout, where the wait may be long."""
    if dist.is_initialized():
        dist.barrier(group)


class SharedCounter:
    """A count that every rank can add to and read at any time, in the store of the process group; not collective."""

    def __init__(self, name: str) -> None:
        self._name, self._count = name, 0

    def add(self, count: int) -> int:
        """Add to the count and return the sum over all ranks so far."""
        self._count += count
        return (
            int(_get_default_store().add(self._name, count))
            if dist.is_initialized()
            else self._count
        )


def all_gather_object(word: Any) -> list[Any]:
    """All-gather pickled data, by rank. RuntimeError when a rank has ended."""
    if not dist.is_initialized():
        return [word]
    words: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(words, word)
    return words


def all_gather_columns(columns: Tensor, device: torch.device) -> Tensor:
    """Concatenate the columns [R, N] of all ranks, each of which has its own N, by rank; R and the dtype are the same.

    The messages are tensors on `device`; the result is on the CPU.
    """
    if not dist.is_initialized():
        return columns
    world = dist.get_world_size()
    counts = torch.zeros(world, dtype=torch.int64, device=device)
    counts[dist.get_rank()] = columns.shape[1]
    dist.all_reduce(counts)
    sizes: list[int] = counts.tolist()
    padded = torch.zeros(len(columns), max(sizes), dtype=columns.dtype, device=device)
    padded[:, : columns.shape[1]] = columns
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded)
    return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], 1).cpu()


def all_to_all_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all of one row per rank, [ranks, ...] -> [ranks, ...]: row r goes to, and comes from, rank r."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    return received


def mean_tensors(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """All-reduce (mean) each value (float64) over all ranks, which must have the same names and shapes."""
    if not dist.is_initialized() or not values:
        return values
    names = sorted(values)
    flat = torch.cat([values[name].flatten() for name in names])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([values[name].numel() for name in names])  # type: ignore[no-untyped-call]
    return {name: part.view(values[name].shape) for name, part in zip(names, parts, strict=True)}


class MeanOverOwners:
    """Means of observations over the ranks that have them, as pipeline stages have the statistics of their layers.

    Every rank gets every name. A part that several stages share is used in some more often than in others, so that an
    observation weighs the same wherever it is made. Names and shapes are gathered in the first call, over `group`, and
    stay the same.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._shapes: dict[str, tuple[int, ...]] | None = None
        """Shapes of the values of all ranks, by name; None before the first call."""
        self._names: frozenset[str] = frozenset()
        """Names of this rank's values."""

    def __call__(
        self, sums: dict[str, Tensor], counts: dict[str, int], device: torch.device
    ) -> dict[str, Tensor]:
        """Return the means of this rank's `sums` (float64) of `counts` observations and those of the others, by name.

        Collective: one all-reduce, and a gather of objects in the first call.
        """
        if not dist.is_initialized():
            return {name: total / counts[name] for name, total in sums.items()}
        if self._shapes is None:
            self._names = frozenset(sums)
            shapes = {name: tuple(value.shape) for name, value in sums.items()}
            all_shapes: list[dict[str, tuple[int, ...]]] = [{}] * dist.get_world_size()
            dist.all_gather_object(all_shapes, shapes, group=self._group)
            self._shapes = {
                name: shape
                for rank_shapes in all_shapes
                for name, shape in sorted(rank_shapes.items())
            }
        assert self._names == sums.keys(), (
            f"the statistics changed: {sorted(self._names ^ sums.keys())}"
        )
        if not self._shapes:
            return {}
        zeros = {
            name: torch.zeros(shape, dtype=torch.float64, device=device)
            for name, shape in self._shapes.items()
            if name not in sums
        }
        padded = [(sums | zeros)[name].flatten() for name in self._shapes]
        observed = torch.tensor([counts.get(name, 0) for name in self._shapes], dtype=torch.float64)
        # From pinned memory the host does not wait for the copy.
        observed = observed.pin_memory() if device.type == "cuda" else observed
        flat = torch.cat([*padded, observed.to(device, non_blocking=True)])
        dist.all_reduce(flat)
        *totals, observed = flat.split([*map(Tensor.numel, padded), len(padded)])  # type: ignore[no-untyped-call]
        return {
            name: total.view(shape) / count
            for (name, shape), total, count in zip(
                self._shapes.items(), totals, observed, strict=True
            )
        }


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the group, bit for bit the same on every rank. No gradient."""
    return _wait(OPERATORS.all_reduce(x.contiguous(), "sum", group.group_name))


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' tensors, of equal shapes, concatenated along `dim`. No gradient."""
    dim, ranks = dim % x.dim(), group.size()
    gathered = _wait(OPERATORS.all_gather_into_tensor(x.contiguous(), ranks, group.group_name))
    return gathered.view(ranks, *x.shape).movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's equal shard, along `dim`, of the sum over the group. No gradient."""
    dim, ranks = dim % x.dim(), group.size()
    shape = (*x.shape[:dim], ranks, x.shape[dim] // ranks, *x.shape[dim + 1 :])
    pieces = x.reshape(shape).movedim(dim, 0).flatten(0, 1)
    return _wait(
        OPERATORS.reduce_scatter_tensor(pieces.contiguous(), "sum", ranks, group.group_name)
    )


def _wait(pending: Tensor) -> Tensor:
    tensor: Tensor = OPERATORS.wait_tensor(pending)
    return tensor


def pad_to_multiple(x: Tensor, dim: int, multiple: int) -> Tensor:
    """Pad `x` with zeros at its end along `dim` until `multiple` divides its length."""
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_zeros(shape)), dim)


@dataclass
class RingTransfer:
    """A tensor in flight to the next rank of a ring."""

    incoming: Tensor
    works: list[dist.Work]
    outgoing: Tensor
    """Kept alive until it is sent."""

    def wait(self) -> Tensor:
        """Wait for, and return, the tensor of the previous rank."""
        for work in self.works:
            work.wait()
        return self.incoming


def ring_send(x: Tensor, group: dist.ProcessGroup) -> RingTransfer:
    """Start to send `x` to the next rank of the ring and to receive a tensor of its shape. No gradient.

    Transfers complete in the order of their start; every rank of the group must start the same ones in the same order.
    """
    rank, ranks = group.rank(), group.size()
    leaving, arriving = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    operations = [
        dist.P2POp(dist.isend, leaving, group=group, group_peer=(rank + 1) % ranks),
        dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % ranks),
    ]
    return RingTransfer(arriving, dist.batch_isend_irecv(operations), leaving)
