"""Conformance of attention cores: each trait, held on every core that declares it. No core is named here."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from xscale.conformance.check import check, is_near
from xscale.conformance.small_parts import (
    HEAD_WIDTH,
    HEADS,
    LENGTH,
    NOISE,
    close,
    core,
    drawn,
    example,
    gradients_of,
    numbered,
    other_from,
    qkv,
    run,
    slope_fits,
)
from xscale.core.registry import Entry
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.ops.recurrence import Recurrence, advance_state
from xscale.nn.module import Module, parameter_axes
from xscale.nn.position.pairs import Pairs
from xscale.nn.position.position import Position, PositionTerms
from xscale.nn.tokens import Stats

CUTS = (1, 63, 64, 65, 190, LENGTH - 1)
"""Around the ends of blocks, and away from them."""
CROSS = ((37, 101), (130, 64), (1, 70))
"""Queries and keys of cross attention."""
DOCUMENTS = (70, 30, 200)


def modes(entry: Entry[Any]) -> list[bool]:
    """The settings of `causal` that the core declares."""
    outcome = [
        causal
        for causal, able in ((True, entry.traits.causal), (False, entry.traits.bidirectional))
        if able
    ]
    assert outcome, f"{entry.name} is neither causal nor bidirectional: nothing could use it"
    return outcome


@check("core", lambda entry: entry.traits.causal, at_start=True)
def the_future_does_not_leak(entry: Entry[Any]) -> None:
    for training in (False, True):
        hides_the_future(entry, training)


def hides_the_future(entry: Entry[Any], training: bool) -> None:
    """A leak shows by other tokens behind a cut and by gradients; in training with all noise on, the same draws each
    time."""
    part, inputs = core(entry, noise=training), qkv()
    dropout = NOISE["dropout"] if training and entry.traits.dropout else 0.0
    mask = AttentionMask(LENGTH, LENGTH, True, dropout=dropout, stats=Stats() if training else None)
    mode = "in training" if training else "in evaluation"
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = run(part, *leaves, mask=mask)
    full = output.detach()
    for cut in CUTS[::2] if training else CUTS:
        changed = run(part, *[other_from(x, cut) for x in inputs], mask=mask)
        assert close(changed[:, :, :cut], full[:, :, :cut]), (
            f"tokens before {cut} know those from it on, {mode}"
        )
        assert not close(changed[:, :, cut:], full[:, :, cut:]), (
            "the core does not look at its input"
        )
        loss = output[:, :, :cut].square().sum()
        for gradient in gradients_of(loss, leaves, retain_graph=True):
            assert not gradient[:, :, cut:].any(), f"gradients reach tokens from {cut} on, {mode}"


@check("core", lambda entry: entry.traits.bidirectional)
def it_looks_both_ways(entry: Entry[Any]) -> None:
    part, (q, k, v) = core(entry, causal=False), qkv()
    full = run(part, q, k, v)
    behind = run(part, q, other_from(k, LENGTH // 2), other_from(v, LENGTH // 2))
    assert not close(behind[:, :, : LENGTH // 2], full[:, :, : LENGTH // 2]), (
        "no token sees what comes after it"
    )
    before = run(part, q, *[other_from(x.flip(2), LENGTH // 2).flip(2) for x in (k, v)])
    assert not close(before[:, :, LENGTH // 2 :], full[:, :, LENGTH // 2 :]), (
        "no token sees what stands before it"
    )


@check("core")
def it_is_causal_or_bidirectional(entry: Entry[Any]) -> None:
    assert modes(entry)


@check(
    "core",
    lambda entry: entry.traits.cross,
    values={f"{counts[0]}-{counts[1]}": counts for counts in CROSS},
)
def queries_and_keys_may_differ_in_number(entry: Entry[Any], queries: int, keys: int) -> None:
    part, (q, k, v) = core(entry, causal=True, cross=True), qkv(queries, keys)
    full = run(part, q, k, v, causal=False)
    assert not close(
        run(part, q, other_from(k, keys - 1), other_from(v, keys - 1), causal=False), full
    )
    other = run(part, other_from(q, queries - 1), k, v, causal=False)
    assert not close(other, full)
    # In a decoder the queries are the tokens it writes, so one that knew of the others would know what comes.
    assert close(other[:, :, : queries - 1], full[:, :, : queries - 1]), (
        "a query's output depends on other queries"
    )


@check("core", lambda entry: entry.traits.per_head)
def slices_of_heads_make_the_whole(entry: Entry[Any]) -> None:
    for causal in modes(entry):
        full, (q, k, v) = core(entry, causal=causal), qkv(groups=2)
        halves = []
        for first in (0, 2):
            half = core(entry, causal=causal, heads=2)
            half.first_head = first
            axes = parameter_axes(full)
            for (name, local), (_, complete) in zip(
                half.named_parameters(), full.named_parameters(), strict=True
            ):
                cut: Tensor = complete.detach()
                for dim, axis in enumerate(axes[name]):
                    if axis in ("heads", "kv_heads"):
                        cut = cut.narrow(dim, first * cut.shape[dim] // 4, local.shape[dim])
                local.data.copy_(cut)
            group = slice(first // 2, first // 2 + 1)
            halves.append(run(half, q[:, first : first + 2], k[:, group], v[:, group]))
        assert close(torch.cat(halves, 1), run(full, q, k, v))


@check("core")
def a_key_head_serves_its_query_heads(entry: Entry[Any]) -> None:
    for causal in modes(entry):
        part, (q, k, v) = core(entry, causal=causal), qkv(groups=2)
        assert close(run(part, q, k, v), run(part, q, *[x.repeat_interleave(2, 1) for x in (k, v)]))


@check("core", at_start=True)
def sequences_of_a_batch_stay_apart(entry: Entry[Any]) -> None:
    for causal in modes(entry):
        part, inputs = core(entry, causal=causal), qkv()
        assert close(run(part, *inputs)[1:], run(part, *[x[1:] for x in inputs]))


def measured(entry: Entry[Any], length: int) -> tuple[float, float, float]:
    """Multiply-adds of a bidirectional forward (causal where there is no other): counted, told, and by the trait."""
    causal = not entry.traits.bidirectional
    part = core(entry, causal=causal, heads=2, length=512)
    q, k, v = [x[:1] for x in qkv(length, heads=2, groups=2)]
    # The counter does not see into fused attention.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run(part, q, k, v)
    value = v.detach().requires_grad_()
    out = run(part, q, k, value)
    seen = 0
    for at in range(0, length, 16):
        (gradient,) = torch.autograd.grad(out[0, :, at].sum(), value, retain_graph=True)
        seen += int(gradient[0].any(-1).sum())
    keys = seen / 2 / len(range(0, length, 16))
    names = {"T": length, "S": length, "K": HEAD_WIDTH, "H": 2, "w": keys, **dict(example(entry))}
    formula = 2 * eval(
        entry.traits.cost, {"min": min, "max": max, "ceil": math.ceil, "log": math.log, **names}
    )
    return counter.get_total_flops() / 2, part.multiply_adds(length, length, 2, HEAD_WIDTH), formula


@check("core", at_start=True)
def its_cost_is_what_it_says(entry: Entry[Any]) -> None:
    """At whole blocks: what is padded is not counted."""
    for length in (256, 512):
        counted, declared, formula = measured(entry, length)
        assert is_near(declared, counted, 0.1), (
            f"multiply_adds says {declared:g} for {length} tokens, and {counted:g} are counted"
        )
        assert is_near(formula, counted, 0.1), (
            f"the trait `cost` says {formula:g} for {length} tokens, and {counted:g} are counted"
        )


@check("core", lambda entry: entry.traits.documents, at_start=True)
def packed_documents_stay_apart(entry: Entry[Any]) -> None:
    numbers = numbered(*DOCUMENTS)
    starts = [0, DOCUMENTS[0], DOCUMENTS[0] + DOCUMENTS[1], LENGTH]
    for causal in modes(entry):
        part, inputs = core(entry, causal=causal), qkv()
        packed = run(part, *inputs, query_documents=numbers, key_documents=numbers)
        changed = run(
            part,
            *[other_from(x, starts[2]) for x in inputs],
            query_documents=numbers,
            key_documents=numbers,
        )
        assert close(changed[:, :, : starts[2]], packed[:, :, : starts[2]]), (
            "a document sees the one behind it"
        )
        flipped = [other_from(x.flip(2), LENGTH - starts[1]).flip(2) for x in inputs]
        changed = run(part, *flipped, query_documents=numbers, key_documents=numbers)
        assert close(changed[:, :, starts[1] :], packed[:, :, starts[1] :]), (
            "a document sees the one before it"
        )
        alone = [
            run(part, *[x[:, :, begin:end] for x in inputs]) for begin, end in pairwise(starts)
        ]
        same = close(torch.cat(alone, 2), packed)
        assert same != entry.traits.position_dependent, (
            "packed documents against documents apart: not what `position_dependent` says"
        )


@check(
    "core",
    lambda entry: entry.traits.documents and entry.traits.cross,
    values={"fewer keys": ((40, 90, 50),), "as many keys": ((30, 70, 200),)},
)
def documents_of_two_sequences_stay_apart(entry: Entry[Any], keys: tuple[int, ...]) -> None:
    """Cross attention over packed documents is that over each pair of documents by itself."""
    part, (q, k, v) = core(entry, causal=True, cross=True), qkv(LENGTH, sum(keys))
    packed = run(
        part,
        q,
        k,
        v,
        causal=False,
        query_documents=numbered(*DOCUMENTS),
        key_documents=numbered(*keys),
    )
    pieces = (
        torch.split(x, list(lengths), 2) for x, lengths in ((q, DOCUMENTS), (k, keys), (v, keys))
    )
    separate = [run(part, *piece, causal=False) for piece in zip(*pieces, strict=True)]
    assert close(torch.cat(separate, 2), packed)


def naive(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """Softmax attention, written out: what `exact` is measured against."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("bhtk,bhsk->bhts", q, k) / q.shape[-1] ** 0.5
    if mask.bias is not None:
        scores = scores + mask.bias
    if mask.position_terms is not None:
        scores = scores + mask.position_terms.scores(q, k)
    if mask.causal:
        positions = torch.arange(mask.queries)[:, None] + mask.offset
        scores = scores.masked_fill(torch.arange(mask.keys)[None, :] > positions, float("-inf"))
    if mask.query_documents is not None and mask.key_documents is not None:
        apart = mask.query_documents[:, :, None] != mask.key_documents[:, None, :]
        scores = scores.masked_fill(apart[:, None], float("-inf"))
    weights = scores.softmax(-1)
    o = torch.einsum("bhts,bhsk->bhtk", weights, v)
    return o if mask.position_terms is None else o + mask.position_terms.values(weights)


@check("core", lambda entry: entry.traits.exact)
def exact_is_softmax(entry: Entry[Any]) -> None:
    for causal in modes(entry):
        part, (q, k, v) = core(entry, causal=causal), qkv(groups=2)
        masks = [AttentionMask(LENGTH, LENGTH, causal)]
        if entry.traits.documents:
            numbers = numbered(*DOCUMENTS)
            masks.append(
                AttentionMask(
                    LENGTH, LENGTH, causal, query_documents=numbers, key_documents=numbers
                )
            )
        if entry.traits.bias:
            masks.append(
                AttentionMask(
                    LENGTH, LENGTH, causal, bias=torch.randn(1, 4, LENGTH, LENGTH, dtype=q.dtype)
                )
            )
        for mask in masks:
            assert close(run(part, q, k, v, mask=mask), naive(q, k, v, mask))


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


@check("core")
def registered_traits_are_those_of_the_example(entry: Entry[Any]) -> None:
    """A core that is made of others has the traits that follow from them; its registered ones are listed."""
    assert replace(entry.part.traits_of(entry.part.example()), cost="") == replace(
        entry.traits, cost=""
    )


@check("core")
def random_numbers_only_where_declared(entry: Entry[Any]) -> None:
    part, (q, k, v) = core(entry, causal=modes(entry)[0]), qkv()
    mask = AttentionMask(LENGTH, LENGTH, part.causal)
    torch.manual_seed(1)
    first = part(q, k, v, mask)
    torch.manual_seed(2)
    assert torch.equal(first, part(q, k, v, mask)) != entry.traits.random


@check("core", lambda entry: entry.traits.decode)
def one_query_at_a_time_gives_the_same(entry: Entry[Any]) -> None:
    part, (q, k, v) = core(entry), qkv(groups=2)
    full = run(part, q, k, v)
    spans = [(0, 1), (0, 100), (63, 64), (64, 65), (65, 66), (100, 107), (200, 300), (299, 300)]
    cache: dict[str, Tensor] | None = None
    if part.keeps_state:
        spans, cache = [(0, 1), (1, 63), (63, 64), (64, 65), (65, 66), (66, 299), (299, 300)], {}
    for first, last in spans:
        mask = AttentionMask(last - first, last, True, offset=first, cache=cache)
        some = run(part, q[:, :, first:last], k[:, :, :last], v[:, :, :last], mask=mask)
        assert close(some, full[:, :, first:last]), f"queries {first} to {last} over a cache"


@check("core")
def a_sequence_can_be_spread_as_declared(entry: Entry[Any]) -> None:
    for style in entry.traits.context:
        if style == "ulysses":
            assert entry.traits.per_head, "ulysses gives each rank some heads of the whole sequence"
        elif style == "ring":
            assert entry.traits.exact, "a ring adds up the softmax over each rank's keys"
        elif style == "halo":
            part = core(entry)
            assert part.block_layout(LENGTH, HEADS) is not None, (
                "a halo is fetched by the layout's blocks"
            )
            assert entry.traits.decode, (
                "a rank's queries stand behind the keys of the ranks before it"
            )
        elif style == "scan":
            _scans(entry)
        else:
            raise AssertionError(f"nothing here checks the context style '{style}'")


def _scans(entry: Entry[Any]) -> None:
    """A piece gives what it gives in the whole when the states before it are added up, or taken on, and given to it."""
    part, (q, k, v) = core(entry), qkv(groups=2)
    full, outs = run(part, q, k, v), []
    left: dict[int, list[Tensor]] = {}
    carried: list[Tensor] = []
    sizes = set()
    for first, last in [(0, 100), (100, 101), (101, 300)]:

        def before(state: Tensor) -> Tensor:
            # A core may carry states of several widths.
            states = left.setdefault(state.shape[-1], [])
            states.append(state)
            return sum(states[:-1], torch.zeros_like(state))

        def taken_on(recurrence: Recurrence) -> Tensor:
            matrix, ended = recurrence.transition()
            state = carried[-1] if carried else torch.zeros_like(ended)
            carried.append(advance_state(matrix, state) + ended)
            sizes.add(matrix[0, 0].numel() + ended[0, 0].numel())
            return state

        some, length = [x[:, :, first:last] for x in (q, k, v)], last - first
        outs.append(
            run(
                part,
                *some,
                mask=AttentionMask(
                    length, length, True, prior_state=before, carried_state=taken_on
                ),
            )
        )
    assert close(torch.cat(outs, 2), full)
    assert (sizes or {0}) == {part.transition_size}


@check("core", lambda entry: not entry.traits.random)
def gradients_fit_differences(entry: Entry[Any]) -> None:
    """Where no choice drawn at random makes steps."""
    for causal in modes(entry):
        part = core(entry, causal=causal)
        assert slope_fits(lambda q, k, v, part=part: run(part, q, k, v), qkv(groups=2))
