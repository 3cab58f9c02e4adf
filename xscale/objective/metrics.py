"""Metrics of predicted classes, scores and tags: accuracy, macro F1, Matthews, Pearson and Spearman."""

import math

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
    hits, of_target, of_predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    total = float(confusion.sum())
    occurs = (of_target + of_predicted) > 0
    f1 = (2 * hits / (of_target + of_predicted))[occurs].mean()
    covariance = hits.sum() * total - (of_target * of_predicted).sum()
    spread = (total**2 - of_predicted.square().sum()) * (total**2 - of_target.square().sum())
    matthews = float(covariance / spread.sqrt()) if spread > 0 else 0.0
    accuracy, majority = float(hits.sum()) / total, float(of_target.max()) / total
    return {"accuracy": accuracy, "majority_accuracy": majority, "macro_f1": float(f1), "matthews": matthews}


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
