"""Test examples and benchmark cases of layernorm."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from xscale_kernels.cases import Case, Example, Pick, forward_backward
from xscale_kernels.layernorm.op import IMPLEMENTATIONS, layernorm, reference_layernorm


def draw(pick: Pick) -> Example:
    """Rows of any width, sometimes no row, with weight and bias, with a weight, with neither."""
    # A row of one element has variance 0: its result is the bias, and rounding decides the sign of the gradient.
    lead, D = (
        pick.choice((0,), (1,), (pick.integer(2, 9),), (2, pick.integer(1, 5))),
        pick.integer(4, 70),
    )
    x, weight, bias = pick.normal(*lead, D), pick.normal(D), pick.normal(D)
    return Example(
        run=lambda x, w=None, b=None, implementation=None: layernorm(
            x, w, b, 1e-5, implementation=implementation
        ),
        exact=lambda x, w=None, b=None: reference_layernorm(x, w, b, 1e-5),
        tensors=pick.choice((x, weight, bias), (x, weight), (x,)),
    )


TESTS = ("test_norms",)


def cases(device: str) -> Iterator[Case]:
    """Rows of usual widths, in the precision that the device trains in."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    cuda, cpu = [(16384, D) for D in (2560, 4096, 5120, 8192)], [(4096, 512), (4096, 2048)]
    for N, D in cuda if device == "cuda" else cpu:
        x = torch.randn(N, D, device=device, dtype=dtype, requires_grad=True)
        w, b = (torch.randn(D, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
        ways = forward_backward(
            lambda x, w, b, implementation: layernorm(x, w, b, 1e-5, implementation=implementation),
            lambda x, w, b: reference_layernorm(x, w, b, 1e-5),
            IMPLEMENTATIONS,
            (x, w, b),
        )
        yield Case(
            f"{N} x {D} {dtype}", ways, bytes=5.0 * x.numel() * x.element_size(), at={"width": D}
        )
