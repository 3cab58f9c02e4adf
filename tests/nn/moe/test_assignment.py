"""The balanced assignment is exact: against Kuhn and Munkres's algorithm, and against every assignment there is."""

import itertools

import pytest
import torch

from tests.nn.moe import literal
from xscale.nn.ffn.moe.assignment import balanced_assignment, balanced_hash


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("tokens", "experts"), [(12, 3), (24, 4), (16, 8), (10, 4), (5, 5), (7, 1)])
def test_exact(tokens: int, experts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Skewed, and on a coarse grid for odd seeds, so that there are ties.
    scores = torch.randn(tokens, experts, generator=generator, dtype=torch.float64) + torch.arange(experts)
    if seed % 2:
        scores = scores.round()
    chosen = balanced_assignment(scores)
    room = -(-tokens // experts)
    assert chosen.bincount(minlength=experts).max() <= room
    square = [[value for value in row for _ in range(room)] for row in scores.tolist()]
    square += [[0.0] * (room * experts)] * (room * experts - tokens)
    total = scores.gather(1, chosen[:, None]).sum().item()
    assert total == pytest.approx(literal.hungarian(square))


def test_exact_by_trying_all() -> None:
    scores = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    best = max(
        sum(scores[token, expert].item() for token, expert in enumerate(order))
        for order in itertools.product(range(3), repeat=6)
        if max(order.count(expert) for expert in range(3)) == 2
    )
    assert scores.gather(1, balanced_assignment(scores)[:, None]).sum().item() == pytest.approx(best)


@pytest.mark.parametrize("tokens", [1, 64])
def test_tokens_that_are_all_alike(tokens: int) -> None:
    assert balanced_assignment(torch.ones(tokens, 8)).bincount(minlength=8).max() == -(-tokens // 8)


def test_scores_that_are_not_finite_still_give_an_assignment() -> None:
    assert balanced_assignment(torch.full((8, 4), float("nan"))).bincount().tolist() == [2, 2, 2, 2]


def test_a_micro_batch_of_skewed_scores_is_balanced() -> None:
    scores = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0)) + torch.arange(16) / 4
    assert balanced_assignment(scores).bincount().tolist() == [256] * 16


def test_deal_evens_frequencies_out() -> None:
    frequencies = [1 / (token + 1) for token in range(1000)]
    table = balanced_hash(frequencies, 8)
    totals = [sum(f for f, e in zip(frequencies, table.tolist(), strict=True) if e == expert) for expert in range(8)]
    assert max(totals) < 1.1 * max(1.0, sum(frequencies) / 8)
    assert not torch.equal(table, balanced_hash(frequencies, 8, seed=1))
    assert torch.equal(table, balanced_hash(frequencies, 8))
