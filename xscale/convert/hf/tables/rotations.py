"""Transforms of projections whose rotated channels are pairs side by side in the other library.

xscale rotates channel i of a head with channel i + half.
"""

import torch

from xscale.convert.hf.tables.tensors import RowContext
from xscale.convert.mapping import Tensors, Transform


def paired_channels(heads: int, before: int, rotated: int, after: int = 0) -> Transform:
    """Transform a projection of so many heads, each of channels before the rotated ones, these, and others after."""
    # Row of xscale's at each row of the library's.
    pairs = torch.arange(rotated).view(2, -1).t().flatten()
    rows = torch.cat(
        (
            torch.arange(before),
            before + pairs,
            torch.arange(before + rotated, before + rotated + after),
        )
    )

    def reorder(tensors: Tensors, index: torch.Tensor) -> Tensors:
        tensor = tensors[0]
        by_head = tensor.view(heads, len(rows), *tensor.shape[1:])
        return [by_head[:, index].flatten(0, 1)]

    return Transform(
        lambda tensors: reorder(tensors, rows), lambda tensors: reorder(tensors, rows.argsort())
    )


def rotated_pairs(row: RowContext) -> Transform:
    """Return the transform of the queries or keys of an attention mixer."""
    mixer = row.block.mixer
    width = mixer.head_width or row.config.width // mixer.heads
    rotated = int(width * row.config.position.fraction) // 2 * 2
    return paired_channels(row.shapes[0][0] // width, 0, rotated, width - rotated)
