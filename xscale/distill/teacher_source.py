"""The teacher of a distilled model on disk: a run, which may be trained first, or a Hugging Face folder."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from xscale.checkpoint.search import newest_on_this_process, warn_of_older
from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError, Problem
from xscale.data.tokenizer.tokenizer import Tokenizer
from xscale.mesh import axes
from xscale.mesh.axes import Degrees, MeshConfig
from xscale.settings.settings import InitConfig, RunConfig, Settings

BLOCKS = "stack.blocks."
"""Names of the parameters of a stack's blocks begin with this."""


def teacher_folder(settings: Settings) -> Path:
    """Return the folder of the teacher of a distilled run."""
    assert settings.distill is not None, "the run has no teacher"
    return Path(settings.distill.teacher or Path(settings.run.dir) / "teacher")


def teacher_run(settings: Settings) -> Settings | None:
    """Return the settings of the run that trains the teacher; None: the teacher is there, or there is none.

    ConfigError where `distill.train_teacher` has values that cannot be.
    """
    if settings.distill is None or settings.distill.train_teacher is None:
        return None
    data = encode(settings)
    data["distill"] = data["about"] = data["train"]["stop_after"] = data["lora"] = None
    data["init"] = encode(InitConfig())
    data["train"]["freeze"] = []
    data["train"]["ema_decay"] = None
    data["run"] = encode(RunConfig(seed=settings.run.seed, device=settings.run.device))
    data["run"]["dir"] = str(teacher_folder(settings))
    try:
        return decode(type(settings), _overlay(data, settings.distill.train_teacher))
    except ConfigError as error:
        raise ConfigError(in_train_teacher(problem) for problem in error.problems) from None


def in_train_teacher(problem: Problem) -> Problem:
    """Return a problem of the teacher's run as one of the student's config."""
    return replace(problem, path=f"distill.train_teacher.{problem.path}")


def _overlay(below: Any, above: Any) -> Any:
    """Return `below` with the values of `above`; a mapping of another kind replaces the one below, as lists do."""
    if not isinstance(above, dict):
        return above
    if isinstance(below, str):
        below = {"kind": below}
    if not isinstance(below, dict) or above.get("kind", below.get("kind")) != below.get("kind"):
        below = {}
    return {**below, **{key: _overlay(below.get(key), value) for key, value in above.items()}}


@dataclass(frozen=True)
class TeacherSource:
    """A model on disk."""

    folder: Path
    settings: Settings
    """Settings whose model and sequence length are those of the teacher."""
    checkpoint: Path | None = None
    """The checkpoint with its weights; None: they are `weights`."""
    weights: Mapping[str, Tensor] | None = None
    """Parameter name -> full tensor."""
    vocabulary: int | None = None
    """Entries of its vocabulary; None: those of the tokenizer with the fingerprint."""
    fingerprint: str | None = None
    """Fingerprint of its tokenizer; None: not known."""


def find_teacher(settings: Settings, *, weights: bool = False) -> TeacherSource:
    """Find the teacher; with `weights`, convert those of a Hugging Face folder. ConfigError when there is none."""
    # Imported where used: it loads DTensor, and a check of a config does without.
    from xscale.checkpoint.load import read_state
    from xscale.run.run_folder import CHECKPOINTS, read_config

    folder = teacher_folder(settings)
    if (folder / "config.json").is_file() or (folder / "snapshots").is_dir():
        return _of_hugging_face(folder, settings, weights=weights)
    run = folder.parent.parent if folder.parent.name == CHECKPOINTS else folder
    config = read_config(run) if run.is_dir() else None
    newest = newest_on_this_process(run / CHECKPOINTS)
    checkpoint = folder if run != folder else None if newest is None else newest[1]
    if config is None or checkpoint is None or not checkpoint.is_dir():
        what = f"{folder} is no run with a checkpoint and no folder of Hugging Face transformers"
        fix = (
            f"Train one first (xscale train CONFIG run.dir={folder}), or set distill.train_teacher."
        )
        raise ConfigError("distill.teacher", what, fix)
    if run == folder and newest is not None:
        warn_of_older(run / CHECKPOINTS, newest[0])
    fingerprint = read_state(checkpoint).get("tokenizer_fingerprint")
    return TeacherSource(folder, decode(Settings, config), checkpoint, fingerprint=fingerprint)


def _of_hugging_face(folder: Path, settings: Settings, *, weights: bool) -> TeacherSource:
    # Imported where used: transformers takes seconds.
    from xscale.convert.hf.import_model import import_model, read_config, resolve_snapshot
    from xscale.convert.hf.registry import model_from_hf_config

    if weights:
        converted = import_model(folder)
        section = converted.model
        sizes = converted.sizes
        tensors = converted.weights
    else:
        _, section, sizes = model_from_hf_config(read_config(resolve_snapshot(folder)))
        tensors = None
    data: dict[str, Any] = {"model": section, "data": {"sequence_length": sizes.length}}
    precision = settings.precision.model_copy(update={"compute": "float32", "master": "float32"})
    of_teacher = decode(Settings, data).model_copy(update={"precision": precision})
    return TeacherSource(folder, of_teacher, weights=tensors, vocabulary=sizes.vocabulary)


def check_vocabulary(source: TeacherSource, tokenizer: Tokenizer) -> list[Problem]:
    """Check that the teacher's tokens are those of the run."""
    fix = "Take a teacher that was trained with the run's tokenizer, or train the student with the teacher's."
    if source.vocabulary not in (None, tokenizer.vocabulary):
        entries = tokenizer.vocabulary
        what = f"the teacher has a vocabulary of {source.vocabulary} tokens, and the run's tokenizer {entries}"
        return [Problem("distill.teacher", what, fix)]
    if source.fingerprint not in (None, tokenizer.fingerprint):
        return [
            Problem(
                "distill.teacher",
                "the teacher was trained with another tokenizer than the run's",
                fix,
            )
        ]
    return []


def teacher_degrees(settings: Settings, world: int) -> tuple[MeshConfig, Degrees]:
    """Return the mesh of the teacher: tensor parallelism, and all other ranks along dp_shard, which has those of a
    pipeline stage of the student, if that runs its blocks first."""
    assert settings.distill is not None, "the run has no teacher"
    mesh = settings.parallel.mesh
    config = MeshConfig(tp=settings.distill.tp or mesh.tp, dp_replicate=mesh.pp)
    return config, axes.resolve(config, world)
