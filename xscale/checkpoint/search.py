"""Search for the newest good checkpoint; leftovers of a kill are deleted, damaged checkpoints are set aside."""

import contextlib
import os
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from xscale.checkpoint import manifest
from xscale.checkpoint.disk import Disk
from xscale.checkpoint.errors import DamageError, consensus
from xscale.checkpoint.files import (
    bad_folder,
    bad_folders,
    hidden_folders,
    step_folder,
    visible_steps,
)
from xscale.core.errors import ConfigError, NoticeWarning
from xscale.core.files.atomic_write import write_atomically
from xscale.core.files.run_files import kind_of
from xscale.mesh.consensus import Consensus

REASON = "reason.txt"
STEPS_LISTED = 8
"""Steps that a message lists."""


@dataclass(frozen=True)
class SearchResult:
    """The newest good checkpoint of a folder."""

    path: Path | None
    """None when there is no good checkpoint."""
    step: int | None = None
    reasons: tuple[str, ...] = ()
    """Messages to log: what was repaired, set aside or passed over."""


def find_newest(
    folder: Path,
    *,
    group: dist.ProcessGroup | None = None,
    hashes: bool = False,
    repair: bool = False,
) -> SearchResult:
    """Find the newest checkpoint whose files exist with the right sizes, with `hashes` also the right contents.

    Damaged checkpoints are passed over. Collective. `repair` is for the run that owns the folder, while it does not
    save: damaged checkpoints are renamed to bad-step-XXXXXXXX-WHY and leftovers of killed saves are deleted. Without it
    nothing on disk changes, so that a running run can be inspected.
    """
    ranks = consensus(group, "read")
    reasons: list[str] = []
    if repair:
        reasons += ranks.on_rank0(folder, lambda: repair_folder(folder, Disk()))
    tried: set[Path] = set()
    while fresh := [
        path
        for _, path in ranks.on_rank0(folder, lambda: visible_steps(folder))
        if path not in tried
    ]:
        # Listed again each time: a running run may have replaced the checkpoint just tried by a newer one.
        path = fresh[0]
        tried.add(path)
        try:
            stored = ranks.on_rank0(path, partial(_manifest_with_sizes, path))
            if hashes:
                ranks.on_all(
                    path, partial(manifest.check_hashes, path, stored, ranks.rank, ranks.world)
                )
            return SearchResult(path, stored.step, tuple(reasons))
        except DamageError as damage:
            passed = f"{damage.path}: {damage.what}; passed over"
            reasons.append(set_aside(path, damage, ranks) if repair else passed)
    return SearchResult(None, None, tuple(reasons))


class OlderCheckpointWarning(NoticeWarning):
    """A command reads an older checkpoint, because the newest one is damaged."""


def find_to_read(folder: Path, *, step: int | None = None, strict: bool = False) -> SearchResult:
    """Find the checkpoint that a command reads, which does not own the run: the newest good one, or that of `step`.

    An OlderCheckpointWarning says which step is passed over, why, and which is read. ConfigError instead with `strict`,
    and where the checkpoint of `step` is damaged or missing. Not collective.
    """
    if step is not None:
        return SearchResult(_checkpoint_of_step(folder, step), step)
    newest = find_newest(folder)
    if newest.step is None:
        return newest
    if strict and (what := why_older(folder, newest.step)):
        raise ConfigError(str(folder), what, f"Without --strict, step {newest.step} is read.")
    warn_of_older(folder, newest.step)
    return newest


def warn_of_older(folder: Path, step: int) -> None:
    """Warn with an OlderCheckpointWarning where `step` is read as newer checkpoints are damaged. Not collective."""
    if what := why_older(folder, step):
        warnings.warn(f"{what}; step {step} is read instead", OlderCheckpointWarning, stacklevel=3)


def why_older(folder: Path, step: int) -> str:
    """Say which checkpoints newer than `step` are damaged or were set aside; empty: none. Not collective."""
    reasons = []
    for newer, path in visible_steps(folder):
        if newer <= step:
            break
        try:
            _manifest_with_sizes(path)
        except DamageError as damage:
            reasons.append(f"{damage.path}: {damage.what}; passed over")
        except ConfigError as error:
            reasons.append(f"{error}; passed over")
    reasons += [
        f"step {number} was set aside ({why})"
        for number, why in _set_aside(folder)
        if number > step
    ]
    return f"the newest checkpoint is damaged: {'; '.join(reasons)}" if reasons else ""


def _checkpoint_of_step(folder: Path, step: int) -> Path:
    """The checkpoint of a step; ConfigError where there is none, or its files are not those that were written."""
    known = dict(visible_steps(folder))
    if step not in known:
        steps = ", ".join(map(str, sorted(known, reverse=True)[:STEPS_LISTED])) or "none"
        raise ConfigError(
            "--step", f"{folder} has no checkpoint of step {step}", f"It has: {steps}."
        )
    try:
        _manifest_with_sizes(known[step])
    except DamageError as damage:
        fix = "Give another step: `xscale checkpoint ls` shows which are good."
        raise ConfigError(
            "--step", f"the checkpoint of step {step} is damaged: {damage.what}", fix
        ) from None
    return known[step]


def _set_aside(folder: Path) -> list[tuple[int, str]]:
    """(step, why) of the checkpoints that were found damaged and renamed."""
    names = [path.name.removeprefix("bad-").split("-") for path in bad_folders(folder)]
    return [(int(number), why) for _, number, why, *_ in names]


def newest_on_this_process(folder: Path) -> tuple[int, Path] | None:
    """(step, path) of the newest checkpoint whose files exist with the right sizes; None: there is none.

    Not collective: for processes that work without other ranks, and before there is a process group.
    """
    for step, path in visible_steps(folder):
        with contextlib.suppress(DamageError, ConfigError):
            _manifest_with_sizes(path)
            return step, path
    return None


def _manifest_with_sizes(path: Path) -> manifest.CheckpointManifest:
    stored = manifest.read(path)
    manifest.check_sizes(path, stored)
    return stored


def set_aside(path: Path, damage: DamageError, ranks: Consensus) -> str:
    """Rename a damaged checkpoint so that it is never tried again; return a message. Collective."""

    def rename() -> str:
        aside = bad_folder(path, damage.label)
        try:
            path.rename(aside)
            # Of a link to a checkpoint elsewhere the link is renamed, and nothing is written there.
            if kind_of(aside) == "a folder":
                write_atomically(aside / REASON, f"{damage}\n")
        except OSError as error:
            return f"{damage.path}: {damage.what}; passed over (it could not be set aside: {error.strerror})"
        return f"{damage.path}: {damage.what}; set aside as {aside.name}"

    return ranks.on_rank0(path, rename)


def repair_folder(folder: Path, disk: Disk) -> list[str]:
    """Delete leftovers of killed saves and deletions; return messages. No save may be in progress in `folder`."""
    reasons = []
    for step, state, path in hidden_folders(folder):
        final = step_folder(folder, step)
        if state == "replaced" and not os.path.lexists(final):
            disk.rename(path, final)
            reasons.append(
                f"{final}: restored, because the save that was to replace it was interrupted"
            )
            continue
        disk.delete(path)
        if state == "writing":
            reasons.append(f"{final}: its save was interrupted; the incomplete files are deleted")
    return reasons
