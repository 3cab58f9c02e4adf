"""A layout turned into index tensors: the units of work of block-sparse attention, in buckets of equal degree.

A unit is one block of queries of one head, with the key blocks it sees. Units with equally many key blocks form a
bucket, so that a bucket is a few batched products without padding, and exactly the blocks that are there are computed.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from xscale.nn.pattern import Layout


@dataclass(frozen=True)
class Bucket:
    """The units that see `degree` key blocks each."""

    heads: Tensor | None
    """[U] head of each unit; None: every head has these units."""
    rows: Tensor
    """[U] query block of each unit, from the first row of the layout."""
    columns: Tensor
    """[U, degree] key blocks, ascending."""

    @property
    def degree(self) -> int:
        return self.columns.shape[1]


@dataclass(frozen=True)
class Plan:
    """All units of a layout."""

    rows: int
    """Query blocks."""
    columns: int
    """Key blocks."""
    buckets: tuple[Bucket, ...]
    """Of degree >= 1; blocks that see nothing are in none."""
    full: bool
    """Whether every unit is in a bucket."""


def plan_of(layout: Layout, device: torch.device) -> Plan:
    """The plan of a layout [H or 1, rows, columns]."""
    heads, rows, columns = layout.shape
    degrees = layout.sum(-1).reshape(-1)  # [H * rows]
    unit, column = np.nonzero(layout.reshape(-1, columns))
    starts = np.concatenate(([0], np.cumsum(degrees)))
    assert len(unit) == starts[-1]
    buckets = []
    for degree in np.unique(degrees):
        if degree == 0:
            continue
        units = np.flatnonzero(degrees == degree)  # [U]
        places = column[starts[units][:, None] + np.arange(degree)]  # [U, degree]
        buckets.append(
            Bucket(
                heads=None if heads == 1 else torch.from_numpy(units // rows).to(device),
                rows=torch.from_numpy(units % rows).to(device),
                columns=torch.from_numpy(places).to(device),
            )
        )
    return Plan(rows=rows, columns=columns, buckets=tuple(buckets), full=bool((degrees > 0).all()))
