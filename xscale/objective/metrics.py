"""Metrics of predicted classes, scores and tags: accuracy, macro F1, Matthews, Pearson, Spearman, and F1 of spans."""

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor


def class_metrics(predicted: Tensor, targets: Tensor, classes: int) -> dict[str, float]:
    """Return accuracy, macro F1 and Matthews' correlation of predicted classes [N] with the targets [N], and as
    `majority_accuracy` the accuracy of always predicting the most frequent of these targets.

    Macro F1 is the mean over the classes that occur, in predictions or targets, of 2 TP / (2 TP + FP + FN). The
    correlation is that of Gorodkin 2004 for any number of classes (for two, Matthews 1975); it is 0 where the
    predictions or the targets are all of one class.
    """
    counts = torch.bincount(targets * classes + predicted, minlength=classes * classes)
    confusion = counts.view(classes, classes).double()  # [target, predicted]
    hits = confusion.diagonal()
    of_target = confusion.sum(1)
    of_predicted = confusion.sum(0)
    total = float(confusion.sum())
    occurs = (of_target + of_predicted) > 0
    f1 = (2 * hits / (of_target + of_predicted))[occurs].mean()
    covariance = hits.sum() * total - (of_target * of_predicted).sum()
    spread = (total**2 - of_predicted.square().sum()) * (total**2 - of_target.square().sum())
    matthews = float(covariance / spread.sqrt()) if spread > 0 else 0.0
    accuracy, majority = float(hits.sum()) / total, float(of_target.max()) / total
    return {
        "accuracy": accuracy,
        "majority_accuracy": majority,
        "macro_f1": float(f1),
        "matthews": matthews,
    }


def score_metrics(predicted: Tensor, targets: Tensor) -> dict[str, float]:
    """Return the mean squared error of predicted scores [N], and their Pearson and Spearman correlations with the
    targets [N]; a correlation with a constant is nan."""
    predicted, targets = predicted.double(), targets.double()
    return {
        "mse": float((predicted - targets).square().mean()),
        "pearson": pearson(predicted, targets),
        "spearman": pearson(places(predicted), places(targets)),
    }


def pearson(x: Tensor, y: Tensor) -> float:
    """Return Pearson's correlation of x [N] and y [N]; nan where one is constant."""
    x, y = x - x.mean(), y - y.mean()
    spread = float((x.square().sum() * y.square().sum()).sqrt())
    return float((x * y).sum()) / spread if spread else math.nan


def places(x: Tensor) -> Tensor:
    """Return the place of each of x [N] in their order, from 1; equal ones have the mean of their places."""
    _, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    mean: Tensor = last - (counts.double() - 1) / 2
    return mean[inverse]


SPAN_TAG = re.compile(r"([BIES])-(.+)")
"""Tag of a word in a span: its place there (begin, inside, end, single) and the type of the span."""
OUTSIDE = "O"
"""Tag of a word in no span."""


def marks_spans(names: Sequence[str]) -> bool:
    """Whether tags of these names mark spans: each is `O` or of the form `B-TYPE`, `I-TYPE`, `E-TYPE` or `S-TYPE`."""
    of_spans = [bool(SPAN_TAG.fullmatch(name)) for name in names]
    return any(of_spans) and all(
        of_span or name == OUTSIDE for of_span, name in zip(of_spans, names, strict=True)
    )


def span_metrics(
    predicted: Tensor, targets: Tensor, samples: Tensor, names: Sequence[str]
) -> dict[str, float]:
    """Return precision, recall and F1 of the spans that predicted tags [N] mark, against those of the targets [N].

    A span is right if its first word, its last word and its type are those of a span of the targets (Tjong Kim Sang and
    De Meulder 2003). The spans of all types count together. A ratio of nothing is 0. `samples` [N]: the
    sample of each tag, equal ones adjacent; no span leaves its sample. `names` of the tags satisfy `marks_spans`.
    """
    predicted_spans, target_spans = (_spans(tags, samples, names) for tags in (predicted, targets))
    hits = int(((predicted_spans == target_spans) & (target_spans >= 0)).sum())
    of_predicted, of_target = int((predicted_spans >= 0).sum()), int((target_spans >= 0).sum())
    return {
        "span_precision": hits / max(of_predicted, 1),
        "span_recall": hits / max(of_target, 1),
        "span_f1": 2 * hits / max(of_predicted + of_target, 1),
    }


def _spans(tags: Tensor, samples: Tensor, names: Sequence[str]) -> Tensor:
    """Return [N] at the first word of each span a number of its last word and its type, elsewhere -1.

    A tag I or E continues the span of a tag B or I of the same type before it, and any other tag of a span begins one:
    what `conlleval` counts, and `seqeval` in its default mode.
    """
    matches = [SPAN_TAG.fullmatch(name) for name in names]
    types = [OUTSIDE, *sorted({match[2] for match in matches if match})]
    type_of = torch.tensor([types.index(match[2]) if match else 0 for match in matches])[tags]
    may_continue = torch.tensor([bool(match and match[1] in "IE") for match in matches])[tags]
    is_open = torch.tensor([bool(match and match[1] in "BI") for match in matches])[tags]
    in_span = torch.tensor([bool(match) for match in matches])[tags]
    continues = torch.zeros_like(in_span)
    continues[1:] = (
        may_continue[1:]
        & is_open[:-1]
        & (type_of[1:] == type_of[:-1])
        & (samples[1:] == samples[:-1])
    )
    is_last = in_span.clone()
    is_last[:-1] &= ~continues[1:]
    firsts, lasts = (in_span & ~continues).nonzero()[:, 0], is_last.nonzero()[:, 0]
    spans = torch.full_like(tags, -1)
    spans[firsts] = lasts * len(types) + type_of[firsts]
    return spans
