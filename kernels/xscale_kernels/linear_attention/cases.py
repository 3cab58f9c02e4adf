"""Test examples and benchmark cases of linear_attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from xscale_kernels.cases import Case, Example, ForwardBackward, Pick, forward_backward
from xscale_kernels.linear_attention.op import (
    IMPLEMENTATIONS,
    linear_attention,
    reference_linear_attention,
)


def draw(pick: Pick) -> Example:
    """With and without decay, initial state and documents; chunks that do not divide the length."""
    B, H, T = (
        pick.integer(1, 2),
        pick.integer(1, 3),
        pick.choice(1, pick.integer(2, 20), pick.integer(30, 40)),
    )
    K, M = pick.integer(1, 20), pick.integer(1, 20)
    gated, stated, packed = (pick.choice(False, True) for _ in range(3))

    def split(
        function: Callable[..., Any], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = tensors[:3]
        # A list: torch.compile of torch 2.11 takes what a star collects for a tuple.
        optional_inputs = list(tensors[3:])
        outputs: tuple[torch.Tensor, torch.Tensor] = function(
            q, k, v,
            # A log decay is at most 0.
            log_decay=-optional_inputs.pop(0).abs() if gated else None,
            state=optional_inputs.pop(0) if stated else None,
            documents=optional_inputs.pop(0) if packed else None,
        )  # fmt: skip
        return outputs

    def run(
        *tensors: torch.Tensor, implementation: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return split(
            lambda *a, **b: linear_attention(*a, **b, chunk=16, implementation=implementation),
            *tensors,
        )

    tensors = [pick.normal(B, H, T, K), pick.normal(B, H, T, K), pick.normal(B, H, T, M)]
    tensors += [pick.normal(B, H, T)] if gated else []
    tensors += [pick.normal(B, H, K, M)] if stated else []
    return Example(
        run=run,
        exact=lambda *tensors: split(reference_linear_attention, *tensors),
        tensors=tuple(tensors),
        given=(pick.integers(3, B, T).sort(1).values,) if packed else (),
        slack=20.0,
        products=True,
    )


TESTS = ("test_linear_attention",)


SAYS = dict.fromkeys(
    ("eager", "sdpa"), "torch's fused causal softmax attention, which linear attention replaces"
)


def _softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def cases(device: str) -> Iterator[Case]:
    """Growing lengths, against causal softmax attention ("eager" and "sdpa" are torch's fused one)."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    B, H, K = (4, 32, 64) if device == "cuda" else (1, 4, 64)
    for T in (4096, 16384, 65536) if device == "cuda" else (512, 2048, 4096):
        qkv = tuple(
            torch.randn(B, H, T, K, device=device, dtype=dtype, requires_grad=True)
            for _ in range(3)
        )
        ways = forward_backward(
            lambda q, k, v, implementation: linear_attention(
                q, k, v, implementation=implementation
            )[0],
            _softmax,
            IMPLEMENTATIONS,
            qkv,
        )
        ways["sdpa"] = ForwardBackward(_softmax, qkv)
        # One scan forward and three for the gradients, each of 4 K^2 plus the products inside chunks.
        flops = 4.0 * B * H * T * (4 * K * K + 4 * 64 * K)
        yield Case(
            f"B={B} H={H} T={T} K={K} {dtype}", ways, flops=flops, at={"length": T}, says=SAYS
        )
