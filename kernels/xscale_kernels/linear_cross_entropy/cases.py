"""Test examples and benchmark cases of linear_cross_entropy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from xscale_kernels.cases import Case, Example, ForwardBackward, Pick, forward_backward
from xscale_kernels.cross_entropy.cases import targets_of, terms_of
from xscale_kernels.linear_cross_entropy.op import (
    IMPLEMENTATIONS,
    linear_cross_entropy,
    reference_linear_cross_entropy,
)


def draw(pick: Pick) -> Example:
    """Per-token losses or their sum, in chunks that do not divide the tokens."""
    N, D, V, terms = pick.integer(0, 20), pick.integer(1, 24), pick.integer(1, 60), terms_of(pick)
    chunk = pick.integer(1, 9)
    reduction: Any = pick.choice("sum", "none")
    settings: dict[str, Any] = {
        "softcap": terms.softcap,
        "z_loss": terms.z_loss,
        "label_smoothing": terms.label_smoothing,
    }

    def run(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        *bias_and_targets: torch.Tensor,
        implementation: str | None = None,
    ) -> torch.Tensor:
        bias = bias_and_targets[0] if len(bias_and_targets) == 2 else None
        return linear_cross_entropy(
            hidden, weight, bias_and_targets[-1], bias=bias, reduction=reduction, chunk=chunk,
            implementation=implementation, **settings,
        )  # fmt: skip

    def exact(
        hidden: torch.Tensor, weight: torch.Tensor, *bias_and_targets: torch.Tensor
    ) -> torch.Tensor:
        bias = bias_and_targets[0] if len(bias_and_targets) == 2 else None
        losses = reference_linear_cross_entropy(hidden, weight, bias, bias_and_targets[-1], terms)
        return losses if reduction == "none" else losses.sum()

    hidden, weight, bias = pick.normal(N, D), pick.normal(V, D) * D**-0.5, pick.normal(V)
    return Example(
        run=run,
        exact=exact,
        tensors=pick.choice((hidden, weight), (hidden, weight, bias)),
        given=(targets_of(pick, N, V),),
        slack=6.0,
        products=True,
    )


TESTS = ("test_cross_entropy",)


def _plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


def cases(device: str) -> Iterator[Case]:
    """The output projection and loss of a model; "eager" makes all logits; "none" computes them twice."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    cuda = (8192, 32768, 2048), (8192, 131072, 4096)
    cpu = ((256, 512, 64), (2048, 8192, 256), (1024, 32768, 128), (1024, 131072, 64))
    for N, V, D in cuda if device == "cuda" else cpu:
        hidden = torch.randn(N, D, device=device, dtype=dtype, requires_grad=True)
        weight = (torch.randn(V, D, device=device, dtype=dtype) * 0.02).requires_grad_()
        targets = torch.randint(0, V, (N,), device=device)
        inputs = (hidden, weight, targets)
        ways = forward_backward(
            lambda h, w, t, implementation: linear_cross_entropy(
                h, w, t, implementation=implementation
            ),
            _plain,
            IMPLEMENTATIONS,
            inputs,
        )
        ways["none"] = ForwardBackward(
            lambda h, w, t: linear_cross_entropy(h, w, t, reduction="none"), inputs
        )
        for chunk in (512, 2048, 4096) if device == "cuda" else ():
            # Fewer tokens make smaller products, more take more memory.
            ways[f"chunk {chunk}"] = ForwardBackward(
                partial(linear_cross_entropy, chunk=chunk), inputs
            )
        yield Case(f"N={N} V={V} D={D} {dtype}", ways, flops=6.0 * N * V * D, at={"vocabulary": V})
