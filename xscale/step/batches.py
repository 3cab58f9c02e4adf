"""The micro-batches of this data-parallel rank: the same micro-batches on every layout, distributed over the ranks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from xscale.data.samples.loader import Loader, Samples
from xscale.nn.forward import Forward, Stats
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.init import seed_of
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

    def requests(self, first: int, batch: int, steps: int) -> Iterator[tuple[int, int]]:
        """Yield (first sample, count) of each micro-batch of this rank, for `steps` steps from sample `first` on."""
        for step in range(steps):
            for number in range(self.rank, batch // self.micro_batch, self.ranks):
                yield first + step * batch + number * self.micro_batch, self.micro_batch

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
        targets = shard_targets(micro_batch.targets, self.sequence_sharding)
        # Counted here, because on a GPU the host would wait for the count.
        counted = int((targets != IGNORE_INDEX).sum())
        return replace(self._on_device(micro_batch, targets), counted=counted)

    def evaluation(self, sequences: int) -> Iterator[tuple[Batch, bool]]:
        """Yield this rank's micro-batches of the first `sequences` samples, and whether each counts.

        Ranks that run out repeat the first micro-batch, which does not count there, so that all do equally many.
        """
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

    def _on_device(self, batch: Batch, targets: Tensor) -> Batch:
        """Copy to the device, and shard over cp; `targets` are this rank's shard of the batch's."""
        if self.sequence_sharding is None:
            return batch.to(self.device)
        find_document_runs(batch.tokens, batch.source)
        targets = targets.to(self.device, non_blocking=True)
        return shard_over_cp(batch.to(self.device), self.sequence_sharding, targets)

    def _tensors(self, samples: Samples) -> tuple[Tensor, Tensor | None, Tensor]:
        return samples.tokens, samples.documents if self.separate else None, samples.draw_numbers


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
