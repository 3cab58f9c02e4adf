"""The training loop: everything that changes the run, from its first step to its last."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from xscale.checkpoint import load as loading
from xscale.checkpoint.async_saver import AsyncSaver
from xscale.checkpoint.files import RunLock
from xscale.checkpoint.in_memory import InMemoryCheckpoint
from xscale.core.config import encode
from xscale.core.errors import FaultError
from xscale.mesh.collectives import MeanOverOwners, mean_tensors
from xscale.nn.ffn.moe.statistics import copy_to_cpu, load_balance_metrics, nonfinite
from xscale.nn.forward import Stats
from xscale.nn.post_step import update_non_gradient_state
from xscale.observe import Observer, StepReport
from xscale.observe.events import Statistic
from xscale.observe.observer import is_due
from xscale.parallel.precision.loss_scale import LossScale
from xscale.parallel.shard.full_tensors import ShardedWeightWriter
from xscale.parallel.shard.sharded import StagedModel
from xscale.run.parts import RunParts
from xscale.run.saved_state import state_check, state_of
from xscale.run.state import State
from xscale.step.step import SpikeError, StepDecision, StepGradients, decide
from xscale.step.step_batches import StepBatches
from xscale.train.garbage_collection import GarbageCollection
from xscale.train.interruptible_work import InterruptibleWork
from xscale.train.kernel_log import KernelSelectionLog
from xscale.train.profiler import StepProfiler
from xscale.watchdog.distributed_stop import DistributedStop
from xscale.watchdog.watchdog import IoHeartbeat, Watchdog


@dataclass
class Loop:
    """The loop of one process; all ranks run it in lockstep."""

    parts: RunParts
    state: State
    observer: Observer
    stop: DistributedStop
    work: InterruptibleWork
    began: float
    saves: AsyncSaver
    watchdog: Watchdog
    memory: InMemoryCheckpoint | None
    lock: RunLock
    profiler: StepProfiler
    kernel_log: KernelSelectionLog
    """Kernel choices of the first step and of the work between steps."""
    garbage: GarbageCollection
    stalls: dict[int, float] = field(default_factory=dict)
    """Seconds that the loop waited for each save in flight, by step."""
    mean_over_stages: MeanOverOwners = field(init=False)
    batches: StepBatches = field(init=False)
    rollback_counts: dict[int, int] = field(default_factory=dict)
    """Rollbacks of this process to each checkpoint, by step."""
    ranks_that_save: float = 0.0
    """Ranks that were still writing a checkpoint in the last step."""
    saved_step: int | None = None
    """The step of the last save of this process, which is done or in flight."""

    def __post_init__(self) -> None:
        self.mean_over_stages = MeanOverOwners(self.parts.mesh.background)
        train = self.parts.settings.train
        limit = train.steps if train.stop_after is None else self.state.step + train.stop_after
        self.batches = StepBatches(self.parts.training, train.batch_size, min(limit, train.steps))

    def run(self) -> str | None:
        """Train until the last step or until something asks to stop; the cause of stopping, None when done."""
        train, state = self.parts.settings.train, self.state
        first = state.step
        self.parts.stepper.timer.on_phase = self.watchdog.heartbeat
        seconds = self.parts.settings.parallel.longest_timeout_seconds
        self.saves.on_wait = IoHeartbeat(self.watchdog, self.parts.mesh.io_progress, seconds)
        if isinstance(self.parts.model, StagedModel):
            self.parts.model.report_waits(self.watchdog.waits_for)
        if "rollback" in (train.nonfinite, train.spike.policy) and not state.step:
            self._save(must=True)
        with self.work.interruptible():
            self.stop.check()  # a signal may have come during the set-up
        self._do_work()
        self.batches.begin(state.step, state.consumed)
        cause = self.stop.cause
        while state.step < train.steps and cause is None:
            # Recording takes time, and later steps select the same kernels as the first.
            recording = self.kernel_log.recording() if state.step == first else contextlib.nullcontext()
            with recording, self.profiler.step(state.step + 1):
                decision = self._step()
            self.watchdog.started()
            self.garbage.after_step(state.step)
            self._log_kernels()
            self._report_saves()
            if decision.action == "rollback":
                with self.work.interruptible():
                    self._rollback(decision.reason)
                cause = self.stop.cause
                continue
            # A finished step can always be saved: with a signal nothing comes before that.
            self.work.find_due()
            self._do_work()
            is_limit = train.stop_after is not None and state.step - first >= train.stop_after
            cause = self.stop.cause or ("train.stop_after" if is_limit else None)
            self._save_if_due(cause)
        self.batches.close()
        if state.step == train.steps:
            self.work.find_due_at_end()
            self._do_work()
        return self.stop.cause or cause if state.step < train.steps or state.pending else None

    def _do_work(self) -> None:
        """Do what is due between steps, until a stop signal."""
        self.work.do()
        self._log_kernels()

    def _save_if_due(self, cause: str | None) -> None:
        """Save after a step where the config says so, and always after the last one and with a cause to stop."""
        step, config = self.state.step, self.parts.settings.checkpoint
        must = step == self.parts.settings.train.steps or cause is not None
        if must or (config.every_steps and step % config.every_steps == 0):
            self._save(must=must)
        elif self.memory is not None and step % config.memory_every_steps == 0:
            self._save_in_memory(self.memory)

    def _step(self) -> StepDecision:
        """Take one optimizer step: read, forward and backward, decide, update, report."""
        parts, state = self.parts, self.state
        train, stepper = parts.settings.train, parts.stepper
        start = time.perf_counter()
        state.step += 1
        self.watchdog.heartbeat("start", state.step)
        with stepper.timer.phase("data"):
            batch, targets = self.batches.take()
        scaling = self._loss_scale()
        scale = None if scaling is None else scaling.scale
        gradients = stepper.compute_gradients(batch.micro_batches, scale, targets, self._ride)
        decision = self._decide(gradients, scaling)
        lr = parts.settings.optimizer.lr * parts.schedule.factor(state.step)
        self._wait_for_copy()
        if decision.action == "accept":
            stepper.apply(gradients, lr, (state.step - 1) / train.steps)
        else:
            stepper.discard()
        state.consumed += train.batch_size
        state.tokens += train.batch_size * parts.settings.sample_tokens
        means = self._mean(batch.tally)
        if decision.action == "accept":
            update_non_gradient_state(parts.model, means, ShardedWeightWriter(parts.model))
            if (ema := stepper.engine.ema) is not None:
                ema.update()
        self.watchdog.heartbeat("report")
        self._count_skipped(gradients, decision, means)
        self._report(gradients, lr, means, time.perf_counter() - start)
        self._agree(gradients.sums)
        return decision

    def _loss_scale(self) -> LossScale | None:
        """Return the scale of the loss in this step; None: it is not scaled."""
        precision, state = self.parts.settings.precision, self.state
        if precision.compute != "float16":
            return None
        return LossScale(state.loss_scale or precision.loss_scale.initial, state.loss_scale_steps)

    def _decide(self, gradients: StepGradients, scaling: LossScale | None) -> StepDecision:
        """Decide about the step, and set the scale of the loss in the next one."""
        settings, state = self.parts.settings, self.state
        loss, norm = gradients.loss, gradients.grad_norm
        if scaling is not None:
            overflow = scaling.overflows(settings.precision.loss_scale, loss, norm)
            following = scaling.after(settings.precision.loss_scale, overflow=overflow)
            state.loss_scale, state.loss_scale_steps = following.scale, following.steps
            if overflow:
                reason = f"gradients overflow; the loss scale falls from {scaling.scale:g} to {following.scale:g}"
                return StepDecision("lower_loss_scale", reason)
        return decide(settings.train, state.losses, loss, norm)

    def _mean(self, tally: Stats) -> dict[str, Tensor]:
        """Mean of the step's statistics over all ranks; a stage of a pipeline has those of its own layers."""
        mesh = self.parts.mesh
        return mean_tensors(tally.means()) if mesh.degrees.pp < 2 else self.mean_over_stages(*tally.copy(), mesh.device)

    def _wait_for_copy(self) -> None:
        """Wait until the save in flight has copied the weights, which the update is about to change."""
        seconds = self.saves.wait_copied()
        if self.state.step - 1 in self.stalls:
            self.stalls[self.state.step - 1] += seconds

    def _count_skipped(self, gradients: StepGradients, decision: StepDecision, means: dict[str, Tensor]) -> None:
        """Remember the loss of an accepted step; report and count another. SpikeError where the run must end."""
        state, train = self.state, self.parts.settings.train
        if decision.action == "accept":
            state.skipped_in_a_row = 0
            if train.spike.policy != "none":
                state.losses = [*state.losses, gradients.loss][-train.spike.window :]
            return
        if decision.action == "lower_loss_scale":
            # The search for the scale belongs to float16; it is no fault of the data or the weights.
            self.observer.message(f"step {state.step}: {decision.reason}, and the step is skipped")
            return
        state.skipped += 1
        state.skipped_in_a_row += 1
        what = f"step {state.step}: {decision.reason}"
        if routers := nonfinite(means):
            what += f", with non-finite routing in {', '.join(routers)}"
        if decision.action == "stop":
            raise SpikeError(f"{what}; the policy is to stop. The last checkpoint is older than this step")
        if decision.action == "rollback":
            return
        self.observer.message(f"{what}; the step is skipped ({state.skipped_in_a_row} in a row)")
        if state.skipped_in_a_row > train.skip_limit:
            count = f"skipped step {state.skipped_in_a_row} in a row; train.skip_limit is {train.skip_limit}"
            raise SpikeError(f"{what}, {count}")

    def _rollback(self, reason: str) -> None:
        """Restore the last good checkpoint and skip the samples since then, which the state records. Collective.

        StopRequested where a signal comes before the state is restored.
        """
        parts, state = self.parts, self.state
        at, end = state.step, state.consumed
        self.watchdog.heartbeat("rollback")
        self.stop.check()
        self.saves.wait()
        self._report_saves()
        if self.memory is not None:
            # Its checkpoint is newer than the one restored here, and a restart would resume from it.
            self.memory.clear()
        tensors = parts.stepper.engine.state_tensors()
        folder = Path(parts.settings.run.dir) / "checkpoints"
        verify, group = parts.settings.checkpoint.verify, parts.mesh.background
        self.watchdog.heartbeat("rollback", seconds=parts.settings.parallel.io_timeout_seconds)
        restored = loading.restore(folder, tensors, verify=verify, group=group, check=state_check(parts))
        assert restored.loaded is not None, "the run saves before its first step"
        # The checkpoint on the disk stays the newest, so that the resumed run repeats this.
        self.stop.check()
        restored_state = state_of(restored.loaded, parts)
        parts.stepper.engine.after_load()
        restored_state.skipped_samples.append([restored_state.consumed, end])
        restored_state.consumed = end
        count = self.rollback_counts[restored_state.step] = self.rollback_counts.get(restored_state.step, 0) + 1
        state.replace_with(restored_state)
        state.pending.clear()
        self.batches.begin(state.step, state.consumed)
        limit, first = parts.settings.train.rollback_limit, restored_state.skipped_samples[-1][0]
        if count > limit:
            what = f"step {at}: {reason}, after {limit} rollbacks to step {restored_state.step} (train.rollback_limit)"
            raise SpikeError(what)
        self.observer.rolled_back(restored_state.step)
        self.observer.message(
            f"step {at}: {reason}; rolled back to step {restored_state.step}, skipping samples {first} to {end - 1}"
        )

    def _report(self, gradients: StepGradients, lr: float, means: dict[str, Tensor], seconds: float) -> None:
        parts = self.parts
        state = self.state
        train = self.parts.settings.train
        flops = parts.flops_per_sample * train.batch_size / seconds
        peak = None if parts.peak is None else parts.peak * parts.mesh.rank_info.world
        self.observer.step(
            StepReport(
                step=state.step,
                loss=gradients.loss,
                lr=lr,
                grad_norm=gradients.grad_norm,
                tokens=state.tokens,
                seconds=time.perf_counter() - self.began,
                step_seconds=seconds,
                tokens_per_second=train.batch_size * parts.settings.sample_tokens / seconds,
                mfu=None if peak is None else flops / peak,
                split=parts.stepper.timer.flush(),
                statistics=self._statistics(means, gradients),
                skipped=state.skipped,
                loss_scale=gradients.loss_scale,
            )
        )

    def _statistics(self, means: dict[str, Tensor], gradients: StepGradients) -> dict[str, Statistic]:
        """Read the statistics where they are logged: the host waits for the device there."""
        settings = self.parts.settings
        due = is_due(self.state.step, settings.observe.every_steps, settings.train.steps)
        if not (due and self.parts.mesh.rank_info.is_rank0):
            return {}
        on_cpu = copy_to_cpu(means)
        norms = {f"{group}/grad_norm": norm for group, norm in gradients.group_norms.items()}
        values = {name: value.tolist() for name, value in on_cpu.items() if value.dim() < 2}
        return {**values, **load_balance_metrics(on_cpu), **norms}

    def _log_kernels(self) -> None:
        if text := self.kernel_log.drain():
            self.observer.kernels_logged(text)

    def _agree(self, sums: Sequence[float]) -> None:
        """Take what rode in the step's reduction: targets of the next step and facts of any rank, the same on all.

        FaultError where the run folder is no longer there.
        """
        targets, *counts = sums
        self.batches.set_targets(self.parts.stepper.targets_of(targets))
        if self.parts.mesh.rank_info.is_single_process:
            counts = self._facts()  # what has happened since
        stops, vanished, self.ranks_that_save = counts
        self.stop.agree(stops)
        if vanished:
            what = f"the run folder was deleted, moved or replaced during step {self.state.step}, or another run has it"
            fix = "Move it back and start the same command again, which resumes from its newest checkpoint"
            raise FaultError(f"{self.parts.settings.run.dir}: {what}, so nothing can be saved. {fix}.")

    def _facts(self) -> list[float]:
        """Facts of this rank that are to be known to all after the step."""
        return [float(self.stop.flag), float(not self.lock.is_in_place()), float(self.saves.is_writing)]

    def _ride(self) -> list[float]:
        """Numbers to sum over the ranks in the step's reduction, for `_agree`."""
        with self.parts.stepper.timer.phase("data"):
            targets = self.batches.make_early()
        return [float(targets), *self._facts()]

    def _save_in_memory(self, memory: InMemoryCheckpoint) -> None:
        """Copy the state into memory that outlives this process."""
        parts, state = self.parts, self.state
        self.watchdog.heartbeat("save in memory", seconds=parts.settings.parallel.longest_timeout_seconds)
        engine = parts.stepper.engine
        self.saves.save_in_memory(memory, state.step, engine.state_tensors(), state.encode(engine))

    def _save(self, *, must: bool) -> None:
        """Start a save. One that `must` succeed is waited for; of the others some may fail, up to a limit."""
        parts, state = self.parts, self.state
        self.watchdog.heartbeat("save", seconds=parts.settings.parallel.longest_timeout_seconds)
        engine = parts.stepper.engine
        tensors = engine.state_tensors()
        counters, config = state.encode(engine), encode(parts.settings)
        in_flight = self.ranks_that_save > 0
        started = self.saves.save(
            state.step, tensors, counters, config, required=must, copy_in_background=True, in_flight=in_flight
        )
        if started.skipped:
            self.observer.message(f"step {state.step} is not saved: the previous save is still in flight")
            return
        self.saved_step = state.step
        self.stalls[state.step] = started.stall_seconds
        begin = time.perf_counter()
        if must:
            self.saves.close()
        elif not parts.settings.checkpoint.asynchronous:
            self.saves.wait()
        self.stalls[state.step] += time.perf_counter() - begin
        self._report_saves()

    def _report_saves(self) -> None:
        for save in self.saves.finished():
            stall = self.stalls.pop(save.step, 0.0)
            action = "kept in memory" if save.in_memory else "saved"
            if save.path is not None and save.in_memory:
                continue
            if save.path is not None:
                self.observer.saved(save.step, save.path, stall)
            else:
                self.observer.message(f"step {save.step} could not be {action}: {save.error}; training continues")
