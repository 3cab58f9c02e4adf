"""Conformance of routers: who chooses, what it looks at, whether experts overflow, and what evens the load."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from xscale.conformance.check import check
from xscale.conformance.small_parts import (
    VOCABULARY,
    WIDTH,
    close,
    drawn,
    fitting,
    noisy,
    ready,
    tokens,
)
from xscale.core.registry import Entry
from xscale.nn.ffn.moe.router.router import Router, RouterDims
from xscale.nn.ffn.moe.routing import Routing
from xscale.nn.init import ZEROS, Init
from xscale.nn.tokens import FORWARD_FIELDS, SharedValues, Tokens

TOKENS, EXPERTS = 128, 8
SEED = 3


def built(entry: Entry[Any], noise: bool = False) -> Router:
    """The router in training; with `noise` with its noise on."""
    sizes = RouterDims(
        width=WIDTH, experts=EXPERTS, vocabulary=VOCABULARY, groups=1, init=Init(std=0.3)
    )
    config = fitting(entry, sizes)
    part: Router = ready(entry.part(noisy(config) if noise else config, sizes))
    part.train()
    return part


def around(**changes: Any) -> Tokens:
    """One sequence in training, with auxiliary losses wanted."""
    about = tokens(TOKENS, 1).with_forward(rng_seed=SEED, aux_loss_weight=1.0)
    forward = {name: changes.pop(name) for name in FORWARD_FIELDS if name in changes}
    return replace(about.with_forward(**forward), **changes)


def routed(router: Router, x: Tensor, about: Tokens, seed: int = SEED) -> Routing:
    torch.manual_seed(seed)
    outcome: Routing = router(x, about)
    return outcome


def skewed() -> Tensor:
    """Tokens that differ little."""
    return drawn(TOKENS, WIDTH) + drawn(1, WIDTH, seed=9)


def loads(routing: Routing) -> Tensor:
    sent = routing.expert if routing.kept is None else routing.expert[routing.kept]
    return torch.bincount(sent, minlength=EXPERTS)


def by_token(routing: Routing, count: int = TOKENS) -> list[list[tuple[int, float, bool]]]:
    """(expert, weight, sent) of each token, in the order of the experts."""
    sent = (
        torch.ones_like(routing.token, dtype=torch.bool) if routing.kept is None else routing.kept
    )
    outcome: list[list[tuple[int, float, bool]]] = [[] for _ in range(count)]
    rows = zip(
        routing.token.tolist(),
        routing.expert.tolist(),
        routing.weight.tolist(),
        sent.tolist(),
        strict=True,
    )
    for token, expert, weight, goes in rows:
        outcome[token].append((expert, round(weight, 9), goes))
    return [sorted(first) for first in outcome]


def even(entry: Entry[Any]) -> int:
    """An expert's share, rounded up."""
    return int(-(-entry.part.experts_per_token(fitting_config(entry), EXPERTS) * TOKENS // EXPERTS))


def fitting_config(entry: Entry[Any]) -> Any:
    sizes = RouterDims(width=WIDTH, experts=EXPERTS, vocabulary=VOCABULARY, groups=1, init=ZEROS)
    return fitting(entry, sizes)


@check("router", values={"in training": (True,), "in evaluation": (False,)}, at_start=True)
def a_routing_is_whole(entry: Entry[Any], training: bool) -> None:
    router = built(entry)
    router.train(training)
    outcome = routed(router, drawn(TOKENS, WIDTH), around() if training else tokens(TOKENS, 1))
    assert outcome.token.shape == outcome.expert.shape == outcome.weight.shape
    assert 0 <= int(outcome.token.min()) <= int(outcome.token.max()) < TOKENS
    assert 0 <= int(outcome.expert.min()) <= int(outcome.expert.max()) < EXPERTS
    assert outcome.weight.isfinite().all()
    assert outcome.probabilities.shape == (TOKENS, EXPERTS)
    assert (
        len(outcome.token) == entry.part.experts_per_token(fitting_config(entry), EXPERTS) * TOKENS
    )
    assert len(outcome.token) % outcome.k == 0
    pairs = set(zip(outcome.token.tolist(), outcome.expert.tolist(), strict=True))
    assert len(pairs) == len(outcome.token), "a token goes to one expert twice"


@check("router")
def it_is_chosen_by_whom_it_says(entry: Entry[Any]) -> None:
    outcome = routed(built(entry), drawn(TOKENS, WIDTH), around())
    of_tokens = torch.bincount(outcome.token, minlength=TOKENS)
    of_experts = torch.bincount(outcome.expert, minlength=EXPERTS)
    if entry.traits.choice == "token":
        assert (of_tokens == outcome.k).all()
        assert entry.traits.top_k in (None, outcome.k)
    else:
        assert entry.traits.choice == "expert"
        assert (of_experts == of_experts[0]).all()
        assert not (of_tokens == of_tokens[0]).all(), (
            "experts that choose freely do not all choose the same tokens"
        )


@check("router")
def experts_overflow_where_declared(entry: Entry[Any]) -> None:
    """Overflow shows by tokens that are all the same."""
    router, first = built(entry), drawn(1, WIDTH).expand(TOKENS, -1)
    about = around(ids=torch.full((1, TOKENS), 7))
    most = max(int(loads(routed(router, first, about, seed)).max()) for seed in range(3))
    assert (most > even(entry)) == entry.traits.drops


@check("router")
def it_looks_where_it_says(entry: Entry[Any]) -> None:
    router = built(entry)
    x = drawn(TOKENS, WIDTH)
    about = around()
    full = by_token(routed(router, x, about))
    keep = torch.arange(TOKENS) % 2 == 0
    other = torch.where(keep[:, None], x, skewed())
    ids = torch.where(keep, about.ids, (about.ids + 1) % VOCABULARY)
    changed = by_token(routed(router, other, replace(about, ids=ids, shared_values=SharedValues())))
    alone = all(
        before == after
        for before, after, kept in zip(full, changed, keep.tolist(), strict=True)
        if kept
    )
    if entry.traits.scope == "token":
        assert alone, "a token's routing depends on the other tokens"
    else:
        first = by_token(
            routed(
                router,
                x[1:],
                replace(about, ids=about.ids[:, 1:], positions=about.positions[:, 1:]),
            ),
            127,
        )
        assert not alone or first != full[1:], "a token's routing depends on that token alone"


@check("router", at_start=True)
def the_future_leaks_where_declared(entry: Entry[Any]) -> None:
    router = built(entry, noise=True)
    x = drawn(TOKENS, WIDTH)
    about = around()
    full, same = by_token(routed(router, x, about)), []
    for cut in (1, 40, TOKENS - 1):
        later = torch.cat((x[:cut], skewed()[cut:]))
        ids = torch.cat((about.ids[:, :cut], (about.ids[:, cut:] + 1) % VOCABULARY), 1)
        changed = by_token(
            routed(router, later, replace(about, ids=ids, shared_values=SharedValues()))
        )
        same.append(changed[:cut] == full[:cut])
    assert all(same) == entry.traits.causal


@check("router")
def the_load_is_evened_as_declared(entry: Entry[Any]) -> None:
    router = built(entry)
    about = around()
    x = skewed()
    outcome = routed(router, x, about)
    if entry.traits.balance == "none":
        assert outcome.loss is None or not outcome.loss.requires_grad or not outcome.loss.any()
        return
    if entry.traits.balance == "assignment":
        assert int(loads(outcome).max()) <= 1.5 * even(entry)
        return
    assert entry.traits.balance == "loss"
    before = int(loads(outcome).max()) - even(entry)
    optimizer = torch.optim.Adam(router.parameters(), lr=0.03)
    for _ in range(150):
        optimizer.zero_grad()
        loss = routed(router, x, about).loss
        assert loss is not None
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = int(loads(routed(router, x, about)).max()) - even(entry)
    assert after < 0.5 * before, (
        f"the fullest expert had {before} tokens too many, and {after} by the router's own loss"
    )


@check("router")
def it_learns_where_declared(entry: Entry[Any]) -> None:
    router = built(entry)
    moved = [parameter for parameter in router.parameters() if parameter.requires_grad]
    assert bool(moved) == entry.traits.learned
    if moved:
        weights = drawn(TOKENS, EXPERTS, seed=2)
        outcome = routed(router, drawn(TOKENS, WIDTH), around())
        out = (outcome.weight * weights[outcome.token, outcome.expert]).sum()
        assert out.requires_grad, "no gradient reaches the router"
        gradients = torch.autograd.grad(out, moved, allow_unused=True)
        assert any(first is not None and first.any() for first in gradients), (
            "no gradient reaches the router"
        )


@check("router")
def random_numbers_only_where_declared(entry: Entry[Any]) -> None:
    router = built(entry)
    x = drawn(TOKENS, WIDTH)
    about = around()
    runs = [by_token(routed(router, x, about, seed)) for seed in range(3)]
    assert (runs[0] != runs[1] or runs[0] != runs[2]) == entry.traits.random
    router.eval()
    quiet = around(rng_seed=None, aux_loss_weight=None)
    assert by_token(routed(router, x, quiet, 1)) == by_token(routed(router, x, quiet, 2)), (
        "evaluation is random"
    )


@check("router", lambda entry: entry.traits.scope == "token")
def a_sequence_alone_is_routed_as_in_a_batch_outside_training(entry: Entry[Any]) -> None:
    router = built(entry).eval()
    x = drawn(TOKENS, WIDTH)
    about = tokens(TOKENS // 2, 2)
    both = routed(router, x, about)
    first = routed(router, x[: TOKENS // 2], Tokens.from_ids(about.ids[:1]))
    assert by_token(both)[: TOKENS // 2] == by_token(first, TOKENS // 2)
    assert close(both.probabilities[: TOKENS // 2], first.probabilities)
