"""Conformance of what attention cores add to their scores: biases, and terms of a position. No core is named here."""

from typing import Any

import torch
from torch import Tensor

from xscale.conformance.attention.core import modes
from xscale.conformance.check import check
from xscale.conformance.small_parts import (
    HEAD_WIDTH,
    LENGTH,
    close,
    core,
    drawn,
    qkv,
    run,
)
from xscale.core.registry import Entry
from xscale.nn.module import Module
from xscale.nn.position.pairs import Pairs
from xscale.nn.position.position import Position, PositionTerms


@check("core", lambda entry: entry.traits.bias)
def a_bias_counts(entry: Entry[Any]) -> None:
    for causal in modes(entry):
        part, (q, k, v) = core(entry, causal=causal), qkv()
        full = run(part, q, k, v)
        nothing = torch.zeros(1, 4, LENGTH, LENGTH, dtype=q.dtype)
        assert close(run(part, q, k, v, bias=nothing), full)
        against = nothing.clone()
        # Where heads mix, the others would show what one of them is told not to look at.
        against[:, 1 if entry.traits.per_head else slice(None), :, 7] = -1e4
        biased = run(part, q, k, v, bias=against)
        # A query with no other key in sight has to look at what it is told not to, whatever the bias.
        late = slice(80, None)
        apart = v.clone()
        apart[:, :, 7] += 1
        assert close(run(part, q, k, apart, bias=against)[:, 1, late], biased[:, 1, late]), (
            "key 7 is still seen"
        )
        assert close(biased[:, 0], full[:, 0]) == entry.traits.per_head, (
            "another head's bias is heard"
        )
        assert not close(biased[:, 1], full[:, 1]), "the bias is not heard"
        if part.uses_relative_bias:
            positions, line = torch.arange(LENGTH), drawn(4, 2 * LENGTH - 1)
            wanted = run(
                part, q, k, v, bias=line[None, :, positions[None] - positions[:, None] + LENGTH - 1]
            )
            # Places behind the sequence fill up blocks.
            outcome = run(
                part,
                q,
                k,
                v,
                relative_bias=lambda after, line=line: line[
                    :, (after + LENGTH - 1) % line.shape[1]
                ],
            )
            assert close(outcome, wanted), "a bias by distance is another one than score by score"


class EveryTerm(Position):
    """Adds q_i k_j for the first channel alone, and to the output the weights of the first channels' keys."""

    adds_scores = True
    adds_values = True

    def __init__(self) -> None:
        Module.__init__(self)

    def scores(self, q: Tensor, k: Tensor, pairs: Pairs) -> Tensor:
        return pairs.select_heads(torch.tensor([1.0, 2.0, -1.0, 0.5], dtype=q.dtype))[
            :, None, None
        ] * (q[..., :1] @ k.repeat_interleave(q.shape[1] // k.shape[1], 1)[..., :1].mT)

    def values(self, weights: Tensor, pairs: Pairs) -> Tensor:
        return weights[..., :HEAD_WIDTH] * 3


@check("core", lambda entry: entry.traits.position_terms)
def terms_of_a_position_count(entry: Entry[Any]) -> None:
    for causal in modes(entry):
        part, (q, k, v) = core(entry, causal=causal), qkv(groups=2)
        terms = PositionTerms(EveryTerm(), Pairs(LENGTH, LENGTH, causal=causal))
        biased = run(part, q, k, v, bias=terms.scores(q, k))
        assert not close(biased, run(part, q, k, v)), "the terms show"
        # With the first tokens' rows of the identity as values, the output has their attention weights, beside what a
        # core adds that has values of its own.
        unit, none = torch.zeros_like(v), torch.zeros_like(v)
        unit[:, :, range(HEAD_WIDTH), range(HEAD_WIDTH)] = 1
        weights = run(part, q, k, unit, bias=terms.scores(q, k)) - run(
            part, q, k, none, bias=terms.scores(q, k)
        )
        assert close(run(part, q, k, v, position_terms=terms), biased + 3 * weights)
        first = torch.zeros_like(terms.scores(q, k))
        first[:, 0, :, 0] = 1.5
        both = run(part, q, k, v, bias=terms.scores(q, k) + first)
        weights = run(part, q, k, unit, bias=terms.scores(q, k) + first)
        weights -= run(part, q, k, none, bias=terms.scores(q, k) + first)
        assert close(run(part, q, k, v, position_terms=terms, bias=first), both + 3 * weights), (
            "a bias is forgotten"
        )
