"""The training loop: everything that changes the run, from its first step to its last."""

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from xscale.checkpoint import load as loading
from xscale.checkpoint.async_saver import AsyncSaver
from xscale.checkpoint.files import RunLock
from xscale.checkpoint.in_memory import InMemoryCheckpoint
from xscale.core.config import encode
from xscale.core.errors import ConfigError, FaultError
from xscale.data.loader import Samples
from xscale.data.stored_tokenizer import FOLDER, require_fingerprint
from xscale.mesh.collectives import MeanOverOwners, mean_tensors, sum_scalars
from xscale.nn.moe.statistics import copy_to_cpu, load_balance_metrics, nonfinite
from xscale.nn.post_step import update_non_gradient_state
from xscale.nn.tokens import Stats
from xscale.objective.objective import Batch
from xscale.observe import EvalReport, Observer, StepReport
from xscale.observe.events import Statistic
from xscale.observe.observer import is_due
from xscale.parallel.full_tensors import gather_full
from xscale.parallel.loss_scale import LossScale
from xscale.parallel.sharded import StagedModel, shard_like
from xscale.train.evaluate import Evaluation, evaluate
from xscale.train.kernel_log import KernelSelectionLog
from xscale.train.profiler import StepProfiler
from xscale.train.run_folder import CHANGEABLE, differences, lookup, problems_of, with_defaults
from xscale.train.setup import RunParts
from xscale.train.state import State
from xscale.train.step import SpikeError, StepDecision, StepGradients, decide
from xscale.train.tasks import report_tasks
from xscale.watchdog.watchdog import IoHeartbeat, StopSignal, Watchdog


@dataclass
class Loop:
    """The loop of one process; all ranks run it in lockstep."""

    parts: RunParts
    state: State
    observer: Observer
    stop: StopSignal
    began: float
    saves: AsyncSaver
    watchdog: Watchdog
    memory: InMemoryCheckpoint | None
    lock: RunLock
    profiler: StepProfiler
    stalls: dict[int, float] = field(default_factory=dict)
    """Seconds that the loop waited for each save in flight, by step."""
    kernel_log: KernelSelectionLog = field(default_factory=KernelSelectionLog)
    """Kernel choices of the first step and of evaluations."""
    mean_over_stages: MeanOverOwners = field(init=False)
    rollback_counts: dict[int, int] = field(default_factory=dict)
    """Rollbacks of this process to each checkpoint, by step."""

    def __post_init__(self) -> None:
        self.mean_over_stages = MeanOverOwners(self.parts.mesh.background)

    def run(self) -> str | None:
        """Train until the last step or until something asks to stop; the cause of stopping, None when done."""
        train, state = self.parts.settings.train, self.state
        first = state.step
        self.parts.stepper.timer.on_phase = self.watchdog.heartbeat
        self.saves.on_wait = IoHeartbeat(self.watchdog, self.parts.mesh.io_progress)
        if isinstance(self.parts.model, StagedModel):
            self.parts.model.report_waits(self.watchdog.waits_for)
        cause = None
        samples = self._samples(train.steps - state.step)
        if "rollback" in (train.nonfinite, train.spike.policy) and not state.step:
            self._save(must=True)
        while state.step < train.steps and cause is None:
            # Recording takes time, and later steps select the same kernels as the first.
            recording = self.kernel_log.recording() if state.step == first else contextlib.nullcontext()
            with recording, self.profiler.step(state.step + 1):
                decision = self._step(samples)
            self._log_kernels()
            self._report_saves()
            if decision.action == "rollback":
                samples.close()
                self._rollback(decision.reason)
                samples = self._samples(train.steps - state.step)
                continue
            cause = self._should_stop(state.step - first)
            last = state.step == train.steps
            every = train.eval_every
            if self.parts.validation is not None and every and (state.step % every == 0 or last):
                with self.kernel_log.recording():
                    self._evaluate()
                self._log_kernels()
            tasks = train.tasks
            if tasks.names and (state.step % tasks.every_steps == 0 or last):
                self._evaluate_tasks()
            config = self.parts.settings.checkpoint
            if last or cause is not None or (config.every_steps and state.step % config.every_steps == 0):
                self._save(must=last or cause is not None)
            elif self.memory is not None and state.step % config.memory_every_steps == 0:
                self._save_in_memory(self.memory)
        samples.close()
        return cause if state.step < train.steps else None

    def _step(self, samples: Iterator[Samples]) -> StepDecision:
        """Take one optimizer step: read, forward and backward, decide, update, report."""
        parts, state = self.parts, self.state
        train, stepper = parts.settings.train, parts.stepper
        start = time.perf_counter()
        tally = Stats()
        state.step += 1
        self.watchdog.heartbeat("start", state.step)
        with stepper.timer.phase("data"):
            micro_batches = self._micro_batches(samples, tally)
        scaling = self._loss_scale()
        gradients = stepper.compute_gradients(micro_batches, None if scaling is None else scaling.scale)
        decision = self._decide(gradients, scaling)
        lr = parts.settings.optimizer.lr * parts.schedule.factor(state.step)
        self._wait_for_copy()
        if decision.action == "accept":
            stepper.apply(gradients, lr, (state.step - 1) / train.steps)
        else:
            stepper.discard()
        state.consumed += train.batch_size
        state.tokens += train.batch_size * parts.settings.sample_tokens
        means = self._mean(tally)
        if decision.action == "accept":
            update_non_gradient_state(parts.model, means, shard_like, gather_full)
            if (ema := stepper.engine.ema) is not None:
                ema.update()
        self.watchdog.heartbeat("report")
        self._count_skipped(gradients, decision, means)
        self._report(gradients, lr, means, time.perf_counter() - start)
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

    def _samples(self, steps: int) -> Generator[Samples, None, None]:
        """Samples of this rank's micro-batches for the next `steps` steps, read ahead in the background."""
        batches, batch_size = self.parts.training, self.parts.settings.train.batch_size
        yield from batches.loader.stream(batches.requests(self.state.consumed, batch_size, steps))

    def _micro_batches(self, samples: Iterator[Samples], tally: Stats) -> list[Batch]:
        batches, batch_size = self.parts.training, self.parts.settings.train.batch_size
        count = batch_size // (batches.micro_batch * batches.ranks)
        return [batches.make(next(samples), self.state.step, batch_size, tally) for _ in range(count)]

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
        """Restore the last good checkpoint and skip the samples since then, which the state records. Collective."""
        parts, state = self.parts, self.state
        at, end = state.step, state.consumed
        self.watchdog.heartbeat("rollback")
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
        restored_state = state_of(restored.loaded, parts)
        parts.stepper.engine.after_load()
        restored_state.skipped_samples.append([restored_state.consumed, end])
        restored_state.consumed = end
        count = self.rollback_counts[restored_state.step] = self.rollback_counts.get(restored_state.step, 0) + 1
        state.replace_with(restored_state)
        limit, first = parts.settings.train.rollback_limit, restored_state.skipped_samples[-1][0]
        if count > limit:
            what = f"step {at}: {reason}, after {limit} rollbacks to step {restored_state.step} (train.rollback_limit)"
            raise SpikeError(what)
        self.observer.rolled_back(restored_state.step)
        self.observer.message(
            f"step {at}: {reason}; rolled back to step {restored_state.step}, skipping samples {first} to {end - 1}"
        )

    def _report(self, gradients: StepGradients, lr: float, means: dict[str, Tensor], seconds: float) -> None:
        parts, state, train = self.parts, self.state, self.parts.settings.train
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

    def _should_stop(self, steps: int) -> str | None:
        """Why to stop after this step, the `steps`-th of this process; the same on all ranks. Collective.

        FaultError where the run folder is no longer there.
        """
        limit = self.parts.settings.train.stop_after
        self.watchdog.heartbeat("stop check")
        flags = [float(self.stop.cause is not None), float(not self.lock.is_in_place())]
        stop_requested, vanished = (count > 0 for count in sum_scalars(flags, self.parts.mesh.device))
        if vanished:
            what = f"the run folder was deleted, moved or replaced during step {self.state.step}, or another run has it"
            fix = "Move it back and start the same command again, which resumes from its newest checkpoint"
            raise FaultError(f"{self.parts.settings.run.dir}: {what}, so nothing can be saved. {fix}.")
        if stop_requested:
            return self.stop.cause or "a signal to another rank"
        return "train.stop_after" if limit is not None and steps >= limit else None

    def _evaluate(self) -> None:
        parts, state = self.parts, self.state
        start = time.perf_counter()
        with parts.stepper.engine.evaluation_weights():
            result = self._evaluate_model()
        best = state.best_bits_per_byte
        if math.isfinite(result.bits_per_byte) and (best is None or result.bits_per_byte < best):
            state.best_bits_per_byte, state.best_step = result.bits_per_byte, state.step
        seconds = time.perf_counter() - start
        numbers = (result.loss, result.perplexity, result.bits_per_byte, seconds)
        ema_loss = None
        if (ema := parts.stepper.engine.ema) is not None:
            with ema.replacing_weights():
                ema_loss = self._evaluate_model().loss
        self.observer.evaluated(EvalReport(state.step, *numbers, result.metrics, ema_loss))

    def _evaluate_model(self) -> Evaluation:
        """Evaluate the model as it is on the validation documents. Collective."""
        parts = self.parts
        assert parts.validation is not None
        batches = self.watchdog.heartbeats(parts.validation.evaluation(parts.eval_sequences), "evaluate")
        names, stages = parts.validation.loader.class_names, parts.mesh.degrees.pp
        return evaluate(parts.model, parts.objective, batches, parts.token_bytes, stages, names)

    def _evaluate_tasks(self) -> None:
        """Evaluate the tasks of the config; a request that the model cannot answer is reported and ends nothing."""
        seconds = self.parts.settings.parallel.io_timeout_seconds
        beat = partial(self.watchdog.heartbeat, "tasks", seconds=seconds)
        try:
            with self.parts.stepper.engine.evaluation_weights():
                report = report_tasks(self.parts, self.state.step, beat)
            self.observer.tasks_evaluated(report)
        except ConfigError as error:
            # Every rank has the same refusal, before it computes anything.
            self.observer.message(f"step {self.state.step}: the tasks are not evaluated: {error}; training continues")

    def _save_in_memory(self, memory: InMemoryCheckpoint) -> None:
        """Copy the state into memory that outlives this process."""
        parts, state = self.parts, self.state
        self.watchdog.heartbeat("save in memory")
        engine = parts.stepper.engine
        self.saves.save_in_memory(memory, state.step, engine.state_tensors(), state.encode(engine))

    def _save(self, *, must: bool) -> None:
        """Start a save. One that `must` succeed is waited for; of the others some may fail, up to a limit."""
        parts, state = self.parts, self.state
        self.watchdog.heartbeat("save")
        engine = parts.stepper.engine
        tensors = engine.state_tensors()
        counters, config = state.encode(engine), encode(parts.settings)
        started = self.saves.save(state.step, tensors, counters, config, required=must, copy_in_background=True)
        if started.skipped:
            self.observer.message(f"step {state.step} is not saved: the previous save is still in flight")
            return
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


def state_check(parts: RunParts) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """Return what checks the state and config of a checkpoint before a run resumes from it.

    It raises ValueError for a state or config that no run writes, ConfigError for those of another run.
    """

    def check(state: dict[str, Any], config: dict[str, Any]) -> None:
        State.check(state, parts.stepper.engine.counters())
        length = lookup(config, "data.sequence_length")
        if type(length) is not int or not 1 <= length < 2**31:
            raise ValueError(f"data.sequence_length is {str(length)[:40]}")
        if changed := differences(with_defaults(config), encode(parts.settings), CHANGEABLE):
            raise ConfigError(problems_of(changed, "a checkpoint in it is of another run"))

    return check


def state_of(loaded: loading.Loaded, parts: RunParts) -> State:
    """The state in a checkpoint, for samples of this run's length; sets the engine's counters."""
    before = loaded.config["data"]["sequence_length"]
    state = State.decode(loaded.state, parts.stepper.engine, parts.settings.data.sequence_length, before)
    return with_same_tokenizer(state, parts)


def with_same_tokenizer(state: State, parts: RunParts) -> State:
    """`state` with the fingerprint of the run's tokenizer; ConfigError where it was trained with another."""
    tokenizer, run = parts.corpus.tokenizer, Path(parts.settings.run.dir)
    fix = f"Put the tokenizer that the run began with into {run / FOLDER}, or choose another run.dir."
    require_fingerprint(
        tokenizer, state.tokenizer_fingerprint, parts.corpus.sets[0].path, "the run was trained with", fix
    )
    return replace(state, tokenizer_fingerprint=tokenizer.fingerprint)
