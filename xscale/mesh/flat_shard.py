"""A flat shard: consecutive elements of a tensor, as engines hold them that flatten parameters before sharding."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FlatShard:
    """Elements `first` to `first + len(local)`, in row-major order, of one box of a sharded tensor.

    The box is what the ranks of one data-parallel group hold together.
    """

    local: Tensor
    """[N] elements of this rank, on any device; a load fills it in place. Empty: this rank has none of the tensor."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    offset: tuple[int, ...]
    """Offset of the box in the full tensor, along each dim."""
    box: tuple[int, ...]
    """Sizes of the box."""
    first: int
    """Index in the box of the first local element."""

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def is_meta(self) -> bool:
        return self.local.is_meta

    def boxes(self) -> list[tuple[Tensor, tuple[int, ...]]]:
        """Views of `local` that are boxes, with their offsets: at most two for each dim but the first, and one more."""
        views, start = [], 0
        for within, sizes in boxes_of(self.first, self.first + self.local.numel(), self.box):
            count = math.prod(sizes)
            offset = tuple(a + b for a, b in zip(self.offset, within, strict=True))
            views.append((self.local.narrow(0, start, count).view(sizes), offset))
            start += count
        return views

    def view(self, offset: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """View of the box at `offset` of the full tensor, which is one of `boxes` or some of its rows."""
        strides = [math.prod(self.box[dim + 1 :]) for dim in range(len(self.box))]
        at = sum(
            (a - b) * stride for a, b, stride in zip(offset, self.offset, strides, strict=True)
        )
        return self.local.narrow(0, at - self.first, math.prod(sizes)).view(tuple(sizes))


def boxes_of(
    first: int, end: int, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offset and sizes of the boxes that cover elements [first, end) of a tensor of `shape`, in order."""
    if first >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    if first % row:
        at, stop = first // row, min(end, -(-first // row) * row)
        yield from _in_row(at, first - at * row, stop - at * row, shape[1:])
        first = stop
    if rows := (end - first) // row:
        yield (first // row, *(0 for _ in shape[1:])), (rows, *shape[1:])
        first += rows * row
    if first < end:
        yield from _in_row(first // row, 0, end - first, shape[1:])


def _in_row(
    row: int, first: int, end: int, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offset, sizes in boxes_of(first, end, shape):
        yield (row, *offset), (1, *sizes)
