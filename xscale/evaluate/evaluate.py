"""Evaluation: loss, perplexity and bits per byte on the validation documents, and an order-2 baseline for them."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from xscale.data.baseline import order2_bits_per_byte
from xscale.data.corpus.prepared import Split
from xscale.data.samples.loader import Corpus
from xscale.mesh.collectives import all_gather_columns, sum_scalars
from xscale.nn.ffn.moe.moe import Moe
from xscale.nn.forward import Stats
from xscale.nn.head.class_head import PREDICTIONS, Predictions
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.head.pooler import LABELS
from xscale.objective.objective import OBJECTIVES, Batch, Objective
from xscale.parallel.shard.sharded import StagedModel

SENTENCE_HEAD = "head.sentence"
"""Path of a model's sentence head, under which it records its statistics."""
SENTENCE_LOSS = f"{SENTENCE_HEAD}/loss"


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
    names: Sequence[str] = (),
) -> Evaluation:
    """Evaluate `model`. Collective over all ranks; a batch whose flag is false only keeps the ranks in lockstep.

    `token_bytes` [V]: bytes of text that each token encodes. `stages`: pipeline ranks; only the last has the loss, the
    others find 0. `names` of the classes or tags by number, for the metrics that read them.
    """
    model.eval()
    predicts_labels = objective.head_sizes(objective.config) is not None
    all_predictions: list[Predictions] = []
    nats = torch.zeros((), dtype=torch.float64, device=token_bytes.device)
    # Added up on the device, so that the host waits once.
    totals = torch.zeros(2, dtype=torch.int64, device=token_bytes.device)
    scores = _SentenceScores(token_bytes.device)
    for batch, counts in batches:
        tally = Stats()
        if predicts_labels and counts:
            assert batch.places is not None, "predictions are told apart by their places"
            all_predictions.append(Predictions(batch.places))
            batch = replace(
                batch, tokens=batch.tokens.with_signals({PREDICTIONS: all_predictions[-1]})
            )
        loss = objective.loss(model, scores.observed(batch, tally))
        if counts:
            scores.add(batch, tally)
            nats += loss
            is_target = batch.targets != IGNORE_INDEX
            if predicts_labels:
                totals[0] += is_target.sum()
                continue
            sizes = token_bytes[batch.targets.clamp(min=0)] * is_target
            totals += torch.stack((is_target.sum(), sizes.sum()))
    targets, size = totals.tolist()
    sums = [float(nats), targets / stages, size / stages]
    total, count, length, *sums_of_scores = sum_scalars(
        [*sums, *scores.sums.tolist()], token_bytes.device
    )
    if isinstance(model, StagedModel):
        model.wait_sends()
    loss_value = total / max(count, 1)
    if predicts_labels:
        local = torch.cat(
            [
                torch.zeros(4, 0, dtype=torch.float64),
                *(predictions.rows() for predictions in all_predictions),
            ],
            1,
        )
        rows = in_order(all_gather_columns(local, token_bytes.device))
        return Evaluation(loss_value, math.nan, math.nan, metrics_of(rows, objective, names))
    perplexity = math.exp(loss_value) if loss_value < 700 else math.inf
    return Evaluation(
        loss_value, perplexity, total / math.log(2) / max(length, 1), scores.means(sums_of_scores)
    )


class _SentenceScores:
    """Sums of the loss and the accuracy of a model's sentence head over the sequences, on this rank."""

    NAMES = ("loss", "accuracy")

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(self.NAMES) + 1, dtype=torch.float64, device=device)
        """Sum of each score, then the number of sequences."""

    def observed(self, batch: Batch, tally: Stats) -> Batch:
        """Return the batch with its statistics collected, where its sequences have classes."""
        if batch.tokens.get(LABELS) is None:
            return batch
        return replace(batch, tokens=batch.tokens.with_forward(stats=tally))

    def add(self, batch: Batch, tally: Stats) -> None:
        """Add the scores of a micro-batch; a rank without the head has none."""
        means = tally.means()
        if SENTENCE_LOSS in means:
            scores = [means[f"{SENTENCE_HEAD}/{name}"] for name in self.NAMES]
            self.sums += torch.stack([*scores, torch.ones_like(scores[0])]) * len(batch.targets)

    def means(self, sums: list[float]) -> dict[str, float]:
        """Return the means by name, of the sums over all ranks; none without a sentence head."""
        *totals, sequences = sums
        if not sequences:
            return {}
        return {
            f"sentence_{name}": total / sequences
            for name, total in zip(self.NAMES, totals, strict=True)
        }


def in_order(rows: Tensor) -> Tensor:
    """Return the `rows` [4, N] of the predictions of all ranks in the order of samples and indices, each place once.

    Ranks of cp have parts of a sample, and ranks of tp the same samples.
    """
    samples, index = rows[:2].long()
    places, order = (samples * (int(index.max()) + 1 if len(index) else 1) + index).sort(
        stable=True
    )
    is_first = torch.ones_like(places, dtype=torch.bool)
    is_first[1:] = places[1:] != places[:-1]
    return rows[:, order[is_first]]


def metrics_of(rows: Tensor, objective: Objective, names: Sequence[str] = ()) -> dict[str, float]:
    """Return the metrics of predictions with their targets: `rows` [4, N] in order, and `names` of the classes."""
    if not rows.shape[1]:
        return {}
    is_class = OBJECTIVES.of(objective.config).traits.labels != "score"
    predicted, targets = rows[2:].long() if is_class else rows[2:]
    metrics = objective.metrics(predicted, targets)
    return metrics | objective.sequence_metrics(predicted, targets, rows[0].long(), names)


BASELINE_BYTES = 1 << 28
"""Text that the baseline reads: seconds of rank 0. Other ranks and the launcher wait minutes for it, and no longer."""


def order2_baseline(corpus: Corpus, on_text: Callable[[], None] = lambda: None) -> float:
    """Bits per byte of an order-2 byte model of the corpus' training text on its validation text; of pairs, of the
    targets. Of each it takes the first `BASELINE_BYTES` bytes, and the rest of their last document. `on_text` is called
    before each document."""

    def texts(splits: Iterable[Split]) -> Iterator[bytes]:
        size = 0
        for split in splits:
            for text in (
                split.target_texts(corpus.tokenizer)
                if corpus.pairs
                else split.texts(corpus.tokenizer)
            ):
                if size >= BASELINE_BYTES:
                    return
                size += len(text)
                on_text()
                yield text

    held_out = (part.validation for part in corpus.sets if part.validation is not None)
    return order2_bits_per_byte(texts(part.train for part in corpus.sets), texts(held_out))


def capacity_notes(model: nn.Module) -> list[str]:
    """Return what an evaluation drops, a sentence for each capacity, of a model whose training drops tokens."""
    configs = [module.config for module in model.modules() if isinstance(module, Moe)]
    factors = {
        config.eval_capacity_factor: None
        for config in configs
        if config.capacity_factor is not None
    }
    return [_capacity_note(factor) for factor in factors]


def _capacity_note(factor: float | None) -> str:
    if factor is None or math.isinf(factor):
        return (
            "evaluation drops no tokens of the experts; training drops those over capacity_factor"
        )
    return (
        f"evaluation drops the tokens that exceed eval_capacity_factor={factor:g} in their sequence"
    )
