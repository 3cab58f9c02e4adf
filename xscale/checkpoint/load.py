"""Loading: verify the files, compare them with the model, then read; from any layout into any other."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xscale.checkpoint import manifest
from xscale.checkpoint import tensors as tensor_files
from xscale.checkpoint.errors import DamageError, consensus
from xscale.checkpoint.files import CONFIG, MANIFEST, STATE, bad_folders
from xscale.checkpoint.index import TensorEntry, read_index, tensor_entries
from xscale.checkpoint.search import find_newest, set_aside
from xscale.core.errors import ConfigError
from xscale.core.files.file_safety import decode_json
from xscale.core.files.run_files import read_run_file
from xscale.core.files.run_near import run_near
from xscale.core.foreign import reason
from xscale.mesh.consensus import Consensus
from xscale.mesh.flat_shard import FlatShard

WEIGHTS, AVERAGES = "model.", "ema."
"""Prefixes of a weight and of its moving average (`xscale.parallel.ema`)."""
NAMES_SHOWN = 4
"""Tensors that a message names; the rest it counts."""


@dataclass(frozen=True)
class Loaded:
    """Content of a checkpoint besides its tensors."""

    path: Path
    step: int
    state: dict[str, Any]
    config: dict[str, Any]


def load(
    path: Path,
    tensors: Mapping[str, Tensor | FlatShard],
    *,
    only: str = "",
    cast_types: bool = False,
    verify: bool = True,
    group: dist.ProcessGroup | None = None,
    check: Callable[[dict[str, Any], dict[str, Any]], None] | None = None,
) -> Loaded:
    """Fill `tensors` (plain, DTensors or flat shards, of any layout) in place from the checkpoint. Collective.

    The names of all ranks together must be those in the checkpoint (with `only`, those with that prefix), with equal
    shapes, and with equal dtypes unless `cast_types`. ConfigError when `path` is no checkpoint or of another model,
    DamageError when a file is not what was written (with `verify`, by its hash); then the tensors are unchanged.
    """
    ranks = consensus(group, "read")
    stored = ranks.on_rank0(path, lambda: open_manifest(path))
    if verify:
        ranks.on_all(path, lambda: manifest.check_hashes(path, stored, ranks.rank, ranks.world))
    entries = ranks.on_rank0(
        path, lambda: tensor_entries(read_index(path, manifest.tensor_file_sizes(stored)))
    )
    step, state = ranks.on_rank0(path, lambda: _state(path))
    config = ranks.on_rank0(path, lambda: read_config(path))
    if check is not None:
        _check_state(path, check, state, config)
    selected = {name: entry for name, entry in entries.items() if name.startswith(only)}
    _require_same_tensors(path, selected, tensors, cast_types, ranks)
    tensor_files.read(path, tensors, ranks)
    return Loaded(path, step, state, config)


def read_some(
    path: Path, tensors: Mapping[str, Tensor | FlatShard], group: dist.ProcessGroup | None = None
) -> None:
    """Fill `tensors`, some of those in the checkpoint, in place and whatever their dtype. Collective.

    The caller has compared names and shapes; DamageError when a file is not what was written.
    """
    tensor_files.read(path, tensors, consensus(group, "read"))


@dataclass(frozen=True)
class Restored:
    """The checkpoint that a run resumes from."""

    loaded: Loaded | None
    """None: there is no checkpoint, the run starts at step 0."""
    reasons: tuple[str, ...] = ()
    """Messages to log: newer checkpoints that were set aside and saves that were interrupted."""


def restore(
    folder: Path,
    tensors: Mapping[str, Tensor | FlatShard],
    *,
    verify: bool = True,
    group: dist.ProcessGroup | None = None,
    check: Callable[[dict[str, Any], dict[str, Any]], None] | None = None,
) -> Restored:
    """Load the newest good checkpoint in `folder` into `tensors`, as `load` does. Collective.

    `check` raises ValueError, with a clause, for a state and config that the run could not have written. A checkpoint
    that turns out to be damaged is set aside, as by `find_newest`. ConfigError when there are checkpoints and none
    is good: to start at step 0 silently would discard the run.
    """
    reasons: list[str] = []
    while True:
        newest = find_newest(folder, group=group, repair=True)
        reasons += newest.reasons
        if newest.path is None:
            if consensus(group, "read").on_rank0(folder, lambda: bool(bad_folders(folder))):
                fix = "Give another run.dir to start again, or restore a good checkpoint."
                raise ConfigError(
                    str(folder),
                    f"no checkpoint in it is good ({' | '.join(reasons) or 'see bad-*'})",
                    fix,
                )
            return Restored(None, tuple(reasons))
        try:
            return Restored(
                load(newest.path, tensors, verify=verify, group=group, check=check), tuple(reasons)
            )
        except DamageError as damage:
            reasons.append(set_aside(newest.path, damage, consensus(group, "read")))


def read_config(path: Path) -> dict[str, Any]:
    """Read the resolved config of the run that wrote the checkpoint. ConfigError when there is no checkpoint."""
    return _json(path, CONFIG)


def read_state(path: Path) -> dict[str, Any]:
    """Read the trainer state stored in the checkpoint."""
    return _state(path)[1]


def unpadded_vocabulary_of(state: dict[str, Any], vocabulary: int) -> int:
    """Return the rows of a `vocabulary` that have a probability in a run with this state in its checkpoint."""
    rows = state.get("unpadded_vocabulary")
    return rows if type(rows) is int and 0 < rows < vocabulary else vocabulary


def load_tensors(
    path: Path, names: list[str] | None = None, *, verify: bool = True
) -> dict[str, Tensor]:
    """Read full tensors to this process's CPU, without a model: those of `names`, by default all."""
    reader = CheckpointReader(path, verify=verify)
    return reader.tensors(list(reader.entries) if names is None else names)


class CheckpointReader:
    """Reads tensors of a checkpoint by name in one process."""

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        """ConfigError when there is no checkpoint at `path`, DamageError when it is not what was written."""
        self.path = path
        self.manifest = open_manifest(path)
        if verify:
            manifest.check_hashes(path, self.manifest)
        self._index = read_index(path, manifest.tensor_file_sizes(self.manifest))
        self.entries = tensor_entries(self._index)
        """Entry of every tensor, by name."""

    def tensors(self, names: list[str]) -> dict[str, Tensor]:
        """Read full tensors to the CPU; ConfigError when a name is unknown."""
        if missing := [name for name in names if name not in self.entries]:
            fix = "`xscale checkpoint show` lists what it has."
            raise ConfigError(str(self.path), f"it has no tensor {_some_names(missing)}", fix)
        tensors = {
            name: torch.empty(self.entries[name].shape, dtype=self.entries[name].dtype)
            for name in names
        }
        tensor_files.read(
            self.path, tensors, consensus(doing="read", single_process=True), self._index
        )
        return tensors

    def tensor(self, name: str) -> Tensor:
        return self.tensors([name])[name]


class AverageReader(CheckpointReader):
    """Reads the moving average of each weight in place of the weight, under the weight's name.

    Weights that were not trained have no average and are read as they are. ConfigError where there is none at all.
    """

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        super().__init__(path, verify=verify)
        self._averages = averages_of(path, self.entries)

    def tensors(self, names: list[str]) -> dict[str, Tensor]:
        stored = {name: self._averages.get(name, name) for name in names}
        tensors = super().tensors(list(stored.values()))
        return {name: tensors[stored_name] for name, stored_name in stored.items()}


def averages_of(path: Path, entries: Collection[str]) -> dict[str, str]:
    """Map the name of each weight in `entries` to that of its moving average, where it has one.

    ConfigError, with the `path` of the checkpoint, where none has one.
    """
    names = [name.removeprefix(AVERAGES) for name in entries if name.startswith(AVERAGES)]
    if not names:
        what = "the checkpoint has no moving average of the weights"
        raise ConfigError(
            str(path), what, "Leave out --ema, or train with train.ema_decay, such as 0.999."
        )
    return {f"{WEIGHTS}{name}": f"{AVERAGES}{name}" for name in names}


def open_manifest(path: Path) -> manifest.CheckpointManifest:
    """Read the manifest and check the size of every file; ConfigError when `path` is no checkpoint."""
    if not path.is_dir():
        fix = run_near(path) or "Give the folder of a checkpoint (step-...)."
        raise ConfigError(str(path), "there is no such folder", fix)
    if not (path / MANIFEST).exists() and not (path / CONFIG).exists():
        raise ConfigError(
            str(path),
            "this is not a checkpoint",
            "Give a folder that `xscale checkpoint ls` shows.",
        )
    stored = manifest.read(path)
    manifest.check_sizes(path, stored)
    return stored


def _json(path: Path, name: str) -> dict[str, Any]:
    open_manifest(path)
    try:
        data = decode_json(read_run_file(path / name), unique=True)
    except (OSError, ValueError) as error:
        what = f"{name} cannot be read: {reason(error)}"
        raise DamageError(path, what, "Use another checkpoint.", "unreadable") from None
    if not isinstance(data, dict):
        raise DamageError(
            path, f"{name} is not an object of JSON", "Use another checkpoint.", "unreadable"
        )
    return data


def _state(path: Path) -> tuple[int, dict[str, Any]]:
    """Step of the manifest, and the state, whose step is the same."""
    step, state = open_manifest(path).step, _json(path, STATE)
    if state.get("step", step) != step or isinstance(state.get("step"), bool):
        what = f"its manifest says step {step} and its {STATE} says step {state['step']!r}"
        raise DamageError(path, what, "Use another checkpoint.", "state")
    return step, state


def _check_state(
    path: Path,
    check: Callable[[dict[str, Any], dict[str, Any]], None],
    state: dict[str, Any],
    config: dict[str, Any],
) -> None:
    """Raise DamageError where `check` raises ValueError; every rank has the same state and config."""
    try:
        check(state, config)
    except ValueError as error:
        raise DamageError(
            path, f"its {STATE} or {CONFIG} is not what a run writes: {error}", label="state"
        ) from None


def _require_same_tensors(
    path: Path,
    entries: dict[str, TensorEntry],
    tensors: Mapping[str, Tensor | FlatShard],
    cast_types: bool,
    ranks: Consensus,
) -> None:
    """Raise ConfigError on every rank unless the tensors of all ranks together are those of the checkpoint."""
    faults = []
    for name, tensor in tensors.items():
        entry = entries.get(name)
        if entry is None:
            faults.append(("missing", name, ""))
        elif tuple(tensor.shape) != entry.shape:
            faults.append(
                ("shape", name, f"is {list(entry.shape)} there and {list(tensor.shape)} here")
            )
        elif tensor.dtype != entry.dtype and not cast_types:
            faults.append(
                (
                    "type",
                    name,
                    f"is {entry.dtype} there and {tensor.dtype} here".replace("torch.", ""),
                )
            )
    expected = bytes(name in tensors for name in entries)
    answers = ranks.on_all(path, lambda: (faults, expected))
    merged = list(dict.fromkeys(fault for rank_faults, _ in answers for fault in rank_faults))
    unexpected = [
        name
        for number, name in enumerate(entries)
        if not any(flags[number] for _, flags in answers)
    ]
    _refuse(path, merged, unexpected)


def _refuse(path: Path, faults: list[tuple[str, str, str]], unexpected: list[str]) -> None:
    clauses = []
    if missing := [name for kind, name, _ in faults if kind == "missing"]:
        clauses.append(f"it lacks {_some_names(missing)}")
    if unexpected:
        clauses.append(f"it has {_some_names(unexpected)}, which this run does not have")
    if shapes := [f"{name} {what}" for kind, name, what in faults if kind == "shape"]:
        clauses.append(_some_names(shapes))
    if clauses:
        fix = f"Train with the config it was saved with ({path / CONFIG}) or give another run.dir."
        raise ConfigError(
            str(path), f"this checkpoint is of another model: {'; '.join(clauses)}", fix
        )
    if types := [f"{name} {what}" for kind, name, what in faults if kind == "type"]:
        fix = "Use the precision it was saved with, or request the conversion."
        raise ConfigError(str(path), f"this checkpoint has other dtypes: {_some_names(types)}", fix)


def _some_names(names: list[str]) -> str:
    """The first few, and how many more."""
    omitted = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {omitted} more" if omitted > 0 else "")
