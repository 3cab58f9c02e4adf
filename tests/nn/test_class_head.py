"""Heads of classes and scores, against loops over the examples; metrics against their definitions."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from xscale.core.config import decode
from xscale.nn.head.class_head import PREDICTIONS, ClassHead, Predictions
from xscale.nn.init import Init
from xscale.nn.materialize import materialize
from xscale.nn.tokens import Tokens
from xscale.objective.metrics import class_metrics, places, score_metrics
from xscale.recipe import Recipe

INPUT = torch.arange(14).view(2, 7)


def settings(**sections: Any) -> Recipe:
    block = {"mixer": {"kind": "attention", "heads": 4}, "ffn": {"kind": "dense", "hidden": 24}}
    model = {"kind": "encoder", "width": 16, "position": "learned", "stack": {"depth": 2, "block": block}}
    data = {"source": {"kind": "stdlib_labelled"}, "sequence_length": 8}
    return decode(Recipe, {"model": model, "objective": {"kind": "classify", "classes": 12}, "data": data, **sections})


def head(outputs: int, **options: bool) -> ClassHead:
    made = ClassHead(6, outputs, Init(std=0.5), **options)
    materialize(made, 1, dtype=torch.float64)
    return made


def test_the_loss_is_that_of_the_pooled_tokens() -> None:
    made = head(3, dense=True)
    assert made.dense is not None
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    targets = torch.tensor([[2, -100, -100, -100], [-100, -100, 1, 0]])
    predictions = Predictions(torch.stack(torch.meshgrid(torch.arange(7, 9), torch.arange(4), indexing="ij"), -1))
    loss = made(x, targets, Tokens.from_ids(torch.zeros(2, 4, dtype=torch.long), signals={PREDICTIONS: predictions}))
    wanted, predicted = 0.0, []
    for row, at, target in ((0, 0, 2), (1, 2, 1), (1, 3, 0)):
        hidden = torch.tanh(made.dense.weight @ x[row, at] + made.dense.bias)
        logits = (made.classes.weight @ hidden + made.classes.bias).tolist()
        wanted += math.log(sum(math.exp(value) for value in logits)) - logits[target]
        predicted.append(logits.index(max(logits)))
    assert loss.item() == pytest.approx(wanted, rel=1e-12)
    assert predictions.rows().tolist() == [[7, 8, 8], [0, 2, 3], predicted, [2, 1, 0]]


def test_scores_have_a_squared_error() -> None:
    made = head(1, scores=True)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    targets = torch.tensor([[0.5, -100, -100], [-100, -100, -2.0]], dtype=torch.float64)
    weight, bias = made.classes.weight.detach()[0], float(made.classes.bias.detach()[0])
    scores = [float(weight @ x[row, at]) + bias for row, at in ((0, 0), (1, 2))]
    assert made(x, targets).item() == pytest.approx((scores[0] - 0.5) ** 2 + (scores[1] + 2) ** 2, rel=1e-12)


def test_metrics_of_classes_are_those_of_their_definitions() -> None:
    generator = torch.Generator().manual_seed(0)
    predicted, targets = (torch.randint(3, (40,), generator=generator) for _ in range(2))
    found = class_metrics(predicted, targets, 4)
    pairs = list(zip(predicted.tolist(), targets.tolist(), strict=True))
    assert found["accuracy"] == pytest.approx(sum(a == b for a, b in pairs) / 40)
    f1 = []
    for label in range(3):
        hits = sum(a == b == label for a, b in pairs)
        f1.append(2 * hits / sum((a == label) + (b == label) for a, b in pairs))
    assert found["macro_f1"] == pytest.approx(sum(f1) / 3)
    # Matthews' correlation is that of the indicators of the classes, summed over the classes (Gorodkin 2004).
    x, y = (torch.nn.functional.one_hot(values, 4).double() for values in (predicted, targets))
    x, y = x - x.mean(0), y - y.mean(0)
    wanted = float((x * y).sum() / ((x * x).sum() * (y * y).sum()).sqrt())
    assert found["matthews"] == pytest.approx(wanted)
    both = class_metrics(torch.tensor([1, 1, 0, 0]), torch.tensor([1, 0, 0, 0]), 2)
    # (TP TN - FP FN) / sqrt((TP + FP)(TP + FN)(TN + FP)(TN + FN)), with TP 1, TN 2, FP 1, FN 0.
    assert both["matthews"] == pytest.approx(2 / math.sqrt(2 * 1 * 3 * 2))
    assert class_metrics(torch.zeros(4, dtype=torch.long), torch.tensor([0, 1, 0, 1]), 2)["matthews"] == 0.0
    repeated = class_metrics(predicted.repeat(2), targets.repeat(2), 4)
    assert repeated == pytest.approx(found)


def test_metrics_of_scores_are_those_of_their_definitions() -> None:
    predicted, targets = torch.tensor([1.0, 3.0, 2.0, 2.0, 9.0]), torch.tensor([0.0, 5.0, 1.0, 4.0, 6.0])
    found = score_metrics(predicted, targets)
    assert found["mse"] == pytest.approx((1 + 4 + 1 + 4 + 9) / 5)
    assert found["pearson"] == pytest.approx(float(torch.corrcoef(torch.stack((predicted, targets)))[0, 1]))
    assert places(predicted).tolist() == [1.0, 4.0, 2.5, 2.5, 5.0]
    in_order = torch.tensor([1.0, 4.0, 2.5, 2.5, 5.0]), torch.tensor([1.0, 4.0, 2.0, 3.0, 5.0])
    assert found["spearman"] == pytest.approx(float(torch.corrcoef(torch.stack(in_order))[0, 1]))
    assert math.isnan(score_metrics(torch.ones(3), torch.arange(3.0))["pearson"])
    assert all(a < b for a, b in pairwise(sorted(places(targets).tolist())))
