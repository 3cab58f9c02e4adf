"""Facts of any rank that all ranks learn of in the reduction of each step, without a collective of their own."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xscale.checkpoint.async_saver import AsyncSaver
from xscale.checkpoint.files import RunLock
from xscale.checkpoint.save import save
from xscale.core.config import encode
from xscale.core.errors import FaultError
from xscale.mesh.consensus import Consensus
from xscale.run.parts import RunParts
from xscale.run.run_folder import CHECKPOINTS
from xscale.run.state import State
from xscale.step.step_batches import StepBatches
from xscale.watchdog.distributed_stop import DistributedStop


@dataclass
class RankFacts:
    """The targets of the next step, stop signals, a run folder that is lost, and saves in flight."""

    parts: RunParts
    state: State
    batches: StepBatches
    stop: DistributedStop
    lock: RunLock
    saves: AsyncSaver
    ranks_that_save: float = field(init=False, default=0.0)
    """Ranks that were still writing a checkpoint in the last step."""

    def collect(self) -> list[float]:
        """Return numbers to sum over the ranks in the step's reduction, for `agree`; makes the next step's batch."""
        with self.parts.stepper.timer.phase("data"):
            targets = self.batches.make_early()
        return [float(targets), *self._of_this_rank()]

    def agree(self, sums: Sequence[float], *, is_good: bool) -> None:
        """Take the sums of what `collect` returned, the same on all ranks. FaultError where the run folder is lost.

        The step is saved then, if it `is_good` and the folder was moved to a place that is known. Collective.
        """
        targets, *counts = sums
        self.batches.set_targets(self.parts.stepper.targets_of(targets))
        if self.parts.mesh.rank_info.is_single_process:
            counts = self._of_this_rank()  # what has happened since
        stops, vanished, self.ranks_that_save = counts
        self.stop.agree(stops)
        if vanished:
            raise FaultError(f"{self.parts.settings.run.dir}: {self._lost(is_good)}")

    def _lost(self, is_good: bool) -> str:
        """Save the step where the run folder was moved to, and return what became of both. Collective."""
        step, group = self.state.step, self.parts.mesh.background
        ranks = Consensus(group, doing="saved")
        moved = ranks.on_rank0(Path(self.parts.settings.run.dir), self.lock.folder_moved_to)
        what = f"the run folder was deleted, moved or replaced during step {step}, or another run has it"
        if moved is not None and is_good:
            what, engine = (
                f"the run folder was moved to {moved} during step {step}",
                self.parts.stepper.engine,
            )
            with contextlib.suppress(FaultError):
                self.saves.wait()
            try:
                state, config = self.state.encode(engine), encode(self.parts.settings)
                tensors = self.parts.state_tensors()
                save(moved / CHECKPOINTS, step, tensors, state, config, group=group)
            except FaultError as error:
                what += f", where {error}"
            else:
                return f"{what}, and the step is saved there. Start again with run.dir={moved}, which resumes from it."
        fix = "Move it back and start the same command again, which resumes from its newest checkpoint"
        return f"{what}, so nothing can be saved. {fix}."

    def _of_this_rank(self) -> list[float]:
        return [
            float(self.stop.flag),
            float(not self.lock.is_in_place()),
            float(self.saves.is_writing),
        ]
