"""Conformance of attention cores that hand their scores to the next block. No core is named here."""

from typing import Any

import torch
from torch import Tensor

from xscale.conformance.attention.core import CUTS, DOCUMENTS, modes
from xscale.conformance.check import check
from xscale.conformance.small_parts import (
    HEADS,
    LENGTH,
    close,
    core,
    drawn,
    numbered,
    other_from,
    qkv,
    run,
)
from xscale.core.registry import Entry
from xscale.nn.attention.ops.mask import AttentionMask, ScoreEdge


def with_edge(
    part: Any, inputs: list[Tensor], previous: Tensor | None, **changes: Any
) -> tuple[Tensor, ScoreEdge]:
    """The output and the edge of a core in the second block, which gets the scores of the first."""
    edge = ScoreEdge(previous)
    return run(part, *inputs, score_edge=edge, **changes), edge


@check("core")
def scores_are_handed_on_where_declared(entry: Entry[Any]) -> None:
    for causal in modes(entry):
        part, inputs = core(entry, causal=causal, layer=1), qkv(groups=2)
        previous = drawn(2, HEADS, LENGTH, LENGTH, seed=3)
        full, edge = with_edge(part, inputs, previous)
        if not entry.traits.previous_scores:
            assert edge.scores is None
            assert close(full, run(part, *inputs)), (
                "scores of the previous block are read, and no trait says so"
            )
            continue
        scores = edge.scores
        assert scores is not None
        assert scores.shape == previous.shape
        assert not close(full, run(part, *inputs)), "the scores of the previous block are not read"
        flipped = with_edge(part, inputs, previous.flip(0))[1].scores
        assert flipped is not None
        assert not close(scores, flipped), "nor handed on"
        numbers = numbered(*DOCUMENTS)
        apart = (numbers[:, :, None] != numbers[:, None])[:, None]
        changes = {"query_documents": numbers, "key_documents": numbers}
        hidden = apart | (
            torch.ones(LENGTH, LENGTH).triu(1).bool() if causal else torch.zeros(()).bool()
        )
        packed, _ = with_edge(part, inputs, previous, **changes)
        other, _ = with_edge(part, inputs, previous + 5.0 * hidden, **changes)
        assert close(packed, other), "scores that the mask hides are seen"
        if not causal:
            continue
        for cut in CUTS[1:3]:
            later = other_from(previous, cut)
            changed, edge = with_edge(part, [other_from(x, cut) for x in inputs], later)
            assert close(changed[:, :, :cut], full[:, :, :cut]), (
                f"tokens before {cut} know later ones"
            )
            assert edge.scores is not None
            seen = torch.ones(LENGTH, LENGTH).tril().bool()[:cut]
            assert close(edge.scores[:, :, :cut][..., seen], scores[:, :, :cut][..., seen]), (
                "handed-on scores leak"
            )
            assert not close(changed[:, :, cut:], full[:, :, cut:])
        if entry.traits.decode:
            (q, k, v), cache = inputs, {}  # type: ignore[var-annotated]
            for first, last in ((0, 100), (100, 140)):
                edge, span = ScoreEdge(previous[:, :, first:last, :last]), slice(first, last)
                mask = AttentionMask(
                    last - first, last, True, offset=first, score_edge=edge, cache=cache
                )
                some = run(part, q[:, :, span], k[:, :, :last], v[:, :, :last], mask=mask)
                assert close(some, full[:, :, span]), (
                    "queries over a cache, with their rows of scores"
                )
