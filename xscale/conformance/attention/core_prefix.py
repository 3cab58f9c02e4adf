"""Conformance of the trait `prefix` of cores: a prefix is read in both directions, the rest in order."""

from typing import Any

import torch
from torch import Tensor

from xscale.conformance.check import check
from xscale.conformance.small_parts import close, core, numbered, qkv, run
from xscale.core.registry import Entry

FIRST = 12
SECOND = 20
PREFIX = 8
"""Lengths of the two documents, and of the prefix of the second; the first has none."""


def in_prefix() -> Tensor:
    places = torch.arange(FIRST + SECOND)
    return ((places >= FIRST) & (places < FIRST + PREFIX)).expand(2, -1)


@check("core", lambda entry: entry.traits.prefix)
def a_core_reads_a_prefix_both_ways(entry: Entry[Any]) -> None:
    documents, both = numbered(FIRST, SECOND), slice(FIRST, FIRST + PREFIX)
    assert entry.traits.causal
    assert entry.traits.documents
    inputs, causal = qkv(FIRST + SECOND), core(entry)
    plain = run(causal, *inputs, query_documents=documents, key_documents=documents)
    out = run(
        causal, *inputs, query_documents=documents, key_documents=documents, key_prefix=in_prefix()
    )
    assert close(out[:, :, both], run(core(entry, causal=False), *[x[:, :, both] for x in inputs]))
    outside = ~in_prefix()[0]
    assert close(out[:, :, outside], plain[:, :, outside])
    assert not close(out, plain)
    assert close(
        run(causal, *inputs, key_prefix=torch.zeros(2, FIRST + SECOND).bool()), run(causal, *inputs)
    )
