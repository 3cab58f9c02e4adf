"""Cores that promise what they do not keep: the check of each trait must catch the one that breaks it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from xscale.conformance.attention import core as suite
from xscale.conformance.attention import core_added_terms as terms_suite
from xscale.conformance.attention import core_context as context_suite
from xscale.conformance.attention import core_ones as ones_suite
from xscale.conformance.attention import core_scores as scores_suite
from xscale.conformance.check import Check
from xscale.core.registry import Entry, Family
from xscale.nn.attention.core import Core, CoreTraits
from xscale.nn.attention.ops.mask import AttentionMask

HONEST = CoreTraits(
    causal=True,
    bidirectional=True,
    cross=True,
    per_head=True,
    cost="2*T*S*K",
    context=("ring", "ulysses"),
    bias=True,
    position_terms=True,
    documents=True,
    exact=True,
    decode=True,
)


class Written(Core):
    """Softmax attention as the suite itself writes it: every check must let it through."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return suite.naive(q, k, v, mask)

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        return 2.0 * heads * queries * keys * head_width


class Leaky(Written):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q, k, v, replace(mask, offset=mask.offset + 1))


class LeakyInTraining(Written):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q, k, v, replace(mask, offset=mask.offset + self.training))


class LeakyGradient(Written):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return (
            super().forward(q, k, v, mask) + 0 * (v.square().sum() - v.square().sum().detach()) + (v - v.detach()).sum()
        )


class OneWay(Written):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q, k, v, replace(mask, causal=True))


class ShortSighted(Written):
    """Looks at the first T keys only."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        few = min(mask.keys, max(mask.queries, 32))
        return super().forward(q, k[:, :, :few], v[:, :, :few], replace(mask, keys=few))


class TalkingHeads(Written):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        out = super().forward(q, k, v, mask)
        return out + out.mean(1, keepdim=True)


class MixedGroups(Written):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        times = q.shape[1] // k.shape[1]
        return super().forward(q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1), mask)


class MixedBatch(Written):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q, k, v - v.mean(0, keepdim=True), mask)


class Boastful(Written):
    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        return 1.0 * heads * queries * keys * head_width


class Merged(Written):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q, k, v, replace(mask, query_documents=None, key_documents=None))


class Rough(Written):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q * 1.001, k, v, mask)


class Deaf(Written):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q, k, v, replace(mask, bias=None))


class DeafToTerms(Written):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q, k, v, replace(mask, position_terms=None))


class DeafToValues(Written):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q, k, v, replace(mask, bias=mask.score_bias(q, k), position_terms=None))


class Backwards(Written):
    uses_relative_bias = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        if mask.relative_bias is not None:
            place = torch.arange(mask.keys)
            apart = place[:, None] - place[None]
            mask = replace(
                mask, bias=mask.relative_bias(apart.flatten()).unflatten(1, apart.shape)[None], relative_bias=None
            )
        return super().forward(q, k, v, mask)


class Dice(Written):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q + 1e-6 * torch.randn_like(q), k, v, mask)


class CountsQueries(Written):
    """Decoding one query is not what a whole sequence is."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q / mask.queries**0.1, k, v, mask)


class Detached(Written):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q, k.detach() + 0 * k, v, mask)


class Residual(Written):
    """Adds the scores of the previous block, and hands on the sum."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        edge = mask.score_edge
        if edge is None:
            return super().forward(q, k, v, mask)
        edge.scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[-1] ** 0.5
        if edge.previous is not None:
            edge.scores = edge.scores + edge.previous
        return super().forward(q, k, v, replace(mask, bias=edge.previous))


class KeepsScores(Written):
    """Reads the previous block's scores and hands on none."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q, k, v, replace(mask, bias=mask.score_edge and mask.score_edge.previous))


class ShiftedScores(Residual):
    """Reads each row of the next token's."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        if mask.score_edge is not None and mask.score_edge.previous is not None:
            mask.score_edge.previous = mask.score_edge.previous.roll(-1, 2)
        return super().forward(q, k, v, mask)


class Landmarks(Written):
    """Each query is moved by the mean of all."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q + q.mean(2, keepdim=True), k, v, mask)


def registered(part: type[Core], **changes: Any) -> Entry[Any]:
    """The part in a family of its own."""
    family: Family[CoreTraits] = Family("core", CoreTraits)
    name = part.__name__
    family.register(name, traits=replace(HONEST, **changes))(type(name, (part,), {"__doc__": part.__doc__}))
    return family.get(name)


CHECKS: list[Check] = [
    suite.the_future_does_not_leak,
    suite.it_looks_both_ways,
    suite.it_is_causal_or_bidirectional,
    suite.slices_of_heads_make_the_whole,
    suite.a_key_head_serves_its_query_heads,
    suite.sequences_of_a_batch_stay_apart,
    suite.its_cost_is_what_it_says,
    suite.packed_documents_stay_apart,
    suite.exact_is_softmax,
    terms_suite.a_bias_counts,
    terms_suite.terms_of_a_position_count,
    suite.random_numbers_only_where_declared,
    context_suite.one_query_at_a_time_gives_the_same,
    scores_suite.scores_are_handed_on_where_declared,
    context_suite.a_sequence_can_be_spread_as_declared,
    suite.gradients_fit_differences,
    ones_suite.values_of_ones_give_ones_where_declared,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_an_honest_core_passes(check: Check) -> None:
    check(registered(Written))


@pytest.mark.parametrize(
    ("part", "changes", "check"),
    [
        (Leaky, {}, suite.the_future_does_not_leak),
        (LeakyInTraining, {}, suite.the_future_does_not_leak),
        (LeakyGradient, {}, suite.the_future_does_not_leak),
        (OneWay, {}, suite.it_looks_both_ways),
        (Written, {"causal": False, "bidirectional": False}, suite.it_is_causal_or_bidirectional),
        (TalkingHeads, {}, suite.slices_of_heads_make_the_whole),
        (MixedGroups, {}, suite.a_key_head_serves_its_query_heads),
        (MixedBatch, {}, suite.sequences_of_a_batch_stay_apart),
        (Boastful, {}, suite.its_cost_is_what_it_says),
        (Written, {"cost": "T*K*K"}, suite.its_cost_is_what_it_says),
        (Merged, {}, suite.packed_documents_stay_apart),
        (Written, {"position_dependent": True}, suite.packed_documents_stay_apart),
        (Rough, {}, suite.exact_is_softmax),
        (Deaf, {}, terms_suite.a_bias_counts),
        (Backwards, {}, terms_suite.a_bias_counts),
        (DeafToTerms, {}, terms_suite.terms_of_a_position_count),
        (DeafToValues, {}, terms_suite.terms_of_a_position_count),
        (Written, {"normalised": False}, ones_suite.values_of_ones_give_ones_where_declared),
        (Dice, {}, suite.random_numbers_only_where_declared),
        (Written, {"random": True}, suite.random_numbers_only_where_declared),
        (CountsQueries, {}, context_suite.one_query_at_a_time_gives_the_same),
        (Residual, {}, scores_suite.scores_are_handed_on_where_declared),
        (Written, {"previous_scores": True}, scores_suite.scores_are_handed_on_where_declared),
        (KeepsScores, {"previous_scores": True}, scores_suite.scores_are_handed_on_where_declared),
        (ShiftedScores, {"previous_scores": True}, scores_suite.scores_are_handed_on_where_declared),
        (Written, {"per_head": False}, context_suite.a_sequence_can_be_spread_as_declared),
        (Written, {"exact": False}, context_suite.a_sequence_can_be_spread_as_declared),
        (Detached, {}, suite.gradients_fit_differences),
    ],
)
def test_a_cheat_is_caught(part: type[Core], changes: dict[str, Any], check: Check) -> None:
    with pytest.raises(AssertionError):
        check(registered(part, **changes))


def test_a_core_that_adds_the_previous_scores_passes() -> None:
    scores_suite.scores_are_handed_on_where_declared(registered(Residual, previous_scores=True))


def test_a_core_that_misses_keys_is_caught() -> None:
    with pytest.raises(AssertionError):
        suite.queries_and_keys_may_differ_in_number(registered(ShortSighted), 37, 101)
    suite.queries_and_keys_may_differ_in_number(registered(Written), 37, 101)
    with pytest.raises(AssertionError, match="other queries"):
        suite.queries_and_keys_may_differ_in_number(registered(Landmarks), 37, 101)


def test_a_style_that_nothing_checks_is_refused() -> None:
    with pytest.raises(AssertionError, match="nothing here checks the context style"):
        context_suite.a_sequence_can_be_spread_as_declared(registered(Written, context=("spiral",)))


def test_a_halo_without_blocks_is_caught() -> None:
    with pytest.raises(AssertionError, match="blocks"):
        context_suite.a_sequence_can_be_spread_as_declared(registered(Written, context=("halo",)))
