"""Loss and metrics of a model's logits over an evaluation, and what they cost: a point of quality against compute."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.evaluate.evaluate import in_order, metrics_of
from xscale.mesh.collectives import all_gather_columns, sum_scalars
from xscale.nn.head.class_head import Predictions
from xscale.nn.head.head import IGNORE_INDEX
from xscale.objective.objective import Batch, Objective


class LogitScores:
    """Sums over the micro-batches of one evaluation on this rank."""

    def __init__(self, objective: Objective, names: Sequence[str] = ()) -> None:
        """`names` of the classes or tags by number, for the metrics that read them."""
        self._objective, self._names = objective, names
        self._head = objective.head_sizes(objective.config)
        self._sums = [0.0] * 5
        """Loss, right predictions, targets, computed units and all units."""
        self._predictions = [torch.zeros(4, 0, dtype=torch.float64)]

    def add(self, batch: Batch, logits: Tensor, computed: float, units: float) -> None:
        """Add the logits [B, T, V] of a micro-batch, or scores [B, T, 1]; `computed` of its `units` were computed."""
        targets, is_target = batch.targets, batch.targets != IGNORE_INDEX
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self._head is not None and self._head.scores:
            predicted = logits[..., 0]
            loss = (
                (predicted - targets.to(logits.dtype)).masked_fill(~is_target, 0.0).square().sum()
            )
        else:
            predicted = logits.argmax(-1)
            loss = F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
            )
        right = ((predicted == targets) & is_target).sum()
        batch_sums = [float(loss), float(right), float(is_target.sum()), computed, units]
        self._sums = [total + value for total, value in zip(self._sums, batch_sums, strict=True)]
        if self._head is not None:
            assert batch.places is not None, "predictions are told apart by their places"
            collected = Predictions(batch.places)
            collected.add(predicted, targets, is_target)
            self._predictions.append(collected.rows())

    def means(self, device: torch.device) -> tuple[float, float, dict[str, float]]:
        """Return the fraction of the units that were computed, the mean loss over the targets, in nats, and the metrics
        by name: those of the objective on labels, otherwise the accuracy. Collective over all ranks."""
        loss, right, count, computed, units = sum_scalars(self._sums, device)
        metrics = {"accuracy": right / max(count, 1)}
        if self._head is not None:
            rows = in_order(all_gather_columns(torch.cat(self._predictions, 1), device))
            metrics = metrics_of(rows, self._objective, self._names)
        return computed / max(units, 1), loss / max(count, 1), metrics
