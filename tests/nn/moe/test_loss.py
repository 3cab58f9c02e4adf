"""Scope of the balancing loss: micro-batch, groups, sequences, and loads of all ranks."""

from dataclasses import replace

import pytest
import torch

from tests.nn.moe.mixture import mixture, router, sample
from xscale.nn.ffn.moe.router.balance import cv_squared, load_balancing_loss, z_loss
from xscale.nn.ffn.moe.segments import Segments
from xscale.nn.post_step import update_non_gradient_state
from xscale.nn.tokens import Stats


def by_hand(probabilities: torch.Tensor, experts: torch.Tensor) -> float:
    tokens, count = probabilities.shape
    return count * sum(
        float((experts == expert).sum()) / experts.numel() * probabilities[:, expert].sum().item() / tokens
        for expert in range(count)
    )


@pytest.mark.parametrize(
    ("scope", "groups", "pieces"), [("micro_batch", 1, 1), ("micro_batch", 4, 4), ("sequence", 1, 2)]
)
def test_scopes(scope: str, groups: int, pieces: int) -> None:
    x, tokens = sample()
    routing = router("topk", 4, groups, balance_over=scope)(x.flatten(0, 1), tokens)
    experts = routing.expert.view(2, -1).t()
    parts = zip(routing.probabilities.chunk(pieces), experts.chunk(pieces), strict=True)
    wanted = sum(by_hand(*part) for part in parts) / pieces
    assert routing.stats["aux"].item() == pytest.approx(wanted)
    if pieces > 1:
        assert wanted != pytest.approx(by_hand(routing.probabilities, experts))


@pytest.mark.parametrize("kind", ["topk", "gshard", "switch"])
def test_global_batch_is_the_loss_of_the_whole_batch(kind: str) -> None:
    """The mean over micro-batches of E f P, f of the whole batch, is the loss of one micro-batch of all tokens."""
    x, tokens = sample()
    moe = mixture(router={"kind": kind, "balance_over": "global_batch"})
    moe.path, moe.router.path = "moe", "moe.router"
    tallies = [Stats(), Stats()]
    for half, tally in zip(x, tallies, strict=True):
        assert moe.router(half, tokens.with_forward(stats=tally)).stats["aux"].item() == 0, "no step was before"
        moe(half[None], replace(tokens.with_forward(stats=tally), ids=tokens.ids[:1]))
    seen = [tally.means() for tally in tallies]
    update_non_gradient_state(moe, {name: sum(one[name] for one in seen) / 2 for name in seen[0]})
    together = mixture(router={"kind": kind}).router(x.flatten(0, 1), tokens).stats["aux"].item()
    apart = [moe.router(half, tokens).stats["aux"].item() for half in x]
    assert sum(apart) / 2 == pytest.approx(together, rel=1e-12)
    alone = [mixture(router={"kind": kind}).router(half, tokens).stats["aux"].item() for half in x]
    assert sum(alone) / 2 != pytest.approx(together, rel=1e-3), "balance of the parts is another thing"


def test_an_even_load_costs_one_and_a_skewed_one_more() -> None:
    even = torch.full((8, 4), 0.25)
    token, expert = torch.arange(8), torch.arange(8) % 4
    assert load_balancing_loss(even, token, expert).item() == pytest.approx(1)
    skewed = torch.tensor([[0.7, 0.1, 0.1, 0.1]]).expand(8, 4)
    assert load_balancing_loss(skewed, token, torch.zeros(8, dtype=torch.int64)).item() == pytest.approx(2.8)


def test_segments_that_do_not_divide() -> None:
    probabilities = torch.rand(7, 3, dtype=torch.float64).softmax(1)
    expert = torch.tensor([0, 1, 2, 0, 0, 1, 2])
    wanted = (by_hand(probabilities[:4], expert[:4]) + by_hand(probabilities[4:], expert[4:])) / 2
    assert load_balancing_loss(probabilities, torch.arange(7), expert, Segments.even(7, 2)).item() == pytest.approx(
        wanted
    )


def test_small_formulas() -> None:
    assert cv_squared(torch.tensor([1.0, 3.0])).item() == pytest.approx(0.25)
    assert z_loss(torch.zeros(5, 4)).item() == pytest.approx(torch.tensor(4.0).log().item() ** 2)
