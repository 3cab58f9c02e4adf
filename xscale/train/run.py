"""A run from start to end: set up, resume from the newest checkpoint, loop, evaluate and report."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from xscale.checkpoint.async_saver import AsyncSaver
from xscale.checkpoint.files import RunLock
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError, FaultError, Problem
from xscale.core.say import say_aside
from xscale.data.corpus.stored_tokenizer import store_tokenizer
from xscale.distill.teacher_source import teacher_run
from xscale.evaluate.evaluate import capacity_notes, order2_baseline
from xscale.evaluate.label_baseline import label_notes
from xscale.evaluate.tasks import require_tasks
from xscale.generate.generate import encode_prompts
from xscale.mesh.collectives import barrier
from xscale.mesh.consensus import Consensus
from xscale.mesh.environment import RankInfo, bound_mlflow_attempts, read_rank_info
from xscale.mesh.mesh import leaving_process_group
from xscale.nn.module import draws_dropout
from xscale.observe import EndReport, Observer
from xscale.observe.make_observers import make_observers
from xscale.run.init_weights import load_initial_weights
from xscale.run.parts import RunParts
from xscale.run.route_replay import require_all_routes
from xscale.run.run_facts import peak_memory, run_facts
from xscale.run.run_folder import (
    CHECKPOINTS,
    check_finished,
    finished_step,
    keep_config,
    mark_end,
    open_folder,
    removed_if_refused,
    unwritable,
    write_config,
)
from xscale.run.token_counts import init_from_token_counts
from xscale.settings.settings import Settings
from xscale.train.compile_artifacts import CompileArtifacts
from xscale.train.compile_cache import remove_incomplete_files
from xscale.train.garbage_collection import GarbageCollection
from xscale.train.loop import Loop
from xscale.train.loop_setup import LoopContext, make_loop
from xscale.train.profiler import StepProfiler
from xscale.train.residual_gains import init_residual_gains
from xscale.train.resume import Resumed, make_in_memory_checkpoint, resume
from xscale.train.setup import check_machine, set_up
from xscale.watchdog.crash_dumps import CrashDumps
from xscale.watchdog.distributed_stop import StopRequested
from xscale.watchdog.watchdog import LostRankError, StopSignal, Watchdog
from xscale_kernels.attention_backends import attention_backends
from xscale_kernels.select import UnusableError


def train(settings: Settings, samples: Any = None) -> int:
    """Train as `settings` say, on `samples` if they are the caller's. Collective.

    Returns the exit status: 0 done, 75 stopped on purpose and resumable.
    """
    began = time.perf_counter()
    rank_info = read_rank_info()
    if settings.parallel.compile:
        for file in remove_incomplete_files():
            what = "a file of torch.compile's cache that a killed compilation or a power cut left incomplete"
            print(f"xscale: removed {file}, {what}", file=sys.stderr, flush=True)
    with StopSignal(speaks=rank_info.is_rank0) as stop, leaving_process_group():
        try:
            teacher = teacher_run(settings)
            if teacher is not None:
                status = _train_teacher(teacher, rank_info, stop, began)
                if status != EXIT_DONE:
                    return status
            return _train(settings, rank_info, stop, began, samples)
        except UnusableError as error:
            raise ConfigError(
                "kernels", str(error), "Choose a usable implementation, or none."
            ) from error
        except (KeyboardInterrupt, RuntimeError, LostRankError):
            # A rank that stops before the first step breaks the connections of ranks that wait for it.
            if stop.cause is None or stop.in_training:
                raise
            if rank_info.is_rank0:
                what = "stopped before the first step, with nothing to save"
                print(
                    f"xscale: {stop.cause}: {what}. Run the same command to start again",
                    file=sys.stderr,
                    flush=True,
                )
            return EXIT_REQUEUE


def check_and_train(
    settings: Settings, check: Callable[[int], list[Problem]], samples: Any = None
) -> int:
    """Train, after `check` for this many ranks and a check of the machine: ConfigError lists all problems. Collective.

    `check` is that of the recipe, of which this package knows the settings. `samples`: training samples instead of
    those of the data, by number or in an order that stays.
    """
    try:
        if problems := check(read_rank_info().world) + check_machine(settings):
            raise ConfigError(problems)
    except ConfigError as error:
        error.same_on_all_ranks = True
        raise
    return train(settings, samples)


def _train_teacher(settings: Settings, rank_info: RankInfo, stop: StopSignal, began: float) -> int:
    """Train the teacher of a distilled run, unless that is done; return the exit status."""
    folder = Path(settings.run.dir)
    if (step := finished_step(settings, folder)) is not None:
        check_finished(settings, folder, step)
        return EXIT_DONE
    if rank_info.is_rank0:
        say_aside(f"xscale: training the teacher in {folder} first (distill.train_teacher)")
    return _train(settings, rank_info, stop, began)


def _train(
    settings: Settings, rank_info: RankInfo, stop: StopSignal, began: float, samples: Any = None
) -> int:
    with removed_if_refused(Path(settings.run.dir), rank_info.is_rank0):
        folder = open_folder(settings)
        if (step := finished_step(settings, folder)) is not None:
            check_finished(settings, folder, step)
            if rank_info.is_rank0:
                done = f"finished at step {step}, nothing to do; train.steps above {step} trains on"
                print(f"{folder}: {done}", flush=True)
            return EXIT_DONE
        parts = set_up(settings, rank_info, resumes=True, samples=samples)
        require_all_routes(parts)
        # A prompt or a task that cannot be used must not end the run after many steps.
        encode_prompts(settings, parts.corpus.tokenizer)
        require_tasks(settings.train.tasks, Consensus(parts.mesh.background))
        with (
            attention_backends(parts.mesh.device, dropout=draws_dropout(parts.model)),
            RunLock(folder) as lock,
            make_saver(parts, folder) as saves,
        ):
            return _run(parts, folder, saves, lock, stop, began)


def make_saver(parts: RunParts, folder: Path) -> AsyncSaver:
    """The saver of the run's checkpoints."""
    config = parts.settings.checkpoint
    return AsyncSaver(
        folder / CHECKPOINTS,
        group=parts.mesh.background,
        device=parts.mesh.device,
        when_busy=config.when_busy,
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        failure_limit=config.failure_limit,
    )


def make_watchdog(parts: RunParts, folder: Path, stop: StopSignal) -> Watchdog:
    """The watchdog of the loop. Collective."""
    settings, rank_info = parts.settings, parts.mesh.rank_info
    attempt = Consensus(parts.mesh.background).on_rank0(
        folder, lambda: f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
    )
    dumps = CrashDumps(folder / "faults" / attempt, rank_info.rank, rank_info.world)
    parallel, deadline = settings.parallel, settings.checkpoint.deadline_seconds
    return Watchdog(
        dumps, parallel.timeout_seconds, stop, deadline, parallel.longest_timeout_seconds
    )


def _begin_fresh(parts: RunParts) -> list[str]:
    """Give the model the weights that a fresh run begins with; messages to log. Collective."""
    tokenizer = parts.corpus.tokenizer
    messages = [
        *init_from_token_counts(parts),
        *load_initial_weights(parts.settings, parts.model, parts.parameters, tokenizer, parts.mesh),
        *init_residual_gains(parts),
        *label_notes(parts.corpus),
    ]
    parts.stepper.engine.begin()
    return messages


def _write_begin(parts: RunParts, folder: Path, resumed: Resumed) -> None:
    """Write what stands in the run folder before the first step. ConfigError or FaultError where that cannot be."""
    try:
        if resumed.step is not None and resumed.earlier_config is not None:
            keep_config(resumed.earlier_config, folder, resumed.step)
        write_config(parts.settings, folder)
        store_tokenizer(parts.corpus.tokenizer, folder)
    except OSError as error:
        raise unwritable(folder, error) from None


def _make_profiler(
    parts: RunParts, folder: Path, observer: Observer, watchdog: Watchdog
) -> StepProfiler:
    beat = partial(watchdog.heartbeat, seconds=parts.settings.parallel.io_timeout_seconds)
    config, rank_info = parts.settings.observe.profile, parts.mesh.rank_info
    return StepProfiler(config, folder, rank_info, parts.stepper.timer, observer.message, beat)


def _baseline(parts: RunParts, stop: StopSignal) -> tuple[float | None, str | None]:
    """Return the baseline of the run, None where it has none, and the signal that cut it short; on rank 0 alone."""

    def leave_at_signal() -> None:
        if stop.cause is not None:
            raise StopRequested(stop.cause)

    if (
        not parts.settings.train.baseline
        or parts.validation is None
        or parts.corpus.labels is not None
    ):
        return None, None
    try:
        return order2_baseline(parts.corpus, leave_at_signal), None
    except StopRequested as stopped:
        return None, str(stopped)


def _stopped(cause: str, loop: Loop, stop: StopSignal) -> str:
    """Say why the run stopped, whether this saved it, and what the resumed run repeats."""
    saved = loop.due.saver.saved_step == loop.state.step and stop.cause is not None
    when = f"; checkpoint saved after {stop.seconds:.1f} s" if saved else ""
    repeats = (
        f", which repeats what this cut short: {', '.join(loop.state.pending)}"
        if loop.state.pending
        else ""
    )
    return f"stopped by {cause}{when}. Run the same command to resume{repeats}"


def _run(
    parts: RunParts, folder: Path, saves: AsyncSaver, lock: RunLock, stop: StopSignal, began: float
) -> int:
    settings, is_rank0 = parts.settings, parts.mesh.rank_info.is_rank0
    memory = make_in_memory_checkpoint(parts, folder)
    resumed = resume(parts, folder, memory)
    state = resumed.state
    if resumed.step is None:
        resumed.messages.extend(_begin_fresh(parts))
    resumed.messages.extend(capacity_notes(parts.model))
    # A rank that fails above must stop the run before anything is written.
    barrier(parts.mesh.background)
    Consensus(parts.mesh.background).on_rank0(folder, lambda: _write_begin(parts, folder, resumed))
    bound_mlflow_attempts()
    observer: Observer = make_observers(settings.observe, folder) if is_rank0 else Observer()
    artifacts = CompileArtifacts(folder, parts.mesh, enabled=settings.parallel.compile)
    resumed.messages.extend(artifacts.load())
    observer.start(run_facts(parts, folder, state, resumed.step))
    for message in resumed.messages:
        observer.message(message)
    watchdog = make_watchdog(parts, folder, stop)
    profiler = _make_profiler(parts, folder, observer, watchdog)
    garbage = GarbageCollection(settings.train.gc_every_steps)
    context = LoopContext(
        observer, watchdog, profiler, garbage, stop, saves, memory, lock, artifacts, began
    )
    loop = make_loop(parts, state, context)
    reason, message = "failed", ""
    baseline = None
    try:
        stop.training_begins()
        with watchdog, closing(profiler), garbage:
            cause = loop.run()
        if memory is not None and (cause is None or loop.due.saver.saved_step == state.step):
            memory.clear()
        if cause is None and is_rank0:
            # Last, since no other rank waits for it.
            baseline, cause = _baseline(parts, stop)
        if is_rank0 and state.step == settings.train.steps:
            mark_end(folder, interrupted=cause is not None)
        reason, message = (
            ("done", "") if cause is None else ("stopped", _stopped(cause, loop, stop))
        )
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        raise
    finally:
        if not lock.is_in_place():
            observer.folder_lost()
        best, at = state.best_bits_per_byte, state.best_step
        ended, memory_used = time.time(), peak_memory(parts.mesh.device)
        end = EndReport(state.step, reason, message, baseline, best, at, ended, memory_used)  # type: ignore[arg-type]
        observer.finish(end)
    if reason != "done":
        return EXIT_REQUEUE
    if lacking := observer.unwritten():
        what = f"trained to step {state.step}, whose checkpoint is saved, but {lacking} could not be written"
        raise FaultError(f"{folder}: {what}. Check the disk; the numbers of these steps are lost")
    return EXIT_DONE
