"""SpanBERT: spans of geometric lengths that are masked as wholes, and the loss of what their boundaries predict."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.distributed import Pool
from tests.parallel.against_one import alone, same
from tests.train.tiny import recipe
from xscale.nn.head.boundary_head import BOUNDARIES
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.model.encoder import Encoder
from xscale.objective.objective import SpecialTokens
from xscale.objective.span_boundary import SpanBoundary

VOCABULARY, LENGTH, MASK = 300, 120, 4
SPECIALS = SpecialTokens(VOCABULARY, pad=0, eos=2, mask=MASK, sentinels=range(5, 9))
TOKENS = torch.arange(100, 100 + LENGTH + 1)


def objective(**config: Any) -> SpanBoundary:
    return SpanBoundary(SpanBoundary.Config(**config), SPECIALS, LENGTH, 1)


def test_spans_are_masked_as_wholes_and_have_boundaries() -> None:
    count = 400
    documents = (torch.arange(LENGTH + 1) >= 50).long().expand(count, -1)
    batch = objective().batch(TOKENS.expand(count, -1), documents, torch.arange(count))
    assert batch.tokens.get(BOUNDARIES) is not None
    fates: Counter[str] = Counter()
    for ids, targets, boundaries in zip(batch.tokens.ids, batch.targets, batch.tokens.get(BOUNDARIES), strict=True):
        predicted = (targets != IGNORE_INDEX).tolist()
        assert sum(predicted) == round(0.15 * LENGTH)
        starts = [place for place, (before, after) in enumerate(pairwise([False, *predicted])) if after and not before]
        for start in starts:
            end = next(place for place in range(start, LENGTH) if not predicted[place])
            assert end - start <= 10
            assert start > 0
            assert (start - 1 < 50) == (end < 50), "the boundaries are of the span's document"
            assert boundaries[start:end].tolist() == [[start - 1, end]] * (end - start)
            span, wanted = ids[start:end].tolist(), TOKENS[start:end].tolist()
            assert targets[start:end].tolist() == wanted
            fates["masked" if set(span) == {MASK} else "kept" if span == wanted else "random"] += 1
        alone = [place for place in range(LENGTH) if not predicted[place]]
        assert all(boundaries[place].tolist() == [place, place] and ids[place] == TOKENS[place] for place in alone)
    shares = {fate: number / fates.total() for fate, number in fates.items()}
    assert abs(shares["masked"] - 0.8) < 0.04
    assert abs(shares["random"] - 0.1) < 0.03


def test_special_tokens_are_in_no_span() -> None:
    """Also where a sample is one document, as with data.cross_documents=true."""
    count, tokens = 100, TOKENS.clone()
    tokens[9::10] = SPECIALS.eos
    batch = objective().batch(tokens.expand(count, -1), None, torch.arange(count))
    ends = (tokens[:-1] == SPECIALS.eos).expand(count, -1)
    assert (batch.targets[~ends] != IGNORE_INDEX).any()
    assert (batch.targets[ends] == IGNORE_INDEX).all()
    assert (batch.tokens.ids[ends] == SPECIALS.eos).all()


def test_lengths_are_geometric_and_clipped() -> None:
    """p (1 - p)^(n - 1) up to 10 tokens, whose mean is 3.8 (section 3.1), where no span ends early."""
    lengths = Counter(
        int((targets != IGNORE_INDEX).sum())
        for number in range(1500)
        for targets in [first_span(number)]
        if targets is not None
    )
    weights = [0.2 * 0.8**size for size in range(10)]
    for size, weight in enumerate(weights, 1):
        assert abs(lengths[size] / lengths.total() - weight / sum(weights)) < 0.035
    mean = sum(size * count for size, count in lengths.items()) / lengths.total()
    assert 3.5 < mean < 4.1


def first_span(number: int) -> torch.Tensor | None:
    """The targets of a sample's first span of the places that are far from the end."""
    from xscale.objective.random_spans import draw_spans

    free = torch.ones(LENGTH, dtype=torch.bool)
    weights = [0.8**size for size in range(10)]
    start, end = draw_spans(free, 10, weights, torch.Generator().manual_seed(number), gap=1)[0]
    targets = torch.full((LENGTH,), IGNORE_INDEX)
    targets[start:end] = 1
    return targets if start < LENGTH - 10 else None


def test_the_boundary_loss_is_that_of_the_paper() -> None:
    config = Encoder.Config.model_validate(
        {"width": 16, "boundary_head": {"position_width": 6}, "head_bias": True, "stack": {"depth": 1}}
    )
    model = Encoder(config, VOCABULARY, LENGTH).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    sample = (TOKENS.expand(2, -1), None, torch.arange(2))
    batch = objective().batch(*sample, target_weight=1 / 9)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(objective().loss(model, batch) / 9, parameters)
    states, total = model.stack(model.embed(batch.tokens), batch.tokens), torch.zeros((), dtype=torch.float64)
    head: Any = model.head.boundary
    assert batch.tokens.get(BOUNDARIES) is not None
    for row in range(2):
        for place in range(LENGTH):
            target = int(batch.targets[row, place])
            if target != IGNORE_INDEX:
                left, right = batch.tokens.get(BOUNDARIES)[row, place].tolist()
                hidden = torch.cat((states[row, left], states[row, right], head.positions[place - left - 1]))
                hidden = head.first_norm(F.gelu(head.first.weight @ hidden + head.first.bias))
                hidden = head.second_norm(F.gelu(head.second.weight @ hidden + head.second.bias))
                logits = model.embed.table.weight @ hidden
                total = total + torch.logsumexp(logits, 0) - logits[target]
    plain = objective().batch(*sample)
    wanted = torch.autograd.grad((objective().loss(model, plain) + total) / 9, parameters)
    for one, two in zip(gradients, wanted, strict=True):
        assert torch.allclose(one, two, rtol=1e-9, atol=1e-11)


MODEL: dict[str, Any] = {
    "kind": "encoder",
    "width": 32,
    "position": "learned",
    "transform": "gelu",
    "head_bias": True,
    "boundary_head": {"position_width": 8, "max_span": 4},
    "stack": {"depth": 2, "block": {"mixer": {"kind": "attention", "heads": 4}, "residual": "post"}},
}
OBJECTIVE = {"kind": "span_boundary", "max_span": 4, "mask_probability": 0.3}


@pytest.mark.parametrize(
    "layout",
    [
        {"mesh": {"tp": 2}, "tensor": {"sequence": True}},
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
        {"mesh": {"cp": 2}, "context": {"style": "ring"}},
        {"zero": {"stage": 3}},
    ],
    ids=["sp", "pp", "cp", "zero3"],
)
def test_a_layout_has_the_numbers_of_one_process(pool: Pool, layout: dict[str, Any]) -> None:
    single = alone(pool, MODEL, objective=OBJECTIVE)
    assert "head.boundary/loss" in single.statistics
    assert single.gradients["head.boundary.positions"][1].abs().max() > 0
    same(pool, single, 2, MODEL, layout, objective=OBJECTIVE)


@pytest.mark.parametrize(
    ("sections", "parallel", "words"),
    [
        ({"model": {**MODEL, "boundary_head": None}}, {}, "and the model does not"),
        ({"objective": {**OBJECTIVE, "max_span": 5}}, {}, "the head knows 4 places"),
        ({"objective": {"kind": "masked"}}, {}, "masks no spans"),
        ({"model": {**MODEL, "embedding_width": 8}}, {}, "with its full width"),
    ],
)
def test_what_does_not_fit_is_refused(sections: dict[str, Any], parallel: dict[str, Any], words: str) -> None:
    made = recipe(Path("nowhere"), **{"model": MODEL, "objective": OBJECTIVE, **sections}, parallel=parallel)
    (problem,) = made.check(2 if parallel else 1)
    assert words in problem.what
    assert problem.advice
