"""Build the training loop of a run from its parts: the step, what is due after it, and what the watchdog sees."""

from dataclasses import dataclass

from xscale.checkpoint.async_saver import AsyncSaver
from xscale.checkpoint.files import RunLock
from xscale.checkpoint.in_memory import InMemoryCheckpoint
from xscale.observe import Observer
from xscale.parallel.shard.sharded import StagedModel
from xscale.run.parts import RunParts
from xscale.run.state import State
from xscale.step.step_batches import StepBatches
from xscale.train.after_step.due_work import DueWork
from xscale.train.after_step.rank_facts import RankFacts
from xscale.train.after_step.rollback import Rollback
from xscale.train.after_step.run_saver import RunSaver
from xscale.train.after_step.step_reporter import StepReporter
from xscale.train.compile_artifacts import CompileArtifacts
from xscale.train.garbage_collection import GarbageCollection
from xscale.train.interruptible_work import InterruptibleWork
from xscale.train.kernel_log import KernelSelectionLog
from xscale.train.loop import Loop
from xscale.train.optimizer_step.loss_scaling import LossScaling
from xscale.train.optimizer_step.loss_spikes import LossSpikes
from xscale.train.optimizer_step.optimizer_step import OptimizerStep
from xscale.train.optimizer_step.statistics import StepStatistics
from xscale.train.profiler import StepProfiler
from xscale.train.run_work import RunWork
from xscale.watchdog.distributed_stop import DistributedStop
from xscale.watchdog.watchdog import IoHeartbeat, StopSignal, Watchdog


@dataclass(frozen=True)
class LoopContext:
    """Resources that a process has opened for its loop, and closes behind it."""

    observer: Observer
    watchdog: Watchdog
    profiler: StepProfiler
    garbage: GarbageCollection
    signal: StopSignal
    saves: AsyncSaver
    memory: InMemoryCheckpoint | None
    lock: RunLock
    artifacts: CompileArtifacts
    began: float
    """When the process began, by `time.perf_counter`."""


def make_loop(parts: RunParts, state: State, context: LoopContext) -> Loop:
    """The loop of a run that begins with `state`."""
    observer, watchdog = context.observer, context.watchdog
    train = parts.settings.train
    kernel_log, stop = KernelSelectionLog(), DistributedStop(context.signal, parts.mesh.device)
    last_step = (
        train.steps if train.stop_after is None else min(state.step + train.stop_after, train.steps)
    )
    batches = StepBatches(parts.training, train.batch_size, last_step)
    facts = RankFacts(parts, state, batches, stop, context.lock, context.saves)
    saver = RunSaver(parts, state, context.saves, context.memory, facts, stop, watchdog, observer)
    if parts.mesh.device.type == "cuda" and parts.settings.checkpoint.every_steps:
        context.saves.prepare(parts.state_tensors())
    spikes = LossSpikes(train, state, observer)
    scaling = LossScaling(parts.settings.precision, state, observer)
    step = OptimizerStep(
        settings=parts.settings,
        state=state,
        model=parts.model,
        stepper=parts.stepper,
        schedule=parts.schedule,
        batches=batches,
        loss_scaling=scaling,
        policies=(scaling, spikes),
        statistics=StepStatistics(parts.mesh),
        watchdog=watchdog,
        scalars=facts.collect,
        before_update=saver.wait_for_copy,
        segment_states=parts.training.states,
    )
    works = RunWork(parts, state, observer, stop, watchdog, context.profiler).table()
    around = (kernel_log.recording, context.garbage.automatic)
    due = DueWork(
        train=train,
        state=state,
        last_step=last_step,
        stop=stop,
        reporter=StepReporter(parts, state, observer, kernel_log, context.began),
        facts=facts,
        garbage=context.garbage,
        rollback=Rollback(parts, state, saver, batches, stop, watchdog, observer),
        work=InterruptibleWork(works, state, stop, parts.model, around),
        saver=saver,
    )
    _report_progress(parts, context.saves, watchdog)
    return Loop(
        parts,
        state,
        batches,
        step,
        due,
        stop,
        watchdog,
        context.profiler,
        kernel_log,
        context.artifacts,
    )


def _report_progress(parts: RunParts, saves: AsyncSaver, watchdog: Watchdog) -> None:
    """Let the watchdog see the phases of a step, the waits for a save and those between pipeline stages."""
    parts.stepper.timer.on_phase = watchdog.heartbeat
    saves.on_wait = IoHeartbeat(
        watchdog, parts.mesh.io_progress, parts.settings.parallel.longest_timeout_seconds
    )
    if isinstance(parts.model, StagedModel):
        parts.model.report_waits(watchdog.waits_for)
