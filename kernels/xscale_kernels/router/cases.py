"""Test examples and benchmark cases of route."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from xscale_kernels.cases import Case, Example, Pick, forward_backward
from xscale_kernels.router.op import IMPLEMENTATIONS, reference_route, route


def draw(pick: Pick) -> Example:
    """Few and many experts, with and without a bias and a capacity; no two scores of a token are equal."""
    N, E = pick.choice(0, 1, pick.integer(2, 20)), pick.integer(1, 40)
    k, capacity = pick.integer(1, min(E, 5)), pick.choice(None, pick.integer(1, 4))
    score: Any = pick.choice("softmax", "sigmoid")
    order: Any = pick.choice("choice", "token")
    # Multiples of 1/4, exact in every precision, so that rounding changes no choice.
    logits = torch.stack(
        [torch.randperm(E, generator=pick.generator) for _ in range(N)] or [torch.zeros(0)]
    )
    logits = (logits.view(N, E).double() - E // 2) / 4
    biased = pick.choice(False, True)
    bias = torch.randperm(E, generator=pick.generator).double() * 1.75 + 3

    def run(
        x: torch.Tensor, *bias: torch.Tensor, implementation: str | None = None
    ) -> tuple[torch.Tensor, ...]:
        routed = route(
            x, k, score=score, bias=bias[0] if bias else None, capacity=capacity, order=order,
            implementation=implementation,
        )  # fmt: skip
        return tuple(tensor for tensor in routed if tensor is not None)

    return Example(
        run=run,
        exact=lambda x, *bias: run(x, *bias, implementation="reference"),
        tensors=(logits,),
        given=(bias,) if biased else (),
        slack=2.0,
    )


TESTS = ("test_router",)


def _flattened(scores: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return scores.sum(0).sum() + weights.square().sum()


def cases(device: str) -> Iterator[Case]:
    """Few and many experts; the scalar loss uses both scores and weights."""
    N = 65536 if device == "cuda" else 8192
    for E, k in ((8, 2), (64, 8), (256, 8)):
        logits = torch.randn(N, E, device=device, requires_grad=True)
        ways = forward_backward(
            lambda x, implementation, k=k: _flattened(
                *route(x, k, implementation=implementation)[:2]
            ),
            lambda x, k=k: _flattened(*reference_route(x, k, None, "softmax")[:2]),
            IMPLEMENTATIONS,
            (logits,),
        )
        yield Case(f"N={N} E={E} k={k}", ways, bytes=5.0 * logits.numel() * 4, at={"experts": E})
