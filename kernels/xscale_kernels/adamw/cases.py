"""Test examples of adamw_step_, which is run on copies so that it can be repeated, and benchmark cases."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from xscale_kernels.adamw.op import IMPLEMENTATIONS, adamw_step_
from xscale_kernels.cases import Case, Example, Pick


def draw(pick: Pick) -> Example:
    """Tensors of any size, one of them empty, with and without decay and a scale of the gradients."""
    count, step = pick.integer(1, 4), pick.choice(1, 2, 1000)
    sizes = [pick.choice(0, 1, pick.integer(2, 70), 4097) for _ in range(count)]
    decay, scaled = pick.choice(0.0, 0.1), pick.choice(False, True)

    def run(*tensors: torch.Tensor, implementation: str | None = None) -> tuple[torch.Tensor, ...]:
        params, grads, means, squares = (
            [tensor.clone() for tensor in tensors[at:-1:4]] for at in range(4)
        )
        adamw_step_(
            params, grads, means, [tensor.abs_() for tensor in squares], step=step, lr=0.01, betas=(0.8, 0.9), eps=1e-3,
            weight_decay=decay, scale=tensors[-1][0] if scaled else None, implementation=implementation,
        )  # fmt: skip
        return (*params, *means, *squares)

    tensors = [pick.normal(size) for size in sizes for _ in range(4)]
    return Example(
        run=run,
        exact=lambda *tensors: run(*tensors, implementation="reference"),
        tensors=(*tensors, pick.normal(1).abs()),
        learns=False,
        slack=2.0,
    )


TESTS = ("test_adamw",)


def cases(device: str) -> Iterator[Case]:
    """The tensors of a small decoder; "eager" steps tensor by tensor."""
    dtypes = (torch.bfloat16, torch.float32) if device == "cuda" else (torch.float32,)
    D, depths = (2048, (2, 24)) if device == "cuda" else (256, (6,))
    yield from (_case(device, D, depth, dtype) for depth in depths for dtype in dtypes)


def _case(device: str, D: int, depth: int, dtype: torch.dtype) -> Case:
    shapes = [
        shape
        for _ in range(depth)
        for shape in ((D,), (3 * D, D), (D, D), (D,), (8 * D, D), (D, 4 * D))
    ]
    roles = [[torch.rand(shape, device=device) for shape in shapes] for _ in range(4)]
    roles[1] = [grad.to(dtype) for grad in roles[1]]
    scale = torch.tensor(0.5, device=device)
    step = partial(adamw_step_, *roles, step=10, lr=1e-6, weight_decay=0.1, scale=scale)
    names = {"eager": "reference"} | {
        entry.name: entry.name for entry in IMPLEMENTATIONS if entry.name != "reference"
    }
    ways = {way: partial(step, implementation=name) for way, name in names.items()}
    size = sum(tensor.numel() for tensor in roles[0])
    # Four are read and three are written.
    return Case(
        f"{len(shapes)} tensors, {size / 1e6:.1f}M, gradients {dtype}"[:70].replace("torch.", ""),
        ways,
        bytes=(6.0 * 4 + dtype.itemsize) * size,
    )
