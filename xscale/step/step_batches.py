"""The micro-batches of each step; those of the next step are made while the device computes this one."""

from collections.abc import Generator
from dataclasses import dataclass, field

from xscale.data.samples.loader import Samples
from xscale.nn.forward import Stats
from xscale.objective.objective import Batch
from xscale.step.batches import MicroBatches


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one step on this rank."""

    step: int
    micro_batches: list[Batch]
    tally: Stats = field(default_factory=Stats)
    """Collects the statistics of the step."""

    @property
    def targets(self) -> int:
        """Targets in them."""
        return sum(batch.target_count for batch in self.micro_batches)


class StepBatches:
    """The batches of a run's steps in order, each of which may be made before its step begins."""

    def __init__(self, batches: MicroBatches, batch_size: int, last_step: int) -> None:
        """`batch_size`: sequences in a step, over all ranks. `last_step`: the last that this process takes."""
        self._batches = batches
        self._batch_size = batch_size
        self._last = last_step
        self._samples: Generator[Samples, None, None] | None = None
        self._next_step = 1
        self._made: StepBatch | None = None
        self._targets: float | None = None

    def begin(self, step: int, consumed: int) -> None:
        """Begin behind `step`, with sample `consumed`: at the start of the run, and after a rollback."""
        self.close()
        self._next_step = step + 1
        self._samples = self._read(consumed, self._last - step)

    def make_early(self) -> int:
        """Make the batch of the next step, if there is one; return the number of its targets on this rank."""
        if self._next_step > self._last:
            return 0
        self._made = self._make()
        return self._made.targets

    def set_targets(self, count: float) -> None:
        """Note the number of targets, over all ranks, of the batch that was made early, if one was."""
        if self._made is not None:
            self._targets = count

    def take(self) -> tuple[StepBatch, float | None]:
        """Return the batch of the next step, and the number of its targets over all ranks, None if not known."""
        batch, targets = self._made or self._make(), self._targets
        self._made = self._targets = None
        self._next_step += 1
        return batch, targets

    def close(self) -> None:
        """Stop reading ahead, and drop the batch that is made."""
        self._made = self._targets = None
        if self._samples is not None:
            self._samples.close()
            self._samples = None

    def _read(self, consumed: int, steps: int) -> Generator[Samples, None, None]:
        """Yield the samples of this rank's micro-batches, read ahead in the background."""
        yield from self._batches.loader.stream(
            self._batches.requests(consumed, self._batch_size, steps)
        )

    def _make(self) -> StepBatch:
        assert self._samples is not None, "the batches have not begun"
        batch = StepBatch(self._next_step, [])
        for _ in range(self._batch_size // (self._batches.micro_batch * self._batches.ranks)):
            samples = next(self._samples)
            batch.micro_batches.append(
                self._batches.make(samples, batch.step, self._batch_size, batch.tally)
            )
        return batch
