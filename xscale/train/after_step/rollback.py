"""Rollback: a run restores its last good checkpoint and skips the samples that it read since then."""

from dataclasses import dataclass, field
from pathlib import Path

from xscale.checkpoint import load as loading
from xscale.observe import Observer
from xscale.run.parts import RunParts
from xscale.run.saved_state import state_check, state_of
from xscale.run.state import State
from xscale.step.step_batches import StepBatches
from xscale.train.after_step.run_saver import RunSaver
from xscale.train.optimizer_step.loss_spikes import SpikeError
from xscale.watchdog.distributed_stop import DistributedStop
from xscale.watchdog.watchdog import Watchdog


@dataclass
class Rollback:
    """Rolls the run back where a step's decision says so. Collective."""

    parts: RunParts
    state: State
    saver: RunSaver
    batches: StepBatches
    stop: DistributedStop
    watchdog: Watchdog
    observer: Observer
    counts: dict[int, int] = field(init=False, default_factory=dict)
    """Rollbacks of this process to each checkpoint, by step."""

    @property
    def is_possible(self) -> bool:
        """Whether the config asks for rollbacks, for which the run needs a checkpoint of its beginning."""
        train = self.parts.settings.train
        return "rollback" in (train.nonfinite, train.spike.policy)

    def restore(self, reason: str) -> None:
        """Restore the last good checkpoint and skip the samples since then, which the state records.

        StopRequested where a signal comes before the state is restored. SpikeError at the limit of rollbacks.
        """
        parts, state = self.parts, self.state
        at, end = state.step, state.consumed
        self.watchdog.heartbeat("rollback")
        self.stop.check()
        self.saver.wait()
        if self.saver.memory is not None:
            # Its checkpoint is newer than the one restored here, and a restart would resume from it.
            self.saver.memory.clear()
        tensors = parts.state_tensors()
        folder = Path(parts.settings.run.dir) / "checkpoints"
        verify, group = parts.settings.checkpoint.verify, parts.mesh.background
        self.watchdog.heartbeat("rollback", seconds=parts.settings.parallel.io_timeout_seconds)
        restored = loading.restore(
            folder, tensors, verify=verify, group=group, check=state_check(parts)
        )
        assert restored.loaded is not None, "the run saves before its first step"
        # The checkpoint on the disk stays the newest, so that the resumed run repeats this.
        self.stop.check()
        restored_state = state_of(restored.loaded, parts)
        parts.stepper.engine.after_load()
        restored_state.skipped_samples.append([restored_state.consumed, end])
        restored_state.consumed = end
        state.replace_with(restored_state)
        state.pending.clear()
        if parts.training.states is not None:
            # The samples that follow do not continue what the checkpoint's segments were.
            parts.training.states.reset()
        self.batches.begin(state.step, state.consumed)
        self._count(at, reason)

    def _count(self, at: int, reason: str) -> None:
        """Report the rollback from step `at`. SpikeError where the limit is reached."""
        step, limit = self.state.step, self.parts.settings.train.rollback_limit
        first, end = self.state.skipped_samples[-1]
        self.counts[step] = self.counts.get(step, 0) + 1
        if self.counts[step] > limit:
            raise SpikeError(
                f"step {at}: {reason}, after {limit} rollbacks to step {step} (train.rollback_limit)"
            )
        self.observer.rolled_back(step)
        self.observer.message(
            f"step {at}: {reason}; rolled back to step {step}, skipping samples {first} to {end - 1}"
        )
