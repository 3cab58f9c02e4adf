"""Beam search equals a literal search over lists, and an exhaustive one where the beams are many enough."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.test_generate import BLOCK, model_of
from xscale.generate.beam_search import beam_search
from xscale.generate.generate import generate
from xscale.nn.tokens import Tokens

END = 1


class Table(nn.Module):
    """A model of few tokens whose next token depends on the whole prefix, by a table."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        super().__init__()
        self.vocabulary, self.seed = vocabulary, seed

    def log_probabilities(self, prefix: tuple[int, ...]) -> Tensor:
        draw = torch.Generator().manual_seed(self.seed + sum(7**at * (token + 1) for at, token in enumerate(prefix)))
        return (2 * torch.randn(self.vocabulary, generator=draw, dtype=torch.float64)).log_softmax(0)

    def forward(self, tokens: Tokens, targets: Tensor | None = None, source: Tokens | None = None) -> Tensor:
        return torch.stack([self.log_probabilities(tuple(row.tolist())) for row in tokens.ids])[:, None]


def penalised(log_probability: float, tokens: int, alpha: float) -> float:
    """Wu et al. 2016, equation 14: lp(Y) = (5 + |Y|)^alpha / (5 + 1)^alpha."""
    return log_probability / float((5 + tokens) ** alpha / (5 + 1) ** alpha)


def literal_search(model: Table, beams: int, length: int, alpha: float) -> list[tuple[tuple[int, ...], float]]:
    """Run every step to the end, without stopping early: prefixes are tuples, and a step a sorted list."""
    live: list[tuple[tuple[int, ...], float]] = [((0,), 0.0)]
    finished: list[tuple[tuple[int, ...], float]] = []
    for step in range(1, length + 1):
        candidates = [
            ((*prefix, token), score + float(model.log_probabilities(prefix)[token]))
            for prefix, score in live
            for token in range(model.vocabulary)
        ]
        candidates = sorted(candidates, key=lambda pair: -pair[1])[: 2 * beams]
        finished += [(ids[1:-1], penalised(score, step, alpha)) for ids, score in candidates[:beams] if ids[-1] == END]
        live = [(ids, score) for ids, score in candidates if ids[-1] != END][:beams]
    if not finished:
        return [(ids[1:], penalised(score, length, alpha)) for ids, score in live]
    return sorted(finished, key=lambda pair: -pair[1])[:beams]


@pytest.mark.parametrize("beams", [1, 2, 4])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_it_finds_what_a_literal_search_finds(beams: int, alpha: float) -> None:
    for seed in range(0, 500, 50):
        model = Table(6, seed)
        expected = literal_search(model, beams, 7, alpha)
        result = beam_search(model, torch.tensor([0]), 7, end=END, beams=beams, length_penalty=alpha)
        assert [each.ids for each in result] == [ids for ids, _ in expected]
        assert [each.score for each in result] == pytest.approx([score for _, score in expected], rel=1e-12)


def test_with_enough_beams_it_is_exhaustive() -> None:
    model, length, alpha = Table(4, 3), 4, 0.6
    ended: dict[tuple[int, ...], float] = {}
    for size in range(length):
        for ids in itertools.product([0, 2, 3], repeat=size):
            prefix: tuple[int, ...] = (0,)
            total = 0.0
            for token in (*ids, END):
                total += float(model.log_probabilities(prefix)[token])
                prefix = (*prefix, token)
            ended[ids] = penalised(total, size + 1, alpha)
    best = max(ended, key=lambda ids: ended[ids])
    (first, *_) = beam_search(model, torch.tensor([0]), length, end=END, beams=4**length, length_penalty=alpha)
    assert first.ids == best
    assert first.score == pytest.approx(ended[best])


def test_a_length_penalty_prefers_longer_texts() -> None:
    lengths = [
        sum(
            len(beam_search(Table(6, seed), torch.tensor([0]), 9, end=END, beams=3, length_penalty=alpha)[0].ids)
            for seed in range(0, 2000, 50)
        )
        for alpha in (0.0, 3.0)
    ]
    assert lengths[0] < lengths[1]


def test_where_nothing_ends_the_likeliest_are_returned() -> None:
    result = beam_search(Table(6, 1), torch.tensor([0]), 3, end=-1, beams=2)
    assert [len(each.ids) for each in result] == [3, 3]
    assert result[0].score > result[1].score
    assert beam_search(Table(6, 1), torch.tensor([0]), 100, end=-1, beams=2, window=4) == result
    assert [each.ids for each in beam_search(Table(6, 1), torch.tensor([0]), 0, end=-1, beams=2)] == [()]


def encoder_decoder(**model: Any) -> nn.Module:
    stack = {"depth": 2, "block": BLOCK}
    return model_of({"kind": "encoder_decoder", "width": 32, "encoder": stack, "decoder": stack, **model}).eval()


EVOLVING, NPRF, PLAIN = ({"kind": "attention", "heads": 4, "core": core} for core in ("evolving", "nprf", "softmax"))
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "transparent": {"transparent": True},
    "state of a core": {"decoder": {"depth": 2, "block": {**BLOCK, "mixer": EVOLVING}}},
    "not_incremental": {"decoder": {"depth": 1, "block": {**BLOCK, "mixer": NPRF, "cross": PLAIN}}},
}


@pytest.mark.long
@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
@pytest.mark.sampled(2)
def test_an_encoder_decoder_is_searched_as_by_whole_forwards(name: str) -> None:
    network, source = encoder_decoder(**VARIANTS[name]), torch.tensor([3, 9, 27, 2])

    class Whole(Table):
        def log_probabilities(self, prefix: tuple[int, ...]) -> Tensor:
            logits = network(Tokens.from_ids(torch.tensor([prefix])), None, Tokens.from_ids(source[None]))
            return torch.log_softmax(logits[0, -1].double(), 0)

    expected = literal_search(Whole(40, 0), 3, 5, 0.6)
    result = beam_search(network, torch.tensor([0]), 5, end=END, beams=3, source=source)
    assert [each.ids for each in result] == [ids for ids, _ in expected]
    assert math.isclose(result[0].score, expected[0][1], rel_tol=1e-9)


def test_one_beam_is_greedy_where_nothing_ends() -> None:
    network, source = encoder_decoder(), torch.tensor([3, 9, 27, 2])
    greedy = generate(network, torch.tensor([0]), 12, end=-1, temperature=0, source=source)
    (first,) = beam_search(network, torch.tensor([0]), 12, end=-1, beams=1, source=source)
    assert list(first.ids) == greedy.tolist()
