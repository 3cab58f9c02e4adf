"""Evaluation: loss, perplexity and bits per byte on the validation documents, and an order-2 baseline for them."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from xscale.data.baseline import order2_bits_per_byte
from xscale.data.loader import Corpus
from xscale.data.prepared import Split
from xscale.mesh.collectives import all_gather_object, sum_scalars
from xscale.nn.head import IGNORE_INDEX
from xscale.nn.tokens import Predictions
from xscale.objective.objective import OBJECTIVES, Batch, Objective
from xscale.parallel.sharded import StagedModel


@dataclass(frozen=True)
class Evaluation:
    """Quality of the model on text it was not trained on."""

    loss: float
    """Mean over the targets, in nats."""
    perplexity: float
    bits_per_byte: float
    """Over the bytes that the targets encode; comparable between tokenizers. nan of labels."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of an objective on labels, such as accuracy, by name."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    objective: Objective,
    batches: Iterable[tuple[Batch, bool]],
    token_bytes: Tensor,
    stages: int = 1,
) -> Evaluation:
    """Evaluate `model`. Collective over all ranks; a batch whose flag is false only keeps the ranks in lockstep.

    `token_bytes` [V]: bytes of text that each token encodes. `stages`: pipeline ranks; only the last has the loss, the
    others find 0.
    """
    model.eval()
    predicts_labels = objective.head_sizes(objective.config) is not None
    predictions = Predictions()
    nats = torch.zeros((), dtype=torch.float64, device=token_bytes.device)
    # Added up on the device, so that the host waits once.
    totals = torch.zeros(2, dtype=torch.int64, device=token_bytes.device)
    for batch, counts in batches:
        if predicts_labels and counts:
            batch = replace(batch, tokens=replace(batch.tokens, predictions=predictions))
        loss = objective.loss(model, batch)
        if counts:
            nats += loss
            is_target = batch.targets != IGNORE_INDEX
            if predicts_labels:
                totals[0] += is_target.sum()
                continue
            sizes = token_bytes[batch.targets.clamp(min=0)] * is_target
            totals += torch.stack((is_target.sum(), sizes.sum()))
    targets, size = totals.tolist()
    sums = [float(nats), targets / stages, size / stages]
    total, count, length = sum_scalars(sums, token_bytes.device)
    if isinstance(model, StagedModel):
        model.wait_sends()
    loss_value = total / max(count, 1)
    if predicts_labels:
        # Ranks of tp predict the same of the same samples, and no metric changes if each pair counts several times.
        pairs = torch.cat(all_gather_object(predictions.pairs()), 1)
        return Evaluation(loss_value, math.nan, math.nan, metrics_of(pairs, objective))
    perplexity = math.exp(loss_value) if loss_value < 700 else math.inf
    return Evaluation(loss_value, perplexity, total / math.log(2) / max(length, 1))


def metrics_of(pairs: Tensor, objective: Objective) -> dict[str, float]:
    """Return the metrics of predictions and targets [2, N]."""
    is_class = OBJECTIVES.of(objective.config).traits.labels != "score"
    predicted, targets = pairs.long() if is_class else pairs
    return objective.metrics(predicted, targets) if len(targets) else {}


def order2_baseline(corpus: Corpus) -> float:
    """Bits per byte of an order-2 byte model of the corpus' training text on its validation text; of pairs, of the
    targets."""

    def texts(splits: Iterable[Split]) -> Iterator[bytes]:
        for split in splits:
            yield from split.target_texts(corpus.tokenizer) if corpus.pairs else split.texts(corpus.tokenizer)

    held_out = (part.validation for part in corpus.sets if part.validation is not None)
    return order2_bits_per_byte(texts(part.train for part in corpus.sets), texts(held_out))
