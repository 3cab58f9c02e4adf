"""Test examples without dropout, since implementations draw different masks, and benchmark cases."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from xscale_kernels.bias_dropout_residual.op import (
    IMPLEMENTATIONS,
    bias_dropout_residual,
    reference_bias_dropout_residual,
)
from xscale_kernels.cases import Case, Example, Pick, forward_backward


def draw(pick: Pick) -> Example:
    """Rows of any width, with and without a bias."""
    shape = pick.choice(
        (0, 3), (pick.integer(1, 9), pick.integer(1, 40)), (2, 3, pick.integer(1, 1100))
    )
    x, residual, bias = pick.normal(*shape), pick.normal(*shape), pick.normal(shape[-1])
    return Example(
        run=lambda x, r, b=None, implementation=None: bias_dropout_residual(
            x, r, b, implementation=implementation
        ),
        exact=lambda x, r, b=None: reference_bias_dropout_residual(x, r, b, 0.0),
        tensors=pick.choice((x, residual, bias), (x, residual)),
    )


TESTS = ("test_pointwise",)


def cases(device: str) -> Iterator[Case]:
    """The residual addition of one sublayer, with and without dropout."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    N, D = (16384, 4096) if device == "cuda" else (4096, 512)
    for p in (0.0, 0.1):
        x, residual = (
            torch.randn(N, D, device=device, dtype=dtype, requires_grad=True) for _ in range(2)
        )
        bias = torch.randn(D, device=device, dtype=dtype, requires_grad=True)
        ways = forward_backward(
            lambda x, r, b, implementation, p=p: bias_dropout_residual(
                x, r, b, p=p, implementation=implementation
            ),
            lambda x, r, b, p=p: reference_bias_dropout_residual(x, r, b, p),
            IMPLEMENTATIONS,
            (x, residual, bias),
        )
        moved = 3.0 if p == 0 else 5.0
        yield Case(
            f"p={p} {N} x {D} {dtype}",
            ways,
            bytes=moved * x.numel() * x.element_size(),
            at={"dropout": p},
        )
