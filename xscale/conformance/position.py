"""Conformance of position parts: each acts where it says, and relative ones see differences only."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from xscale.conformance.check import check
from xscale.conformance.small_parts import (
    HEAD_WIDTH,
    HEADS,
    WIDTH,
    close,
    dims,
    drawn,
    fitting,
    ready,
    tokens,
)
from xscale.core.registry import Entry
from xscale.nn.position.pairs import Pairs
from xscale.nn.position.position import Position
from xscale.nn.tokens import SharedValues, Tokens

LENGTH = 24
SHIFT = 1000


def built(entry: Entry[Any], **changes: Any) -> Position:
    # Terms of the scores are asked of all pairs of queries and keys, as in a bidirectional model.
    around = dims(**{"length": LENGTH, "causal": entry.traits.where != "scores", **changes})
    part: Position = ready(entry.part(fitting(entry, around), around, HEADS, HEAD_WIDTH))
    return part


def scores(part: Position, around: Tokens) -> Tensor:
    """Everything the part does to the scores of one layer, [2, H, T, T]."""
    q, k = (drawn(2, HEADS, LENGTH, HEAD_WIDTH, seed=seed) for seed in (0, 1))
    bias = part.bias(around.positions, around.positions)
    outcome = part.rotate(q, around) @ part.rotate(k, around).transpose(-1, -2)
    if part.adds_scores:
        outcome = outcome + at_places(part, q, k, around.positions)
    return outcome if bias is None else outcome + bias


def at_places(part: Position, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    """Terms of the scores of queries and keys at these places of a longer sequence, with nothing between them."""
    length = int(positions.max()) + 1
    rows = positions[:, None, :, None].expand_as(q)
    queries, keys = (
        q.new_zeros(*q.shape[:2], length, q.shape[3]).scatter(2, rows, x) for x in (q, k)
    )
    terms = part.scores(queries, keys, every_pair(length))
    batch = torch.arange(len(q))[:, None, None]
    return terms.movedim(1, 3)[batch, positions[:, :, None], positions[:, None]].movedim(3, 1)


def every_pair(length: int, **changes: Any) -> Pairs:
    """All queries and keys, with projections of embeddings."""
    queries, keys = (drawn(HEADS, WIDTH, HEAD_WIDTH, seed=seed) for seed in (7, 8))
    return Pairs(length, length, project=lambda x: (x @ queries, x @ keys), **changes)


def acts(part: Position, around: Tokens) -> set[str]:
    """Where the part changes anything."""
    x, q = drawn(2, LENGTH, WIDTH), drawn(2, HEADS, LENGTH, HEAD_WIDTH)
    outcome = set()
    if not close(part.embed(x, around), x):
        outcome.add("input")
    if not close(part.rotate(q, around), q):
        outcome.add("qk")
    if part.bias(around.positions, around.positions) is not None:
        outcome.add("bias")
    if part.adds_scores:
        k = drawn(2, HEADS, LENGTH, HEAD_WIDTH, seed=1)
        terms = part.scores(q, k, every_pair(LENGTH))
        assert terms.shape == (2, HEADS, LENGTH, LENGTH)
        assert not close(part.scores(2 * q, k, every_pair(LENGTH)), terms), "it reads no query"
        outcome.add("scores")
    return outcome or {"none"}


@check("position", at_start=True)
def it_acts_where_it_says(entry: Entry[Any]) -> None:
    part, around = built(entry), tokens(LENGTH)
    assert acts(part, around) == {entry.traits.where}
    assert part.adds_bias == (entry.traits.where == "bias")
    assert part.adds_scores == (entry.traits.where == "scores")
    assert part.embed(drawn(2, LENGTH, WIDTH), around).shape == (2, LENGTH, WIDTH)
    bias = part.bias(around.positions, around.positions)
    assert (
        bias is None
        or bias.expand(2, HEADS, LENGTH, LENGTH).shape == bias.expand(2, -1, -1, -1).shape
    )


@check("position")
def relative_sees_differences_only(entry: Entry[Any]) -> None:
    part, around = built(entry, length=LENGTH + SHIFT), tokens(LENGTH)
    moved = replace(around, positions=around.positions + SHIFT, shared_values=SharedValues())
    x = drawn(2, LENGTH, WIDTH)
    same = torch.allclose(scores(part, moved), scores(part, around), rtol=1e-6, atol=1e-6)
    assert (same and close(part.embed(x, moved), part.embed(x, around))) == entry.traits.relative


@check("position", lambda entry: entry.traits.where != "none")
def the_order_is_known(entry: Entry[Any]) -> None:
    """Other positions, another result."""
    part, around = built(entry), tokens(LENGTH)
    turned = replace(around, positions=around.positions.flip(1), shared_values=SharedValues())
    x = drawn(2, LENGTH, WIDTH)
    same = close(scores(part, turned), scores(part, around)) and close(
        part.embed(x, turned), part.embed(x, around)
    )
    assert not same or mirrored(part, around)


def mirrored(part: Position, around: Tokens) -> bool:
    """A part of distances only cannot tell a sequence from its mirror image; it must tell it from a shuffled one."""
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    shuffled = replace(around, positions=around.positions[:, order], shared_values=SharedValues())
    return not close(scores(part, shuffled), scores(part, around))


@check("position")
def explicit_positions_are_the_default_ones(entry: Entry[Any]) -> None:
    part, around = built(entry), tokens(LENGTH)
    explicit = Tokens(ids=around.ids, positions=torch.arange(LENGTH).repeat(2, 1))
    x = drawn(2, LENGTH, WIDTH)
    assert close(scores(part, explicit), scores(part, around))
    assert close(part.embed(x, explicit), part.embed(x, around))
    alone = replace(
        explicit,
        positions=explicit.positions[:, 5:6],
        ids=explicit.ids[:, 5:6],
        shared_values=SharedValues(),
    )
    assert close(part.embed(x[:, 5:6], alone), part.embed(x, around)[:, 5:6])


@check("position")
def it_goes_on_where_declared(entry: Entry[Any]) -> None:
    """At positions behind the longest trained one."""
    part, around = built(entry), tokens(LENGTH)
    far = replace(around, positions=around.positions + 10 * LENGTH, shared_values=SharedValues())
    try:
        outcome = (scores(part, far), part.embed(drawn(2, LENGTH, WIDTH), far))
    except IndexError:
        assert not entry.traits.extrapolates
        return
    assert entry.traits.extrapolates
    assert all(first.isfinite().all() for first in outcome)


@check("position", lambda entry: entry.traits.where == "scores")
def its_terms_are_the_same_for_some_queries_and_heads(entry: Entry[Any]) -> None:
    """Those of the last queries alone, of some heads alone, and without later keys, as decoding and parallelism ask."""
    part, few = built(entry), torch.tensor([3, 1])
    q, k = drawn(2, HEADS, LENGTH, HEAD_WIDTH), drawn(2, HEADS, LENGTH, HEAD_WIDTH, seed=1)
    weights = drawn(2, HEADS, LENGTH, LENGTH, seed=2).tril()
    every = every_pair(LENGTH, query_factor=0.7)
    full = part.scores(q, k, every)
    causal = replace(every, causal=True)
    assert close(part.scores(q, k, causal).tril(), full.tril())
    assert close(part.scores(q[:, few], k[:, few], replace(every, heads=few)), full[:, few])
    for pairs in (every, causal):
        last = part.scores(
            q[:, :, 20:21], k[:, :, :21], replace(pairs, queries=1, keys=21, offset=20)
        )
        assert close(last[:, :, 0], full[:, :, 20, :21])
    if part.adds_values:
        values = part.values(weights, every)
        assert close(part.values(weights, causal), values)
        assert close(part.values(weights[:, few], replace(every, heads=few)), values[:, few])
        some = part.values(weights[:, :, 20:], replace(every, queries=LENGTH - 20, offset=20))
        assert close(some, values[:, :, 20:])


@check("position")
def its_cost_is_a_formula(entry: Entry[Any]) -> None:
    sizes = {"T": 10, "S": 10, "H": 2, "K": 4, "D": 8}
    twice = {**sizes, "T": 20, "S": 20}
    first, second = eval(entry.traits.cost, dict(sizes)), eval(entry.traits.cost, twice)
    assert 0 <= first <= second <= 4 * first
    assert (first > 0) == (entry.traits.where != "none" and entry.traits.cost != "0")
