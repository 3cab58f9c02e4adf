"""A run from start to end: set up, resume from the newest checkpoint, loop, evaluate and report."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from xscale.checkpoint import load as loading
from xscale.checkpoint.async_saver import AsyncSaver
from xscale.checkpoint.errors import consensus
from xscale.checkpoint.files import RunLock
from xscale.checkpoint.in_memory import InMemoryCheckpoint, InMemoryState
from xscale.checkpoint.search import find_newest
from xscale.core.config import encode
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError, FaultError, Problem
from xscale.core.file_safety import check_private_folder
from xscale.data.stored_tokenizer import store_tokenizer
from xscale.mesh.collectives import barrier
from xscale.mesh.consensus import Consensus
from xscale.mesh.environment import RankInfo, read_rank_info
from xscale.mesh.mesh import leaving_process_group
from xscale.nn.mixer.attention import Attention
from xscale.nn.model.model import MODELS
from xscale.observe import EndReport, Observer, RunFacts, make_observers
from xscale.observe.events import versions
from xscale.optim.optimizer.optimizer import OPTIMIZERS
from xscale.parallel.engine.fsdp import optimizer_weights
from xscale.parallel.sharded import sharded_parameters
from xscale.train.bleu import bleu_at_end
from xscale.train.compile_cache import remove_incomplete_libraries
from xscale.train.evaluate import order2_baseline
from xscale.train.generate import encode_prompts, write_samples
from xscale.train.init_weights import load_initial_weights
from xscale.train.label_baseline import label_notes
from xscale.train.loop import Loop, state_check, state_of, with_same_tokenizer
from xscale.train.profiler import StepProfiler
from xscale.train.residual_gains import init_residual_gains
from xscale.train.run_folder import (
    CHECKPOINTS,
    changes_since,
    differences,
    finished_step,
    keep_config,
    open_folder,
    read_config,
    run_name,
    with_defaults,
    write_config,
)
from xscale.train.settings import Settings, build_on_meta
from xscale.train.setup import RunParts, check_machine, set_up
from xscale.train.state import State
from xscale.train.teacher_source import teacher_run
from xscale.watchdog.crash_dumps import CrashDumps
from xscale.watchdog.watchdog import StopSignal, Watchdog
from xscale_kernels.select import UnusableError


def train(settings: Settings) -> int:
    """Train as `settings` say. Returns the exit status: 0 done, 75 stopped on purpose and resumable. Collective."""
    began = time.perf_counter()
    rank_info = read_rank_info()
    if settings.parallel.compile:
        for file in remove_incomplete_libraries():
            what = "a library of torch.compile's cache that a killed compilation left incomplete"
            print(f"xscale: removed {file}, {what}", file=sys.stderr, flush=True)
    with StopSignal(speaks=rank_info.is_rank0) as stop, leaving_process_group():
        try:
            teacher = teacher_run(settings)
            if teacher is not None:
                status = _train_teacher(teacher, rank_info, stop, began)
                if status != EXIT_DONE:
                    return status
            return _train(settings, rank_info, stop, began)
        except UnusableError as error:
            raise ConfigError("kernels", str(error), "Choose a usable implementation, or none.") from error
        except (KeyboardInterrupt, RuntimeError):
            # A rank that stops before the first step breaks the connections of ranks that wait for it.
            if stop.cause is None or stop.in_training:
                raise
            if rank_info.is_rank0:
                what = "stopped before the first step, with nothing to save"
                print(f"xscale: {stop.cause}: {what}. Run the same command to start again", file=sys.stderr, flush=True)
            return EXIT_REQUEUE


def check_and_train(settings: Settings, check: Callable[[int], list[Problem]]) -> int:
    """Train, after `check` for this many ranks and a check of the machine: ConfigError lists all problems. Collective.

    `check` is that of the recipe, of which this package knows the settings.
    """
    try:
        if problems := check(read_rank_info().world) + check_machine(settings):
            raise ConfigError(problems)
    except ConfigError as error:
        error.same_on_all_ranks = True
        raise
    return train(settings)


def _train_teacher(settings: Settings, rank_info: RankInfo, stop: StopSignal, began: float) -> int:
    """Train the teacher of a distilled run, unless that is done; return the exit status."""
    folder = Path(settings.run.dir)
    if finished_step(settings, folder) is not None:
        return EXIT_DONE
    if rank_info.is_rank0:
        print(f"xscale: training the teacher in {folder} first (distill.train_teacher)", file=sys.stderr, flush=True)
    return _train(settings, rank_info, stop, began)


def _train(settings: Settings, rank_info: RankInfo, stop: StopSignal, began: float) -> int:
    folder = open_folder(settings)
    if (step := finished_step(settings, folder)) is not None:
        if rank_info.is_rank0:
            last = settings.train.steps
            print(f"{folder}: finished at step {step}, nothing to do; train.steps above {last} trains on", flush=True)
        return EXIT_DONE
    parts = set_up(settings, rank_info, resumes=True)
    # A prompt that cannot be used must not end the run after its last step.
    encode_prompts(settings, parts.corpus.tokenizer)
    with RunLock(folder) as lock, make_saver(parts, folder) as saves:
        return _run(parts, folder, saves, lock, stop, began)


def make_saver(parts: RunParts, folder: Path) -> AsyncSaver:
    """The saver of the run's checkpoints."""
    config = parts.settings.checkpoint
    return AsyncSaver(
        folder / CHECKPOINTS,
        group=parts.mesh.background,
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
    return Watchdog(dumps, settings.parallel.timeout_seconds, stop, settings.checkpoint.deadline_seconds)


def make_in_memory_checkpoint(parts: RunParts, folder: Path) -> InMemoryCheckpoint | None:
    """The in-memory checkpoint of this run folder; None where the config wants none. Collective."""
    config, rank_info = parts.settings.checkpoint, parts.mesh.rank_info
    if not config.memory_every_steps:
        return None
    ranks = consensus(parts.mesh.background, "kept in memory")
    name, parent = ranks.on_rank0(folder, lambda: run_name(folder)), Path(config.memory_folder)
    if not all(ranks.on_all(parent, parent.is_dir)):
        fix = "Give an in-memory file system that exists on each machine, or use checkpoint.memory_every_steps=0."
        raise ConfigError("checkpoint.memory_folder", f"the folder {parent} does not exist on some machine", fix)
    path = parent / f"xscale-{os.getuid()}-{name}"
    try:
        ranks.on_all(path, lambda: check_private_folder(path))
    except FaultError as error:
        fix = "Remove it, or give another checkpoint.memory_folder."
        raise ConfigError("checkpoint.memory_folder", str(error), fix) from None
    return InMemoryCheckpoint(path, ranks, rank_info.local_world)


@dataclass(frozen=True)
class Resumed:
    """State that a run begins with."""

    state: State
    step: int | None
    """Step of the checkpoint; None for a fresh run."""
    messages: list[str]
    """Messages to log."""
    earlier_config: dict[str, Any] | None = None
    """The config that the run had up to `step`, where it was another."""


def resume(parts: RunParts, folder: Path, memory: InMemoryCheckpoint | None) -> Resumed:
    """Load the newest good checkpoint, if there is one. Collective."""
    settings, engine = parts.settings, parts.stepper.engine
    tensors = engine.state_tensors()
    length = settings.data.sequence_length
    # Some ranks may read for much longer than others, so all wait in the group that has the timeout for it.
    group = parts.mesh.background
    on_disk, messages = find_newest(folder / CHECKPOINTS, group=group, repair=True), list[str]()
    in_memory: InMemoryState | None = None
    config: dict[str, Any] | None = None
    if memory is not None:
        in_memory, messages = memory.restore(tensors, -1 if on_disk.step is None else on_disk.step)
    if in_memory is not None:
        try:
            State.check(in_memory.state, engine.counters())
        except ValueError as error:
            messages = [f"the in-memory checkpoint of step {in_memory.step} is not used: {error}"]
            in_memory = None
    if in_memory is not None:
        state = with_same_tokenizer(State.decode(in_memory.state, engine, length), parts)
        step = in_memory.step
        messages = [f"resuming from the in-memory checkpoint of step {in_memory.step}"]
    else:
        restored = loading.restore(
            folder / CHECKPOINTS, tensors, verify=settings.checkpoint.verify, group=group, check=state_check(parts)
        )
        messages += restored.reasons
        if restored.loaded is None:
            if not parts.has_weights:
                what = "the checkpoint that the run was to resume from is no longer there"
                raise FaultError(f"{folder / CHECKPOINTS}: {what}. Start the same command again, or restore it")
            fresh = State(sequence_length=length, tokenizer_fingerprint=parts.corpus.tokenizer.fingerprint)
            return Resumed(fresh, None, [*on_disk.reasons, *messages])
        state, step, config = state_of(restored.loaded, parts), restored.loaded.step, restored.loaded.config
    engine.after_load()
    before = Consensus(group).on_rank0(folder, lambda: with_defaults(config or read_config(folder) or encode(settings)))
    now = encode(settings)
    messages += [
        f"run.allow_changed: {change}; resuming at sample {state.consumed}" for _, change in differences(before, now)
    ]
    changes = changes_since(before, now, step)
    return Resumed(state, step, [*on_disk.reasons, *messages, *changes], before if changes else None)


def _run(parts: RunParts, folder: Path, saves: AsyncSaver, lock: RunLock, stop: StopSignal, began: float) -> int:
    settings, is_rank0 = parts.settings, parts.mesh.rank_info.is_rank0
    memory = make_in_memory_checkpoint(parts, folder)
    resumed = resume(parts, folder, memory)
    state = resumed.state
    if resumed.step is None:
        tokenizer = parts.corpus.tokenizer
        resumed.messages.extend(load_initial_weights(settings, parts.parameters, tokenizer, parts.mesh))
        resumed.messages.extend(init_residual_gains(parts))
        resumed.messages.extend(label_notes(parts.corpus))
    # A rank that fails above must stop the run before anything is written.
    barrier(parts.mesh.background)
    if is_rank0:
        if resumed.step is not None and resumed.earlier_config is not None:
            keep_config(resumed.earlier_config, folder, resumed.step)
        write_config(settings, folder)
        store_tokenizer(parts.corpus.tokenizer, folder)
    observer: Observer = make_observers(settings.observe, folder) if is_rank0 else Observer()
    observer.start(run_facts(parts, folder, state, resumed.step))
    for message in resumed.messages:
        observer.message(message)
    watchdog = make_watchdog(parts, folder, stop)
    rank, device = parts.mesh.rank_info.rank, parts.mesh.device
    profiler = StepProfiler(settings.observe.profile, folder, rank, device, observer.message)
    loop = Loop(parts, state, observer, stop, began, saves, watchdog, memory, lock, profiler)
    reason, message = "failed", ""
    baseline = None
    try:
        stop.training_begins()
        with watchdog:
            cause = loop.run()
        if cause is None:
            reason = "done"
        else:
            saved = f"; checkpoint saved after {stop.seconds:.1f} s" if stop.cause else ""
            reason, message = "stopped", f"stopped by {cause}{saved}. Run the same command to resume"
        if memory is not None:
            memory.clear()
        if cause is None:
            if is_rank0 and settings.train.baseline and parts.validation is not None and parts.corpus.labels is None:
                baseline = order2_baseline(parts.corpus)
            write_samples(parts, observer, state.step)
            if (sentence := bleu_at_end(parts)) is not None:
                observer.message(sentence)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        raise
    finally:
        if not lock.is_in_place():
            observer.folder_lost()
        best, at = state.best_bits_per_byte, state.best_step
        observer.finish(EndReport(state.step, reason, message, baseline, best, at))  # type: ignore[arg-type]
    return EXIT_DONE if reason == "done" else EXIT_REQUEUE


def run_facts(parts: RunParts, folder: Path, state: State, resumed: int | None) -> RunFacts:
    """Collect the facts of the run before its first step, for the observers."""
    settings, device = parts.settings, parts.mesh.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    tokens = settings.train.batch_size * settings.sample_tokens
    # The full model: a pipeline rank has only some of its blocks.
    full_model = build_on_meta(settings, parts.corpus.tokenizer.vocabulary)
    trained = [parameter for parameter in sharded_parameters(full_model) if parameter.parameter.requires_grad]
    update_notes = OPTIMIZERS.of(settings.optimizer).part.describe(settings.optimizer, optimizer_weights(trained))
    return RunFacts(
        folder=folder,
        config=encode(settings),
        resumed_from=resumed,
        first_step=state.step + 1,
        last_step=settings.train.steps,
        parameters=parts.model_size.parameters,
        active_parameters=parts.model_size.active,
        flops_per_token=parts.flops_per_sample / settings.sample_tokens,
        tokens_per_step=tokens,
        devices=parts.mesh.rank_info.world,
        device=name,
        layouts=attention_layouts(full_model, settings.data.sequence_length),
        notes=(f"model {MODELS.of(settings.model).summary}", *truncation_notes(parts), *parts.applied, *update_notes),
        versions=versions(),
    )


def truncation_notes(parts: RunParts) -> list[str]:
    """Describe how many pairs of the training data are truncated; nothing for data without pairs."""
    data, notes = parts.settings.data, []
    for dataset in parts.corpus.pair_datasets if parts.mesh.rank_info.is_rank0 else ():
        sources, targets = dataset.truncated()
        notes.append(
            f"data {len(dataset)} pairs; truncated: {sources} sources to {data.source_length} tokens "
            f"(data.max_source_length), {targets} targets to {data.target_length} (data.max_target_length)"
        )
    return notes


def attention_layouts(model: nn.Module, length: int) -> dict[str, numpy.ndarray]:
    """Attention layout of each layer by its path: bool [H, Q, K], true for the blocks that are computed."""
    layouts = {}
    for module in model.modules():
        if isinstance(module, Attention) and not module.cross:
            heads = module.query_channels // module.head_width
            layout = module.core.block_layout(length, heads)
            if layout is not None:
                layouts[module.path] = numpy.asarray(layout)
    return layouts
