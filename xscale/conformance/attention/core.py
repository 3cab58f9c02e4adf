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
    LENGTH,
    NOISE,
    close,
    core,
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
from xscale.nn.module import parameter_axes
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


@check("core", lambda entry: not entry.traits.random)
def gradients_fit_differences(entry: Entry[Any]) -> None:
    """Where no choice drawn at random makes steps."""
    for causal in modes(entry):
        part = core(entry, causal=causal)
        assert slope_fits(lambda q, k, v, part=part: run(part, q, k, v), qkv(groups=2))
