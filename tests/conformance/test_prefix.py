"""Conformance of the trait `prefix` of cores and mixers: a prefix is read in both directions, the rest in order."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import WIDTH, close, core, dims, drawn, numbered, qkv, ready, run
from tests.conformance.test_core_cheats import registered
from tests.families import each, example
from xscale.core.registry import Entry
from xscale.nn.attention.core import CORES
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.softmax import Softmax
from xscale.nn.mixer.mixer import MIXERS
from xscale.nn.tokens import Tokens

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


@each(entry for entry in MIXERS if entry.traits.prefix)
def test_a_mixer_reads_a_prefix_both_ways(entry: Entry[Any]) -> None:
    """With the default core: what a core does with the prefix is tried above."""
    config = example(entry)
    causal, other = (ready(entry.part(config, dims(causal=order))) for order in (True, False))
    x, ids = drawn(2, FIRST + SECOND, WIDTH), torch.zeros(2, FIRST + SECOND).long()
    tokens = Tokens.from_ids(ids, numbered(FIRST, SECOND), prefix=in_prefix())
    out, plain = causal(x, tokens), causal(x, replace(tokens, prefix=None))
    both, outside = slice(FIRST, FIRST + PREFIX), ~in_prefix()[0]
    assert close(out[:, both], other(x[:, both], Tokens.from_ids(ids[:, both])))
    assert close(out[:, outside], plain[:, outside])


class Forgets(Softmax):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q, k, v, replace(mask, key_prefix=None))


class SeesAll(Softmax):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q, k, v, replace(mask, causal=mask.causal and mask.key_prefix is None))


def test_cheats_are_caught() -> None:
    for cheat in (Forgets, SeesAll):
        with pytest.raises(AssertionError):
            a_core_reads_a_prefix_both_ways(registered(cheat, prefix=True))
