"""Values of ones give ones, by cores whose weights sum to 1: at all lengths, also where blocks are not full."""

from typing import Any

import torch

from xscale.conformance.attention.core import modes
from xscale.conformance.check import check
from xscale.conformance.small_parts import core, qkv, run
from xscale.core.registry import Entry

LENGTHS = (*range(1, 10), 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 129, 190, 192)
"""Around the ends of blocks up to three of the largest."""
CROSS = ((1, 1), (3, 1), (5, 7), (7, 33), (33, 7), (20, 64), (20, 65), (64, 129))


@check("core")
def values_of_ones_give_ones_where_declared(entry: Entry[Any]) -> None:
    furthest = 0.0
    with torch.no_grad():
        for causal in modes(entry):
            part = core(entry, causal=causal, heads=2)
            for length in LENGTHS:
                q, k, v = (x[:1] for x in qkv(length, heads=2, groups=2))
                furthest = max(
                    furthest, float((run(part, q, k, torch.ones_like(v)) - 1).abs().max())
                )
        if entry.traits.cross:
            part = core(entry, causal=True, cross=True, heads=2)
            for queries, keys in CROSS:
                q, k, v = (x[:1] for x in qkv(queries, keys, heads=2, groups=2))
                out = run(part, q, k, torch.ones_like(v), causal=False)
                furthest = max(furthest, float((out - 1).abs().max()))
    assert (furthest < 1e-6) == entry.traits.normalised, (
        f"a value of 1 gives one that is off by {furthest}"
    )
