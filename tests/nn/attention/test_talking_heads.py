"""Talking-heads attention against the paper's equations, one score at a time, and its limits."""

import math

import pytest
import torch
from torch import Tensor

from tests.nn.attention.literal import HEADS, agree, build, inputs, masks
from xscale.nn.attention.core import Core
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.softmax import Softmax
from xscale.nn.attention.talking_heads import TalkingHeads
from xscale.nn.dims import Dims


def spoken(core: Core, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Tensor | None = None) -> Tensor:
    """Every score, softmax and output by itself: L[n, m, h] = sum_g J[n, m, g] P_l[g, h], and so on."""
    assert isinstance(core, TalkingHeads)
    batch, heads, queries, width = q.shape
    outs = []
    for b in range(batch):
        for t in range(queries):
            shown = [s for s in range(k.shape[2]) if seen[min(b, len(seen) - 1), 0, t, s]]
            logits = [[(q[b, g, t] @ k[b, g, s]) / math.sqrt(width) for s in shown] for g in range(heads)]
            weights = []
            for h in range(heads):
                mixed = [sum(core.logits[h, g] * logits[g][at] for g in range(heads)) for at in range(len(shown))]
                if bias is not None:
                    mixed = [score + bias[0, h, t, s] for score, s in zip(mixed, shown, strict=True)]
                terms = torch.stack([torch.exp(score) for score in mixed])
                weights.append(terms / terms.sum())
            for h in range(heads):
                spoken = sum(core.weights[h, g] * weights[g] for g in range(heads))
                outs.append(sum(spoken[at] * v[b, h, s] for at, s in enumerate(shown)))
    return torch.stack(outs).view(batch, queries, heads, -1).transpose(1, 2)


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_papers_attention(causal: bool) -> None:
    core = build(TalkingHeads.Config(), causal=causal)
    for mask in masks(14, causal=causal, documents=False):
        agree(core, mask, lambda *x: spoken(core, *x))
    documents = torch.tensor([[0] * 3 + [1] * 6, [0] * 5 + [1] * 4])
    agree(
        core,
        AttentionMask(9, 9, causal, query_documents=documents, key_documents=documents),
        lambda *x: spoken(core, *x),
    )


def test_a_bias_is_added_to_the_mixed_scores() -> None:
    core, bias = build(TalkingHeads.Config(), causal=True), torch.randn(1, HEADS, 9, 9, dtype=torch.float64)
    agree(core, AttentionMask(9, 9, True, bias=bias), lambda *x: spoken(core, *x, bias=bias))


def test_cross_attention_reads_the_other_sequence() -> None:
    agree(
        core := build(TalkingHeads.Config(), causal=True, cross=True),
        AttentionMask(5, 8, False),
        lambda *x: spoken(core, *x),
    )


@pytest.mark.parametrize("causal", [True, False])
def test_heads_that_do_not_mix_are_softmax_attention(causal: bool) -> None:
    core, plain = build(TalkingHeads.Config(), causal=causal), build(Softmax.Config(), causal=causal)
    with torch.no_grad():
        core.logits.copy_(torch.eye(HEADS))
        core.weights.copy_(torch.eye(HEADS))
    for mask in masks(40, causal=causal):
        q, k, v = inputs(mask.queries, mask.keys)
        torch.testing.assert_close(core(q, k, v, mask), plain(q, k, v, mask), rtol=1e-9, atol=1e-9)


def test_the_maps_keep_the_variance_at_the_start() -> None:
    dims = Dims(width=32, depth=2, vocabulary=11, length=16, causal=True)
    core = TalkingHeads(TalkingHeads.Config(), dims, 64, 8)
    assert {start.std for start in core.init.values()} == {1 / 8}
