"""Cores that say they drop attention weights do, and the others are not asked to: no core is named here."""

from typing import Any

import torch

from xscale.conformance.check import check
from xscale.conformance.small_parts import LENGTH, core, qkv, run
from xscale.core.registry import Entry
from xscale.nn.attention.ops.mask import AttentionMask


@check("core")
def weights_are_dropped_where_declared(entry: Entry[Any]) -> None:
    causal = entry.traits.causal
    part, inputs = core(entry, causal=causal), qkv()
    still = run(part, *inputs, dropout=0.5)
    assert torch.equal(still, run(part, *inputs)), "evaluation drops weights"
    part.train()
    # The same noise in both, where training has other noise too.
    full, dropped = run(part, *inputs), run(part, *inputs, dropout=0.5)
    assert torch.equal(full, dropped) != entry.traits.dropout


@check("core", lambda entry: entry.traits.dropout)
def what_is_kept_makes_up_for_what_is_dropped(entry: Entry[Any]) -> None:
    causal = entry.traits.causal
    part, inputs = core(entry, causal=causal), qkv()
    part.train()
    gaps = []
    for seed in range(16):
        # Each pair begins with the same noise, where training has noise beside the dropout.
        pair = []
        for dropout in (0.3, 0.0):
            torch.manual_seed(seed)
            with torch.no_grad():
                pair.append(part(*inputs, AttentionMask(LENGTH, LENGTH, causal, dropout=dropout)))
        gaps.append(pair[0] - pair[1])
    assert torch.stack(gaps).mean(0).norm() < 0.5 * gaps[0].norm()
