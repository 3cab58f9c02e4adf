"""Test examples and benchmark cases of gated_activation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from xscale_kernels.cases import Case, Example, Pick, forward_backward
from xscale_kernels.gated_activation.op import (
    IMPLEMENTATIONS,
    KINDS,
    gated_activation,
    reference_gated_activation,
)


def draw(pick: Pick) -> Example:
    """Every kind, rows of any width."""
    kind = pick.choice(*KINDS)
    shape = pick.choice(
        (0, 3), (pick.integer(1, 9), pick.integer(1, 40)), (2, 3, pick.integer(1, 1100))
    )
    return Example(
        run=lambda gate, up, implementation=None: gated_activation(
            gate, up, kind, implementation=implementation
        ),
        exact=lambda gate, up: reference_gated_activation(gate, up, kind),
        tensors=(2 * pick.normal(*shape), pick.normal(*shape)),
        slack=2.0,
    )


TESTS = ("test_pointwise",)


def cases(device: str) -> Iterator[Case]:
    """The hidden layer of one feed-forward."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    N, F = (16384, 11008) if device == "cuda" else (4096, 1376)
    for kind in ("swiglu", "geglu"):
        gate, up = (
            torch.randn(N, F, device=device, dtype=dtype, requires_grad=True) for _ in range(2)
        )
        ways = forward_backward(
            lambda g, u, implementation, kind=kind: gated_activation(
                g, u, kind, implementation=implementation
            ),
            lambda g, u, kind=kind: reference_gated_activation(g, u, kind),
            IMPLEMENTATIONS,
            (gate, up),
        )
        # Forward reads two and writes one; backward reads three and writes two.
        yield Case(
            f"{kind} {N} x {F} {dtype}", ways, bytes=8.0 * gate.numel() * gate.element_size()
        )
