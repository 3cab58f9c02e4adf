"""The training loop: one step, then what is due after it, until the last step or a cause to stop."""

import contextlib
from dataclasses import dataclass

from xscale.run.parts import RunParts
from xscale.run.state import State
from xscale.step.step_batches import StepBatches
from xscale.train.after_step.due_work import DueWork
from xscale.train.compile_artifacts import CompileArtifacts
from xscale.train.kernel_log import KernelSelectionLog
from xscale.train.optimizer_step.optimizer_step import OptimizerStep
from xscale.train.profiler import StepProfiler
from xscale.watchdog.distributed_stop import DistributedStop
from xscale.watchdog.watchdog import Watchdog


@dataclass
class Loop:
    """The loop of one process; all ranks run it in lockstep."""

    parts: RunParts
    state: State
    batches: StepBatches
    step: OptimizerStep
    due: DueWork
    stop: DistributedStop
    watchdog: Watchdog
    profiler: StepProfiler
    kernel_log: KernelSelectionLog
    artifacts: CompileArtifacts

    def run(self) -> str | None:
        """Train until the last step or until something asks to stop; the cause of stopping, None when done."""
        steps, state = self.parts.settings.train.steps, self.state
        self.due.before_first_step()
        self.batches.begin(state.step, state.consumed)
        first = state.step
        while state.step < steps and self.stop.cause is None:
            # Recording takes time, and later steps select the same kernels as the first.
            recording = (
                self.kernel_log.recording() if state.step == first else contextlib.nullcontext()
            )
            with recording, self.profiler.step(state.step + 1):
                step = self.step.take()
            if state.step == first + 1:
                # Before anything can end the run, whose next start needs them.
                self.artifacts.save()
            self.watchdog.started()
            self.due.after(step)
        self.batches.close()
        self.due.at_end()
        self.artifacts.save()
        return self.stop.cause if state.step < steps or state.pending else None
