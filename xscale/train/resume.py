"""State that a run begins with: the newest good checkpoint, on the disk or in memory, or none."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xscale.checkpoint import load as loading
from xscale.checkpoint.errors import consensus
from xscale.checkpoint.in_memory import InMemoryCheckpoint, InMemoryState
from xscale.checkpoint.search import find_newest
from xscale.core.config import encode
from xscale.core.errors import ConfigError, FaultError
from xscale.core.files.file_safety import check_private_folder
from xscale.mesh.consensus import Consensus
from xscale.run.config_changes import changes_since, differences, with_defaults
from xscale.run.parts import RunParts
from xscale.run.run_folder import CHECKPOINTS, read_config, run_name
from xscale.run.saved_state import state_check, state_of, with_same_tokenizer
from xscale.run.state import State


def make_in_memory_checkpoint(parts: RunParts, folder: Path) -> InMemoryCheckpoint | None:
    """The in-memory checkpoint of this run folder; None where the config wants none. Collective."""
    config, rank_info = parts.settings.checkpoint, parts.mesh.rank_info
    if not config.memory_every_steps:
        return None
    ranks = consensus(parts.mesh.background, "kept in memory")
    name, parent = ranks.on_rank0(folder, lambda: run_name(folder)), Path(config.memory_folder)
    if not all(ranks.on_all(parent, parent.is_dir)):
        fix = "Give an in-memory file system that exists on each machine, or use checkpoint.memory_every_steps=0."
        raise ConfigError(
            "checkpoint.memory_folder", f"the folder {parent} does not exist on some machine", fix
        )
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
    tensors = parts.state_tensors()
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
            folder / CHECKPOINTS,
            tensors,
            verify=settings.checkpoint.verify,
            group=group,
            check=state_check(parts),
        )
        messages += restored.reasons
        if restored.loaded is None:
            if not parts.has_weights:
                what = "the checkpoint that the run was to resume from is no longer there"
                raise FaultError(
                    f"{folder / CHECKPOINTS}: {what}. Start the same command again, or restore it"
                )
            tokenizer = parts.corpus.tokenizer
            fresh = State(
                sequence_length=length,
                tokenizer_fingerprint=tokenizer.fingerprint,
                unpadded_vocabulary=tokenizer.unpadded_vocabulary,
            )
            return Resumed(fresh, None, [*on_disk.reasons, *messages])
        state = state_of(restored.loaded, parts)
        step = restored.loaded.step
        config = restored.loaded.config
    engine.after_load()
    before = Consensus(group).on_rank0(
        folder, lambda: with_defaults(config or read_config(folder) or encode(settings))
    )
    now = encode(settings)
    messages += [
        f"run.allow_changed: {change}; resuming at sample {state.consumed}"
        for _, change in differences(before, now)
    ]
    changes = changes_since(before, now, step)
    return Resumed(
        state, step, [*on_disk.reasons, *messages, *changes], before if changes else None
    )
