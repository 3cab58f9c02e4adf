"""Cores on large queries and keys in low precision: finite wherever float64 is, and as near to it as rounding allows.

The bound is a multiple of what float64 changes by when its inputs are rounded differently, so that it holds for cores
that choose keys too, whose choice a rounding may turn.
"""

from typing import Any

import torch
from torch import Tensor

from xscale.conformance.attention.core import modes
from xscale.conformance.check import check
from xscale.conformance.small_parts import core, drawn, qkv
from xscale.core.registry import Entry
from xscale.nn.attention.core import Core
from xscale.nn.attention.ops.mask import AttentionMask

TIMES = 30.0
"""How many times the change by rounding the inputs an output or a gradient may be off, beside SHARE of its length."""
SHARE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8}
FEW = [(64, torch.float32, 10.0), (64, torch.bfloat16, 6.0)]
MANY = [
    (length, dtype, spread)
    for length in (1, 64, 256)
    for dtype in (torch.float32, torch.bfloat16)
    for spread in (1.0, 3.0, 6.0, 10.0)
]
"""Length, dtype and standard deviation of queries and keys."""


def results(part: Core, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The output, and its gradients in a random direction, in float64."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.manual_seed(0)
    out = part(*leaves, AttentionMask(q.shape[2], k.shape[2], part.causal))
    weights = drawn(*out.shape, seed=5).to(out.dtype)
    gradients = torch.autograd.grad(
        (out * weights).sum(), leaves, allow_unused=True, materialize_grads=True
    )
    return [x.detach().double() for x in (out, *gradients)]


def off(outcome: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """Relative distances."""
    return [
        float((first - second).norm() / second.norm().clamp(min=1e-3))
        for first, second in zip(outcome, wanted, strict=True)
    ]


def holds(entry: Entry[Any], length: int, dtype: torch.dtype, spread: float) -> None:
    for causal in modes(entry):
        q, k, v = (x[:1] for x in qkv(length, heads=2, groups=2))
        q, k, v = (q * spread).to(dtype), (k * spread).to(dtype), v.to(dtype)
        exact = core(entry, causal=causal, heads=2, length=256)
        # Parameters are rounded once for both.
        part = core(entry, causal=causal, heads=2, length=256).to(dtype)
        for parameter, rounded in zip(exact.parameters(), part.parameters(), strict=True):
            parameter.data.copy_(rounded.data)
        wanted = results(exact, q.double(), k.double(), v.double())
        if not all(x.isfinite().all() for x in wanted):
            continue
        outcome = results(part, q, k, v)
        assert all(x.isfinite().all() for x in outcome), (
            f"not finite: {length} tokens, {dtype}, spread {spread}"
        )
        changes = [0.0] * len(wanted)
        for seed in range(3):
            noise = [1 + ROUNDING[dtype] * drawn(*x.shape, seed=seed) for x in (q, k, v)]
            rounded_otherwise = [
                x.double() * factor for x, factor in zip((q, k, v), noise, strict=True)
            ]
            changes = [
                max(pair)
                for pair in zip(
                    changes, off(results(exact, *rounded_otherwise), wanted), strict=True
                )
            ]
        for error, change in zip(off(outcome, wanted), changes, strict=True):
            assert error <= SHARE[dtype] + TIMES * change, (
                f"{length} tokens, {dtype}, spread {spread}: {error}, {change}"
            )


@check("core")
def large_scores_are_near_float64(entry: Entry[Any]) -> None:
    for case in FEW:
        holds(entry, *case)


@check("core")
def all_sizes_of_scores_are_near_float64(entry: Entry[Any]) -> None:
    for case in MANY:
        holds(entry, *case)
