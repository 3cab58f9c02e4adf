"""Test examples and benchmark cases of squared_norm."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from xscale_kernels.cases import Case, Example, Pick
from xscale_kernels.squared_norm.op import IMPLEMENTATIONS, reference_squared_norm, squared_norm


def draw(pick: Pick) -> Example:
    """Tensors of any shape, some empty."""
    shapes = [
        pick.choice((0,), (), (pick.integer(1, 70),), (pick.integer(1, 70), 3), (70000,))
        for _ in range(pick.integer(1, 4))
    ]
    return Example(
        run=lambda *tensors, implementation=None: squared_norm(
            tensors, implementation=implementation
        ),
        exact=lambda *tensors: reference_squared_norm(tensors),
        tensors=tuple(pick.normal(*shape) for shape in shapes),
        learns=False,
    )


TESTS = ("test_squared_norm",)


def cases(device: str) -> Iterator[Case]:
    """The gradients of a small decoder."""
    D, depth = (2048, 24) if device == "cuda" else (256, 6)
    shapes = [
        shape
        for _ in range(depth)
        for shape in ((D,), (3 * D, D), (D, D), (D,), (8 * D, D), (D, 4 * D))
    ]
    tensors = [torch.randn(shape, device=device) for shape in shapes]
    names = {"eager": "reference"} | {
        entry.name: entry.name for entry in IMPLEMENTATIONS if entry.name != "reference"
    }
    ways = {way: partial(squared_norm, tensors, implementation=name) for way, name in names.items()}
    size = sum(tensor.numel() for tensor in tensors)
    yield Case(f"{len(tensors)} tensors, {size / 1e6:.1f}M float32", ways, bytes=4.0 * size)
