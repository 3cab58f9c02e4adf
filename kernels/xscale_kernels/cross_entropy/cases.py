"""Test examples and benchmark cases of cross_entropy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from xscale_kernels.cases import Case, Example, ForwardBackward, Pick, forward_backward
from xscale_kernels.cross_entropy.op import (
    IMPLEMENTATIONS,
    LossTerms,
    cross_entropy,
    reference_cross_entropy,
)


def terms_of(pick: Pick) -> LossTerms:
    """Each term alone, all of them, or none."""
    return pick.choice(
        LossTerms(),
        LossTerms(softcap=3.0),
        LossTerms(z_loss=0.1),
        LossTerms(label_smoothing=0.2),
        LossTerms(-100, 3.0, 0.1, 0.2),
    )


def targets_of(pick: Pick, N: int, V: int) -> torch.Tensor:
    """Random targets [N], about a quarter of them ignored."""
    targets = pick.integers(V, N)
    return torch.where(pick.integers(4, N) == 0, -100, targets)


def draw(pick: Pick) -> Example:
    """Logits of small and large vocabularies."""
    N, V, terms = (
        pick.integer(0, 9),
        pick.choice(1, 2, pick.integer(3, 60), pick.integer(1000, 5000)),
        terms_of(pick),
    )
    settings: dict[str, Any] = {
        "softcap": terms.softcap,
        "z_loss": terms.z_loss,
        "label_smoothing": terms.label_smoothing,
    }
    return Example(
        run=lambda x, t, implementation=None: cross_entropy(
            x, t, implementation=implementation, **settings
        ),
        exact=lambda x, t: reference_cross_entropy(x, t, terms),
        tensors=(2 * pick.normal(N, V),),
        given=(targets_of(pick, N, V),),
        slack=4.0,
    )


TESTS = ("test_cross_entropy",)


def cases(device: str) -> Iterator[Case]:
    """Logits of usual vocabularies."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for N, V in (
        ((8192, 32768), (8192, 131072)) if device == "cuda" else ((2048, 8192), (512, 32768))
    ):
        logits = torch.randn(N, V, device=device, dtype=dtype, requires_grad=True)
        targets = torch.randint(0, V, (N,), device=device)
        ways = forward_backward(
            lambda x, t, implementation: cross_entropy(x, t, implementation=implementation),
            lambda x, t: reference_cross_entropy(x, t, LossTerms()),
            IMPLEMENTATIONS,
            (logits, targets),
        )
        ways["F"] = ForwardBackward(
            lambda x, t: F.cross_entropy(x.float(), t, reduction="none"), (logits, targets)
        )
        yield Case(
            f"N={N} V={V} {dtype}",
            ways,
            bytes=3.0 * logits.numel() * logits.element_size(),
            at={"vocabulary": V},
        )
