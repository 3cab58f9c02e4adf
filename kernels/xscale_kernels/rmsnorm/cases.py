"""Test examples and benchmark cases of rmsnorm."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from xscale_kernels.cases import Case, Example, Pick, forward_backward
from xscale_kernels.rmsnorm.op import IMPLEMENTATIONS, reference_rmsnorm, rmsnorm


def draw(pick: Pick) -> Example:
    """Rows of any width, sometimes no row, with and without a weight."""
    lead, D = (
        pick.choice((0,), (1,), (pick.integer(2, 9),), (2, pick.integer(1, 5))),
        pick.integer(1, 70),
    )
    x, weight = pick.normal(*lead, D), pick.normal(D)
    if D < 4:
        # The two terms of the gradient of so short a row may cancel: near 0, where they are large, rounding decides.
        x = x + x.sign()
    return Example(
        run=lambda x, w=None, implementation=None: rmsnorm(
            x, w, 1e-5, implementation=implementation
        ),
        exact=lambda x, w=None: reference_rmsnorm(x, w, 1e-5),
        tensors=pick.choice((x, weight), (x,)),
    )


TESTS = ("test_norms",)


def cases(device: str) -> Iterator[Case]:
    """Rows of usual widths, in the precision that the device trains in."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    cuda, cpu = (
        [(16384, D) for D in (2560, 4096, 5120, 8192)],
        [(256, 256), (4096, 512), (4096, 2048)],
    )
    for N, D in cuda if device == "cuda" else cpu:
        x = torch.randn(N, D, device=device, dtype=dtype, requires_grad=True)
        w = torch.ones(D, device=device, dtype=dtype, requires_grad=True)
        ways = forward_backward(
            lambda x, w, implementation: rmsnorm(x, w, 1e-6, implementation=implementation),
            lambda x, w: reference_rmsnorm(x, w, 1e-6),
            IMPLEMENTATIONS,
            (x, w),
        )
        # Forward reads and writes a row; backward reads two and writes one.
        yield Case(
            f"{N} x {D} {dtype}", ways, bytes=5.0 * x.numel() * x.element_size(), at={"width": D}
        )
