"""Listing, showing, verifying, comparing and pruning checkpoints without a model; `commands.checkpoint` prints it."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from xscale.checkpoint import manifest
from xscale.checkpoint.disk import Disk
from xscale.checkpoint.errors import CheckpointError
from xscale.checkpoint.files import MANIFEST, bad_folders, hidden_folders, step_of, visible_steps
from xscale.checkpoint.load import CheckpointReader, read_config, read_state
from xscale.checkpoint.retention import delete, excess
from xscale.core.errors import ConfigError, Problem, plain
from xscale.core.files.run_files import kind_of, read_run_file
from xscale.core.files.run_near import run_near

CHECKPOINTS_FOLDER = "checkpoints"


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint, complete or not."""

    path: Path
    step: int
    status: Literal["good", "bad", "set aside", "unfinished"]
    """Good: manifest and file sizes are right, and the hashes if they were verified."""
    reason: str = ""
    """The fault of a checkpoint that is not good."""
    size: int = 0
    """Bytes in all files."""
    written: float | None = None
    """Seconds since the epoch."""
    world: int | None = None
    """World size that wrote it."""
    written_by: str = ""


@dataclass(frozen=True)
class TensorRow:
    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    """Bytes."""
    pieces: int
    """Number of boxes in the files."""


@dataclass(frozen=True)
class CheckpointDetails:
    """Content of a checkpoint."""

    row: CheckpointRow
    state: dict[str, Any]
    config: dict[str, Any]
    tensors: list[TensorRow] = field(default_factory=list)


def ls(folder: Path) -> list[CheckpointRow]:
    """List every checkpoint of a run (given its folder, or the folder of its checkpoints), oldest first."""
    folder = checkpoints_folder(folder)
    rows = [describe(path) for _, path in visible_steps(folder)]
    rows += [
        CheckpointRow(path, step, "unfinished", f"killed while {state}")
        for step, state, path in hidden_folders(folder)
    ]
    for path in bad_folders(folder):
        note = path / "reason.txt"
        reason = (
            plain(read_run_file(note).decode(errors="replace").strip())
            if kind_of(note) == "a file"
            else ""
        )
        rows.append(
            CheckpointRow(path, int(path.name.split("-")[2]), "set aside", reason, _size(path))
        )
    return sorted(rows, key=lambda row: (row.step, row.path.name))


def show(path: Path) -> CheckpointDetails:
    """Describe the checkpoint at `path`, or the newest of a run. ConfigError or DamageError when it cannot be read."""
    from xscale.checkpoint.load import CheckpointReader, read_config, read_state

    path = find_checkpoint(path)
    state, config = read_state(path), read_config(path)
    entries = CheckpointReader(path, verify=False).entries
    tensors = [
        TensorRow(
            name, entry.shape, str(entry.dtype).removeprefix("torch."), entry.size, entry.boxes
        )
        for name, entry in entries.items()
    ]
    return CheckpointDetails(describe(path), state, config, tensors)


def verify(path: Path) -> list[CheckpointRow]:
    """Verify the hash of every file of the checkpoint at `path`, or of all checkpoints of a run."""
    if is_checkpoint(path):
        return [describe(path, hashes=True)]
    rows = [
        describe(step_path, hashes=True)
        for _, step_path in reversed(visible_steps(checkpoints_folder(path)))
    ]
    if not rows:
        raise ConfigError(
            str(path), "there is no checkpoint in it", "Give the folder of a run that has saved."
        )
    return rows


def prune(
    folder: Path, keep_last: int | None, keep_every: int | None, *, bad_too: bool, dry: bool
) -> list[Path]:
    """Delete the checkpoints that retention does not keep, and with `bad_too` those that were set aside.

    Returns the deleted paths, or with `dry` those that would be deleted. The newest one whose hashes are right is kept.
    ConfigError for those that cannot be deleted.
    """
    run, folder = folder, checkpoints_folder(folder)
    if folder != run and kind_of(folder) != "a folder":
        what = "this is a symbolic link, and what it points to may be another run's"
        raise ConfigError(str(folder), what, f"Give {folder} itself if you made it.")
    aside = bad_folders(folder) if bad_too else []
    rows = excess(folder, keep_last, keep_every, hashes=True)
    paths = [path for _, path in rows] + aside
    if dry:
        return paths
    disk = Disk()
    for step, path in rows:
        delete(folder, step, path, disk)
    for path in aside:
        disk.delete(path)
    if left := [path for path in paths if os.path.lexists(path)]:
        fix = "Let this user write there, or mount it for writing."
        raise ConfigError([Problem(str(path), "it cannot be deleted", fix) for path in left])
    return paths


def describe(path: Path, hashes: bool = False) -> CheckpointRow:
    """Describe one checkpoint; with `hashes`, verify the content of its files."""
    if not path.is_dir():
        fix = run_near(path) or "Give the folder of a checkpoint (step-...)."
        raise ConfigError(str(path), "there is no such folder", fix)
    step = step_of(path)
    try:
        stored = manifest.read(path)
        manifest.check_sizes(path, stored)
        if hashes:
            manifest.check_hashes(path, stored)
    except (CheckpointError, ConfigError) as error:
        what = error.what if isinstance(error, CheckpointError) else error.problems[0].what
        return CheckpointRow(path, step or 0, "bad", what, _size(path))
    when = (path / MANIFEST).stat().st_mtime
    return CheckpointRow(
        path, stored.step, "good", "", stored.size, when, stored.world, stored.written_by
    )


def checkpoints_folder(path: Path) -> Path:
    """Return `path` or, for a run folder, the folder of its checkpoints."""
    if not path.is_dir():
        fix = run_near(path) or "Give a run.dir, or a folder of checkpoints."
        raise ConfigError(str(path), "there is no such folder", fix)
    return path / CHECKPOINTS_FOLDER if (path / CHECKPOINTS_FOLDER).is_dir() else path


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is the folder of one checkpoint, and not that of a run."""
    return step_of(path) is not None or (path / MANIFEST).exists()


def find_checkpoint(path: Path, *, step: int | None = None, strict: bool = False) -> Path:
    """Return `path` or, for a run folder, its newest good checkpoint, or that of `step`: as `find_to_read`."""
    if is_checkpoint(path):
        if step is not None and step != step_of(path):
            raise ConfigError(
                "--step",
                f"{path} is one checkpoint, of another step",
                "Give the folder of its run.",
            )
        return path
    from xscale.checkpoint.search import find_to_read

    newest = find_to_read(checkpoints_folder(path), step=step, strict=strict)
    if newest.path is None:
        raise ConfigError(
            str(path),
            "there is no good checkpoint in it",
            "`xscale checkpoint ls` shows what there is.",
        )
    return newest.path


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@dataclass(frozen=True)
class TensorDifference:
    """A tensor of both checkpoints whose contents differ."""

    name: str
    what: str
    """`shape`, `dtype` or `numbers`."""
    first: str
    second: str
    elements: int = 0
    """Number of elements that differ."""
    largest: float = 0.0
    """Largest absolute difference; NaN where only one is NaN."""


@dataclass(frozen=True)
class Difference:
    """All differences; empty lists where there are none."""

    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    tensors: list[TensorDifference] = field(default_factory=list)
    same: int = 0
    """Number of tensors that are equal bit for bit."""
    config: list[tuple[str, Any, Any]] = field(default_factory=list)
    """(dotted key, value in the first, value in the second); None for a missing key."""
    state: list[tuple[str, Any, Any]] = field(default_factory=list)

    @property
    def none(self) -> bool:
        return not (
            self.only_first or self.only_second or self.tensors or self.config or self.state
        )


def diff(first: Path, second: Path, *, only: str = "", verify: bool = True) -> Difference:
    """Compare two checkpoints (or the newest of two runs), one tensor at a time; `only`: prefix of the names."""
    left, right = (
        CheckpointReader(find_checkpoint(path), verify=verify) for path in (first, second)
    )
    names = [name for name in left.entries if name.startswith(only)]
    tensors = [_compare(name, left, right) for name in names if name in right.entries]
    return Difference(
        [name for name in names if name not in right.entries],
        [name for name in right.entries if name.startswith(only) and name not in left.entries],
        [difference for difference in tensors if difference is not None],
        sum(difference is None for difference in tensors),
        leaves(read_config(left.path), read_config(right.path)),
        leaves(read_state(left.path), read_state(right.path)),
    )


def _compare(name: str, left: CheckpointReader, right: CheckpointReader) -> TensorDifference | None:
    first, second = left.entries[name], right.entries[name]
    if first.shape != second.shape:
        return TensorDifference(name, "shape", str(list(first.shape)), str(list(second.shape)))
    if first.dtype != second.dtype:
        return TensorDifference(name, "dtype", str(first.dtype), str(second.dtype))
    a, b = left.tensor(name), right.tensor(name)
    if torch.equal(_bits(a), _bits(b)):
        return None
    compute = torch.complex128 if a.is_complex() else torch.float64
    gap = (a.to(compute) - b.to(compute)).abs()
    apart = ~((a == b) | (a.isnan() & b.isnan()))
    largest = gap[apart].max().item() if apart.any() else 0.0
    norms = [f"norm {tensor.to(compute).norm().item():.6g}" for tensor in (a, b)]
    return TensorDifference(name, "numbers", norms[0], norms[1], int(apart.sum()), largest)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def leaves(first: Any, second: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """List (dotted key, first, second) wherever two values of JSON differ."""
    if isinstance(first, dict) and isinstance(second, dict):
        differences = []
        for key in [*first, *(key for key in second if key not in first)]:
            differences += leaves(
                first.get(key), second.get(key), f"{path}.{key}" if path else str(key)
            )
        return differences
    return [] if first == second else [(path, first, second)]
