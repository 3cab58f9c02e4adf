"""Mixers on large inputs in low precision: finite wherever float64 is, and as near to it as rounding allows.

The bounds are those of cores, and wider for gradients: decays are exponentials of differences of running sums, whose
rounding grows with the sum. A mixer that holds a core is tried with that of its example: cores have their own check.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xscale.conformance.attention.core_extremes import FEW, ROUNDING, SHARE, TIMES, off
from xscale.conformance.attention.mixer import Case, built, modes
from xscale.conformance.check import check
from xscale.conformance.small_parts import WIDTH, drawn, example, tokens
from xscale.core.registry import Entry
from xscale.nn.mixer.mixer import Mixer

GRADIENT_SHARE = {torch.float32: 2e-3, torch.bfloat16: 0.1}
"""Relative distance of gradients from those in float64."""
MANY = [
    (length, dtype, spread)
    for length in (24, 128)
    for dtype in (torch.float32, torch.bfloat16)
    for spread in (1.0, 3.0, 6.0, 10.0)
]
"""Length, dtype and standard deviation of the input."""


def results(part: Mixer, x: Tensor) -> list[Tensor]:
    """The output, and its gradient in a random direction, in float64."""
    leaf = x.detach().requires_grad_()
    torch.manual_seed(0)
    out = part(leaf, tokens(x.shape[1], batch=1))
    weights = drawn(*out.shape, seed=5).to(out.dtype)
    (gradient,) = torch.autograd.grad((out * weights).sum(), leaf)
    return [out.detach().double(), gradient.double()]


def holds(case: Case, length: int, dtype: torch.dtype, spread: float) -> None:
    for causal in modes(case):
        x = (drawn(1, length, WIDTH, seed=3) * spread).to(dtype)
        exact, part = (built(case, causal=causal) for _ in range(2))
        part = part.to(dtype)
        # Parameters are rounded once for both.
        for parameter, rounded in zip(exact.parameters(), part.parameters(), strict=True):
            parameter.data.copy_(rounded.data)
        wanted = results(exact, x.double())
        if not all(value.isfinite().all() for value in wanted):
            continue
        outcome = results(part, x)
        where = f"{length} tokens, {dtype}, spread {spread}, causal {causal}"
        assert all(value.isfinite().all() for value in outcome), f"not finite: {where}"
        changes = [0.0] * len(wanted)
        for seed in range(3):
            noise = 1 + ROUNDING[dtype] * drawn(*x.shape, seed=seed)
            again = off(results(exact, x.double() * noise), wanted)
            changes = [max(pair) for pair in zip(changes, again, strict=True)]
        shares = (SHARE[dtype], GRADIENT_SHARE[dtype])
        for error, share, change in zip(off(outcome, wanted), shares, changes, strict=True):
            assert error <= share + TIMES * change, f"{where}: {error}, {change}"


def own_example(entry: Entry[Any]) -> Iterator[tuple[str, Case]]:
    """The mixer with the config of its example."""
    yield entry.name, (entry, example(entry))


@check("mixer", subjects=own_example)
def large_inputs_are_near_float64(case: Case) -> None:
    for size in FEW:
        holds(case, *size)


@check("mixer", subjects=own_example)
def all_sizes_of_inputs_are_near_float64(case: Case) -> None:
    for size in MANY:
        holds(case, *size)
