"""Rows of the vocabulary beyond the tokenizer's ids: no probability, in no loss, no gradient; literal in float64."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import dims, drawn, ready
from tests.train.tiny import recipe
from xscale.nn.depth.early_exit import entropy
from xscale.nn.head.distilled_head import FullVocabulary, SoftLoss
from xscale.nn.head.head import IGNORE_INDEX, Head, hide_padding
from xscale.nn.tokens import Tokens
from xscale.settings.settings import build_on_meta
from xscale_kernels.vocab_cross_entropy import vocab_gradients, vocab_statistics

ROWS, TOKENS = 12, 9
WITH: dict[str, dict[str, Any]] = {
    "nothing": {},
    "label smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss_weight": 0.3},
    "both": {"label_smoothing": 0.1, "z_loss_weight": 0.3},
}
HEADS: dict[str, dict[str, Any]] = {
    "a head": {},
    "a bias": {"bias": True},
    "a soft cap": {"soft_cap": 0.7},
    "a scale": {"scale": 0.5},
    "unit rows": {"fix_norm": True},
}


def head_with(**arguments: Any) -> Head:
    head = ready(Head(dims(width=8, vocabulary=ROWS), None, **arguments))
    hide_padding(head, ROWS, TOKENS)
    return head


def literal_logits(head: Head, x: list[float]) -> list[float]:
    """The logits of the tokens alone, number by number."""
    logits = []
    for row in range(TOKENS):
        weights = head.weight[row].tolist()
        length = math.sqrt(sum(w * w for w in weights)) if head.fix_norm else 1.0
        logit = sum(w / length * number * (head.scale or 1.0) for w, number in zip(weights, x, strict=True))
        logit += 0.0 if head.bias is None else head.bias[row].item()
        logits.append(logit if head.soft_cap is None else head.soft_cap * math.tanh(logit / head.soft_cap))
    return logits


def literal_loss(logits: list[float], target: int, label_smoothing: float = 0.0, z_loss_weight: float = 0.0) -> float:
    log_sum = math.log(sum(math.exp(logit) for logit in logits))
    smooth = sum(log_sum - logit for logit in logits) / TOKENS
    plain = (1 - label_smoothing) * (log_sum - logits[target]) + label_smoothing * smooth
    return plain + z_loss_weight * log_sum**2


@pytest.mark.parametrize("around", HEADS)
@pytest.mark.parametrize("terms", WITH)
def test_the_loss_is_that_over_the_tokens(around: str, terms: str) -> None:
    head, x = head_with(**HEADS[around]), drawn(1, 5, 8).requires_grad_()
    targets = torch.tensor([[0, 8, 3, IGNORE_INDEX, 8]])
    loss = head(x, targets, Tokens.from_ids(targets.clamp(min=0), **WITH[terms]))
    places = [0, 1, 2, 4]
    logits = {place: literal_logits(head, x[0, place].tolist()) for place in places}
    wanted = sum(literal_loss(logits[place], int(targets[0, place]), **WITH[terms]) for place in places)
    assert loss.item() == pytest.approx(wanted, rel=1e-12)
    loss.backward()
    assert head.weight.grad is not None
    assert torch.all(head.weight.grad[TOKENS:] == 0)
    assert torch.all(head.weight.grad[:TOKENS].abs().sum(1) > 0)


@pytest.mark.parametrize("around", HEADS)
def test_logits_give_padding_no_probability(around: str) -> None:
    head, x = head_with(**HEADS[around]), drawn(1, 5, 8)
    logits = head(x)
    assert logits.shape == (1, 5, ROWS)
    assert logits.isfinite().all()
    probabilities = logits.softmax(-1)
    assert torch.all(probabilities[..., TOKENS:] == 0)
    for place in range(5):
        literal = torch.tensor(literal_logits(head, x[0, place].tolist()), dtype=torch.float64)
        torch.testing.assert_close(probabilities[0, place, :TOKENS], literal.exp() / literal.exp().sum())
    assert torch.allclose(entropy(logits), entropy(logits[..., :TOKENS]))


def test_a_student_learns_over_the_tokens() -> None:
    """KL of a teacher with padding rows: they have no part in its softmax."""
    z, t = drawn(3, TOKENS, seed=1), drawn(3, ROWS, seed=2)
    every: Any = FullVocabulary()
    loss: Tensor = SoftLoss.apply(z, every.own(t, TOKENS), 2.0, every)  # type: ignore[no-untyped-call]
    wanted = 0.0
    for student, teacher in zip(z.tolist(), t[:, :TOKENS].tolist(), strict=True):
        exponents = [[math.exp(logit / 2) for logit in logits] for logits in (student, teacher)]
        q, p = ([number / sum(numbers) for number in numbers] for numbers in exponents)
        wanted += sum(b * math.log(b / a) for a, b in zip(q, p, strict=True))
    assert loss.item() == pytest.approx(wanted, rel=1e-12)


def test_a_rank_without_tokens_adds_nothing() -> None:
    hidden, targets = drawn(4, 8), torch.tensor([0, 1, 2, IGNORE_INDEX])
    none = hidden.new_empty(0, 8)
    statistics = vocab_statistics(hidden, none, targets, ROWS)
    assert torch.all(statistics.lse == -math.inf)
    assert torch.all(statistics.picked == 0)
    gradients = vocab_gradients(hidden, none, targets, ROWS, torch.ones(4), torch.ones(4), TOKENS)
    assert torch.all(gradients.hidden == 0)
    assert gradients.weight.shape == (0, 8)


def test_every_head_of_a_model_is_told() -> None:
    exits = {"blocks": [1], "head": "own"}
    model = {"kind": "decoder", "width": 32, "stack": {"depth": 2, "exits": exits}}
    settings = recipe(Path("nowhere"), model=model)
    heads = [module for module in build_on_meta(settings, 64, 50).modules() if isinstance(module, Head)]
    assert [head.unpadded_vocabulary for head in heads] == [50, 50]
    heads = [module for module in build_on_meta(settings, 64).modules() if isinstance(module, Head)]
    assert [head.unpadded_vocabulary for head in heads] == [None, None]
