"""Test examples of permute and unpermute, and benchmark cases of one followed by the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from xscale_kernels.cases import Case, Example, Pick, forward_backward
from xscale_kernels.permute.op import (
    IMPLEMENTATIONS,
    permute,
    reference_permute,
    reference_unpermute,
    unpermute,
)


def draw(pick: Pick) -> Example:
    """Tokens with no copy, one copy or several, with and without weights."""
    N, M, D = pick.integer(1, 9), pick.integer(0, 30), pick.integer(1, 70)

    def run(
        x: torch.Tensor,
        y: torch.Tensor,
        *weights_and_tokens: torch.Tensor,
        implementation: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = weights_and_tokens[0] if len(weights_and_tokens) == 2 else None
        return permute(x, weights_and_tokens[-1], implementation=implementation), unpermute(
            y, weights_and_tokens[-1], weights, N, implementation=implementation
        )

    def exact(
        x: torch.Tensor, y: torch.Tensor, *weights_and_tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = weights_and_tokens[0] if len(weights_and_tokens) == 2 else None
        return reference_permute(x, weights_and_tokens[-1]), reference_unpermute(
            y, weights_and_tokens[-1], weights, N
        )

    x, y, weights = pick.normal(N, D), pick.normal(M, D), pick.normal(M)
    return Example(
        run=run,
        exact=exact,
        tensors=pick.choice((x, y, weights), (x, y)),
        given=(pick.integers(N, M),),
        slack=2.0,
    )


TESTS = ("test_permute",)


def cases(device: str) -> Iterator[Case]:
    """Tokens to their experts and back, weighted."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    cuda, cpu = ((32768, 4096, 2), (32768, 2048, 8)), ((4096, 512, 2), (2048, 256, 8))
    for N, D, k in cuda if device == "cuda" else cpu:
        x = torch.randn(N, D, device=device, dtype=dtype, requires_grad=True)
        tokens = torch.arange(N).repeat(k)[torch.randperm(N * k)].to(device)
        weights = torch.rand(N * k, device=device, requires_grad=True)
        ways = forward_backward(
            lambda x, t, w, implementation: unpermute(
                permute(x, t, implementation=implementation),
                t,
                w,
                x.shape[0],
                implementation=implementation,
            ),
            lambda x, t, w: reference_unpermute(reference_permute(x, t), t, w, x.shape[0]),
            IMPLEMENTATIONS,
            (x, tokens, weights),
        )
        # Rows once in, k times out, k times in, once out; the backward reads the k copies twice and writes them once.
        yield Case(
            f"N={N} D={D} k={k} {dtype}",
            ways,
            bytes=(4.0 + 6 * k) * x.numel() * x.element_size(),
            at={"choices": k},
        )
