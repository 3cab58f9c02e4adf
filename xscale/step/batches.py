"""The micro-batches of this data-parallel rank: the same micro-batches on every layout, distributed over the ranks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from xscale.data.samples.loader import Loader, Samples
from xscale.nn.forward import Forward, Stats
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.init import seed_of
from xscale.nn.segment_state import BEGINS, NEXT_DOCUMENT, SEGMENT_STATE, SegmentStates
from xscale.objective.objective import Batch, Objective
from xscale.parallel.context import SequenceSharding, shard_tokens
from xscale.parallel.context.ring.document_runs import find_document_runs


@dataclass(frozen=True)
class MicroBatches:
    """Makes the micro-batches of one rank.

    Micro-batch j of a step follows micro-batch j - 1 in the data, whichever rank computes it.
    So dropout, expert capacity and auxiliary losses, which belong to a micro-batch, do not depend on the rank count.
    """

    loader: Loader
    objective: Objective
    micro_batch: int
    """Sequences in a micro-batch."""
    ranks: int
    """Data-parallel ranks: they read different samples."""
    rank: int
    """Index of this rank among them."""
    seed: int
    separate: bool
    """Whether attention stays within a document."""
    device: torch.device
    sequence_sharding: SequenceSharding | None = None
    """How sequences are sharded over cp; None: they are not."""
    steps: int | None = None
    """Optimizer steps of the run; None: there is no run."""
    streams: int | None = None
    """Rows of a batch, each of which reads a stream of its own; None: samples are drawn one by one."""
    new_states: Callable[[int], SegmentStates] | None = None
    """Makes the states that the model keeps of so many rows between segments; None: it keeps none."""
    states: SegmentStates | None = None
    """Those of this rank's rows of a training batch."""

    def requests(self, first: int, batch: int, steps: int) -> Iterator[tuple[int, int]]:
        """Yield (first sample, count) of each micro-batch of this rank, for `steps` steps from sample `first` on."""
        for step in range(steps):
            for number in self._numbers(batch // self.micro_batch):
                yield first + step * batch + number * self.micro_batch, self.micro_batch

    def _numbers(self, count: int) -> range:
        """Return which of `count` micro-batches this rank computes: of streams those of consecutive rows."""
        if self.streams is None:
            return range(self.rank, count, self.ranks)
        per_rank = count // self.ranks
        return range(self.rank * per_rank, (self.rank + 1) * per_rank)

    def first_row(self) -> int:
        """Return the number in the batch of the first row of a stream that this rank reads."""
        assert self.streams is not None, "samples are drawn one by one"
        return self._numbers(self.streams // self.micro_batch).start * self.micro_batch

    def make(self, samples: Samples, step: int, batch: int, tally: Stats | None) -> Batch:
        """Make a training micro-batch, with its seed for dropout and the weight of its auxiliary losses."""
        micro_batch = self.objective.batch(
            *self._tensors(samples),
            forward=Forward(
                rng_seed=seed_of(self.seed, "noise", step, int(samples.index[0])),
                aux_loss_weight=self.micro_batch / batch,
                progress=None if self.steps is None else (step - 1) / self.steps,
                stats=tally,
                label_smoothing=self.objective.config.label_smoothing,
                z_loss_weight=self.objective.config.z_loss_weight,
            ),
            **_labels(samples),
        )
        if self.states is not None and self.streams is not None:
            row = int(samples.index[0]) % self.streams - self.first_row()
            micro_batch = self._of_streams(micro_batch, samples, self.states, row)
        targets = shard_targets(micro_batch.targets, self.sequence_sharding)
        # Counted here, because on a GPU the host would wait for the count.
        counted = int((targets != IGNORE_INDEX).sum())
        return replace(self._on_device(micro_batch, targets), counted=counted)

    def evaluation(self, sequences: int) -> Iterator[tuple[Batch, bool]]:
        """Yield this rank's micro-batches of the first `sequences` samples, and whether each counts.

        Ranks that run out repeat the first micro-batch, which does not count there, so that all do equally many.
        Of streams they are those of `evaluation_streams`.
        """
        if self.streams is not None:
            yield from self._evaluation_of_streams(EvaluationStreams(sequences, self))
            return
        total = -(-sequences // self.micro_batch)
        for round_ in range(-(-total // self.ranks)):
            number = round_ * self.ranks + self.rank
            counts = number < total
            first = number * self.micro_batch if counts else 0
            count = min(self.micro_batch, sequences - first)
            samples = self.loader.samples(first, count)
            batch = self.objective.batch(*self._tensors(samples), **_labels(samples))
            if self.objective.head_sizes(self.objective.config) is not None:
                batch = batch.with_places(samples.index)
            yield (
                self._on_device(batch, shard_targets(batch.targets, self.sequence_sharding)),
                counts,
            )

    def _evaluation_of_streams(self, streams: "EvaluationStreams") -> Iterator[tuple[Batch, bool]]:
        states = None if self.new_states is None else self.new_states(streams.local_rows)
        for step in range(streams.steps):
            for row, numbers, is_read in streams.micro_batches(step):
                samples = self.loader.drawn(numbers)
                if step == 0:
                    samples = replace(samples, begins=torch.ones(len(samples), dtype=torch.bool))
                batch = self.objective.batch(*self._tensors(samples), **_labels(samples))
                if states is not None:
                    batch = self._of_streams(batch, samples, states, row)
                hidden = ~torch.tensor(is_read)[:, None]
                targets = batch.targets.masked_fill(hidden, IGNORE_INDEX)
                yield self._on_device(replace(batch, targets=targets), targets), any(is_read)
            if states is not None:
                states.commit()

    def _of_streams(self, batch: Batch, samples: Samples, states: SegmentStates, row: int) -> Batch:
        """Return the batch with the states of its rows, of which the first is the local row `row`."""
        signals: dict[Any, Any] = {SEGMENT_STATE: states.of_rows(row, len(samples))}
        if samples.begins is not None:
            signals[BEGINS] = samples.begins
        if self.separate:
            signals[NEXT_DOCUMENT] = samples.documents[:, -1]
        return replace(batch, tokens=batch.tokens.with_signals(signals))

    def _on_device(self, batch: Batch, targets: Tensor) -> Batch:
        """Copy to the device, and shard over cp; `targets` are this rank's shard of the batch's."""
        if self.sequence_sharding is None:
            return batch.to(self.device)
        find_document_runs(batch.tokens, batch.source)
        targets = targets.to(self.device, non_blocking=True)
        return shard_over_cp(batch.to(self.device), self.sequence_sharding, targets)

    def _tensors(self, samples: Samples) -> tuple[Tensor, Tensor | None, Tensor]:
        return samples.tokens, samples.documents if self.separate else None, samples.draw_numbers


class EvaluationStreams:
    """The first E segments of a text in as many streams as a training batch has rows, or fewer.

    Row r of W reads segments r E / W to (r + 1) E / W in turn; what a row has no segment for is not counted. W is a
    multiple of the micro-batch and does not depend on the ranks, so that they find the same loss.
    """

    def __init__(self, sequences: int, batches: MicroBatches) -> None:
        """`sequences` is E."""
        assert batches.streams is not None
        self._batches, self.sequences = batches, sequences
        size = batches.micro_batch
        self.rows = max(size, min(batches.streams, sequences) // size * size)
        self._per_rank = -(-self.rows // size // batches.ranks)
        self.local_rows = self._per_rank * size
        self.steps = -(-sequences // self.rows)

    def micro_batches(self, step: int) -> Iterator[tuple[int, list[int], list[bool]]]:
        """Yield the first local row, the segments and whether each counts, of this rank's micro-batches of a step."""
        size = self._batches.micro_batch
        for number in range(self._per_rank):
            first = (self._batches.rank * self._per_rank + number) * size
            starts, ends = self._bounds(first, size), self._bounds(first + 1, size)
            is_read = [start + step < end for start, end in zip(starts, ends, strict=True)]
            numbers = [min(start + step, self.sequences - 1) for start in starts]
            yield number * size, numbers, is_read

    def _bounds(self, row: int, count: int) -> list[int]:
        """Return the first segments of `count` rows from `row` on; those behind the last have none."""
        return [
            min(number, self.rows) * self.sequences // self.rows
            for number in range(row, row + count)
        ]


def _labels(samples: Samples) -> dict[str, Tensor]:
    """Return the field of the objective's batch with the labels, if the samples have any."""
    return {} if samples.labels is None else {"labels": samples.labels}


def shard_targets(targets: Tensor, sharding: SequenceSharding | None) -> Tensor:
    """This cp rank's shard of the targets [B, T] of each sequence; the loss ignores those that pad it."""
    return targets if sharding is None else sharding.shard_predicted(targets, fill=IGNORE_INDEX)


def shard_over_cp(
    batch: Batch, sharding: SequenceSharding | None, targets: Tensor | None = None
) -> Batch:
    """This cp rank's shard of each sequence; None: the batch as it is. `targets`: its shard of them, if made."""
    if sharding is None:
        return batch
    targets = shard_targets(batch.targets, sharding) if targets is None else targets
    source = None if batch.source is None else shard_tokens(batch.source, sharding)
    places = None if batch.places is None else sharding.shard_predicted(batch.places)
    return Batch(
        shard_tokens(batch.tokens, sharding, batch.targets), targets, source, places=places
    )
