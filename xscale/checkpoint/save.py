"""Saving: files are written in a hidden folder, hashed and flushed, and then made visible by one rename."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch import __version__ as torch_version
from torch.distributed.checkpoint.planner import WriteItem

from xscale.checkpoint import manifest
from xscale.checkpoint import tensors as tensor_files
from xscale.checkpoint.disk import Digest, Disk
from xscale.checkpoint.errors import CheckpointError, consensus
from xscale.checkpoint.files import CONFIG, STATE, TENSORS, hidden_folder, step_folder
from xscale.checkpoint.manifest import CheckpointManifest
from xscale.checkpoint.planner import Box, CheckpointPlan, local_shards, plan_save, view_of_item
from xscale.checkpoint.retention import delete_excess, make_room
from xscale.core.version import __version__
from xscale.mesh.consensus import Consensus
from xscale.mesh.flat_shard import FlatShard
from xscale.mesh.shared_folder import becomes_visible


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor | Box | FlatShard],
    state: dict[str, Any],
    config: dict[str, Any],
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    group: dist.ProcessGroup | None = None,
    disk: Disk | None = None,
) -> Path:
    """Write `folder`/step-XXXXXXXX and return its path. Collective over `group` (all ranks by default).

    A plain tensor is replicated and written once; each rank writes its shard of a DTensor; a rank may have only some
    of the names. `state` and `config` are JSON data, taken from rank 0. When the save fails, every rank raises the same
    CheckpointError and nothing stays visible: training may continue.
    """
    ranks, shards = consensus(group), local_shards(tensors)
    plan = plan_save(shards, step_folder(folder, step), ranks)

    def box(item: WriteItem) -> Tensor:
        return view_of_item(shards[item.index.fqn], item)

    snapshot = Snapshot(step, plan, box, encode(state), encode(config))
    return write(folder, snapshot, ranks, disk or Disk(), keep_last, keep_every)


@dataclass(frozen=True)
class Snapshot:
    """Everything that a save writes, as of `step`."""

    step: int
    plan: CheckpointPlan
    box: Callable[[WriteItem], Tensor]
    """Returns the numbers of a box of the plan."""
    state: bytes
    config: bytes


def encode(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, indent=1) + "\n").encode()


def write(
    folder: Path,
    snapshot: Snapshot,
    ranks: Consensus,
    disk: Disk,
    keep_last: int | None,
    keep_every: int | None,
) -> Path:
    """Write a snapshot and apply retention; return the checkpoint's path. Collective."""
    final, hidden = (
        step_folder(folder, snapshot.step),
        hidden_folder(folder, snapshot.step, "writing"),
    )
    try:
        ranks.on_rank0(
            final, lambda: _create_hidden(hidden, snapshot.plan.size, disk, keep_last, keep_every)
        )
        ranks.on_all(final, lambda: _wait_visible(hidden / TENSORS))
        tensor_files.write(hidden, snapshot.plan, snapshot.box, disk, ranks, final)
        parts = ranks.on_all(final, lambda: _digests(disk, hidden))
        files = {name: digest for part in parts for name, digest in part.items()}
        ranks.on_rank0(final, lambda: _publish(final, hidden, files, snapshot, ranks.world, disk))
    except Exception:
        if ranks.is_rank0:
            _discard(hidden, disk)
        raise
    ranks.on_rank0(final, lambda: delete_excess(folder, keep_last, keep_every, disk))
    return final


def _create_hidden(
    hidden: Path, size: int, disk: Disk, keep_last: int | None, keep_every: int | None
) -> None:
    disk.delete(hidden)
    disk.make(hidden / TENSORS)
    make_room(hidden.parent, keep_last, keep_every, size, disk)


def _wait_visible(path: Path) -> None:
    if not becomes_visible(path):
        what = "rank 0 created this folder and this rank does not see it"
        raise CheckpointError(path, what, "Give a run.dir on a file system that all nodes share.")


def _digests(disk: Disk, hidden: Path) -> dict[str, Digest]:
    """Digests of the files that this rank wrote, by path relative to the checkpoint's folder."""
    written = [path for path in disk.written if path.is_relative_to(hidden)]
    return {path.relative_to(hidden).as_posix(): disk.written.pop(path) for path in written}


def _publish(
    final: Path, hidden: Path, files: dict[str, Digest], snapshot: Snapshot, world: int, disk: Disk
) -> None:
    """Write config, state and manifest, flush the folders, and make the checkpoint visible."""
    disk.write(hidden / CONFIG, snapshot.config)
    disk.write(hidden / STATE, snapshot.state)
    files = files | _digests(disk, hidden)
    written_by = f"xscale {__version__}, torch {torch_version}"
    manifest.write(hidden, CheckpointManifest(snapshot.step, files, world, written_by), disk)
    disk.sync(hidden / TENSORS)
    disk.sync(hidden)
    if os.path.lexists(final):
        # A checkpoint of the same step from before a rollback. After a kill between the renames, `repair_folder`
        # restores it.
        replaced = hidden_folder(final.parent, snapshot.step, "replaced")
        disk.delete(replaced)
        disk.rename(final, replaced)
        disk.rename(hidden, final)
        disk.sync(final.parent)
        disk.delete(replaced)
        return
    disk.rename(hidden, final)
    disk.sync(final.parent)


def _discard(hidden: Path, disk: Disk) -> None:
    try:
        disk.delete(hidden)
    except (
        OSError
    ):  # the cause of the failed save may make this fail too; the next save or start deletes it
        return
