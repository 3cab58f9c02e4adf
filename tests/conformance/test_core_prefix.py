"""Conformance of the trait `prefix` of cores: a prefix is read in both directions, the rest in order."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import close, core, numbered, qkv, run
from tests.conformance.test_core_cheats import Written, registered
from tests.families import each
from xscale.core.registry import Entry
from xscale.nn.attention.core import CORES
from xscale.nn.attention.ops.mask import AttentionMask

FIRST, SECOND, PREFIX = 12, 20, 8
"""Lengths of the two documents, and of the prefix of the second; the first has none."""


def in_prefix() -> Tensor:
    places = torch.arange(FIRST + SECOND)
    return ((places >= FIRST) & (places < FIRST + PREFIX)).expand(2, -1)


@each(entry for entry in CORES if entry.traits.prefix)
def test_a_core_reads_a_prefix_both_ways(entry: Entry[Any]) -> None:
    a_core_reads_a_prefix_both_ways(entry)


def a_core_reads_a_prefix_both_ways(entry: Entry[Any]) -> None:
    documents, both = numbered(FIRST, SECOND), slice(FIRST, FIRST + PREFIX)
    assert entry.traits.causal
    assert entry.traits.documents
    inputs, causal = qkv(FIRST + SECOND), core(entry)
    plain = run(causal, *inputs, query_documents=documents, key_documents=documents)
    out = run(causal, *inputs, query_documents=documents, key_documents=documents, key_prefix=in_prefix())
    assert close(out[:, :, both], run(core(entry, causal=False), *[x[:, :, both] for x in inputs]))
    outside = ~in_prefix()[0]
    assert close(out[:, :, outside], plain[:, :, outside])
    assert not close(out, plain)
    assert close(run(causal, *inputs, key_prefix=torch.zeros(2, FIRST + SECOND).bool()), run(causal, *inputs))


class Reads(Written):
    """Hides by a bias what the mask does not allow."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        if mask.allowed is None:
            return super().forward(q, k, v, mask)
        hidden = torch.zeros(mask.allowed.shape, dtype=q.dtype).masked_fill(~mask.allowed, float("-inf"))
        return super().forward(q, k, v, AttentionMask(mask.queries, mask.keys, False, bias=hidden))


class Forgets(Reads):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q, k, v, replace(mask, key_prefix=None))


class SeesAll(Reads):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q, k, v, replace(mask, causal=mask.causal and mask.key_prefix is None))


def test_cheats_are_caught() -> None:
    a_core_reads_a_prefix_both_ways(registered(Reads, prefix=True))
    for cheat in (Forgets, SeesAll):
        with pytest.raises(AssertionError):
            a_core_reads_a_prefix_both_ways(registered(cheat, prefix=True))
