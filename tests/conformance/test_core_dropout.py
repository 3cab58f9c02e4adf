"""Cores that say they drop attention weights do, and the others are not asked to: no core is named here."""

from typing import Any

import pytest
import torch

from tests.conformance.made import LENGTH, core, qkv, run
from tests.families import each
from xscale.core.registry import Entry
from xscale.nn.attention.core import CORES
from xscale.nn.attention.ops.mask import AttentionMask


@each(CORES)
def test_weights_are_dropped_where_declared(entry: Entry[Any]) -> None:
    causal = entry.traits.causal
    part, inputs = core(entry, causal=causal), qkv()
    still = run(part, *inputs, dropout=0.5)
    assert torch.equal(still, run(part, *inputs)), "evaluation drops weights"
    part.train()
    # The same noise in both, where training has other noise too.
    whole, dropped = run(part, *inputs), run(part, *inputs, dropout=0.5)
    assert torch.equal(whole, dropped) != entry.traits.dropout


@each(entry for entry in CORES if entry.traits.dropout)
@pytest.mark.sampled(2)
def test_what_is_kept_makes_up_for_what_is_dropped(entry: Entry[Any]) -> None:
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
