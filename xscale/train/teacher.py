"""The teacher of a distilled model: found in a run or a Hugging Face folder, frozen, on a layout of its own."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xscale.checkpoint.load import load, read_state
from xscale.checkpoint.search import newest_on_this_process
from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError, Problem
from xscale.data.tokenizer.tokenizer import Tokenizer
from xscale.mesh import axes
from xscale.mesh.axes import Degrees, MeshConfig
from xscale.mesh.mesh import Mesh, build_mesh, create_communicators
from xscale.nn.distillation import DistillConfig, TeacherStates, observe_states
from xscale.nn.tokens import SharedValues, Tokens
from xscale.objective.objective import Batch
from xscale.parallel.config import ParallelConfig, ZeroConfig
from xscale.parallel.full_tensors import gather_full
from xscale.parallel.plan import ParallelPlan
from xscale.parallel.sharded import fill_parameters, local_shape_and_offset, shard_like, sharded_parameters
from xscale.train.run_folder import CHECKPOINTS, read_config
from xscale.train.settings import RunConfig, Settings, build_on_meta


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
    data["distill"] = data["about"] = data["train"]["stop_after"] = None
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
    folder = teacher_folder(settings)
    if (folder / "config.json").is_file() or (folder / "snapshots").is_dir():
        return _of_hugging_face(folder, settings, weights=weights)
    run = folder.parent.parent if folder.parent.name == CHECKPOINTS else folder
    config = read_config(run) if run.is_dir() else None
    newest = newest_on_this_process(run / CHECKPOINTS)
    checkpoint = folder if run != folder else None if newest is None else newest[1]
    if config is None or checkpoint is None or not checkpoint.is_dir():
        what = f"{folder} is no run with a checkpoint and no folder of Hugging Face transformers"
        fix = f"Train one first (xscale train CONFIG run.dir={folder}), or set distill.train_teacher."
        raise ConfigError("distill.teacher", what, fix)
    fingerprint = read_state(checkpoint).get("tokenizer_fingerprint")
    return TeacherSource(folder, decode(Settings, config), checkpoint, fingerprint=fingerprint)


def _of_hugging_face(folder: Path, settings: Settings, *, weights: bool) -> TeacherSource:
    # Imported where used: transformers takes seconds.
    from xscale.convert.hf.import_model import import_model, read_config, resolve_snapshot
    from xscale.convert.hf.registry import model_from_hf_config

    if weights:
        converted = import_model(folder)
        section, sizes, tensors = converted.model, converted.sizes, converted.weights
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
        ours = tokenizer.vocabulary
        what = f"the teacher has a vocabulary of {source.vocabulary} tokens, and the run's tokenizer {ours}"
        return [Problem("distill.teacher", what, fix)]
    if source.fingerprint not in (None, tokenizer.fingerprint):
        return [Problem("distill.teacher", "the teacher was trained with another tokenizer than the run's", fix)]
    return []


@dataclass(frozen=True)
class Teacher:
    """The frozen model and the blocks that the student learns from."""

    model: nn.Module
    config: DistillConfig
    layers: tuple[int, ...]

    @torch.no_grad()
    def states(self, batch: Batch) -> TeacherStates:
        """Run the teacher in evaluation mode on the inputs of a micro-batch of the student."""
        states = TeacherStates(self.config, self.layers)
        tokens = replace(_plain(batch.tokens), states=states, only_last_logits=not self.config.soft_weight)
        source = None if batch.source is None else _plain(batch.source)
        states.logits = self.model(tokens, None, source)
        return states

    @torch.no_grad()
    def copy_to(self, student: nn.Module, blocks: Mapping[str, str]) -> int:
        """Copy the parameters that the student has too, each of block N of the teacher to block `blocks[N]`; return
        how many. Collective."""
        targets = {parameter.name: parameter.parameter for parameter in sharded_parameters(student)}
        count = 0
        for parameter in sharded_parameters(self.model):
            head, found, tail = parameter.name.partition("stack.blocks.")
            number, _, inner = tail.partition(".")
            name = f"{head}{found}{blocks.get(number, '-')}.{inner}" if found else parameter.name
            full = gather_full(parameter.parameter)
            if name in targets:
                targets[name].copy_(shard_like(full.to(targets[name].dtype), targets[name]))
                count += 1
        return count


def _plain(tokens: Tokens) -> Tokens:
    """Return the tokens without what belongs to the training of the student."""
    return Tokens(tokens.ids, tokens.positions, tokens.documents, shared_values=SharedValues())


def teacher_degrees(settings: Settings, world: int) -> tuple[MeshConfig, Degrees]:
    """Return the mesh of the teacher: tensor parallelism, and all other ranks along dp_shard."""
    assert settings.distill is not None, "the run has no teacher"
    config = MeshConfig(tp=settings.distill.tp or settings.parallel.mesh.tp)
    return config, axes.resolve(config, world)


def load_teacher(settings: Settings, source: TeacherSource, vocabulary: int, mesh: Mesh) -> nn.Module:
    """Build the teacher on its own layout and read its weights. Collective; ConfigError where it does not fit."""
    assert settings.distill is not None, "the run has no teacher"
    info = mesh.rank_info
    config, degrees = teacher_degrees(settings, info.world)
    own_mesh = mesh
    if not info.is_single_process:
        own_mesh = build_mesh(info, degrees, mesh.device, mesh.timeout)
        create_communicators(own_mesh)
    parallel = ParallelConfig(mesh=config, zero=ZeroConfig(stage=settings.distill.zero))
    length = source.settings.data.sequence_length
    plan = ParallelPlan(parallel, settings.precision.model_copy(update={"float8": None}), length)
    model = build_on_meta(source.settings, vocabulary)
    if problems := plan.check(model, info.world):
        raise ConfigError(replace(problem, path=f"distill.teacher ({problem.path})") for problem in problems)
    model.requires_grad_(False)

    def fill(stage: nn.Module) -> None:
        def value(name: str, parameter: nn.Parameter) -> Tensor:
            shape, offset = local_shape_and_offset(parameter)
            if source.weights is None:
                return torch.full(shape, float("nan"), device=mesh.device, dtype=plan.master)
            local = source.weights[name]
            for dim, (start, count) in enumerate(zip(offset, shape, strict=True)):
                local = local.narrow(dim, start, count)
            return local.to(mesh.device, plan.master, copy=True).contiguous()

        fill_parameters(stage, value)

    model = plan.shard(model, own_mesh, fill)
    if source.checkpoint is not None:
        tensors = {f"model.{parameter.name}": parameter.parameter.detach() for parameter in sharded_parameters(model)}
        verify = settings.checkpoint.verify
        load(source.checkpoint, tensors, only="model.", cast_types=True, verify=verify, group=mesh.background)
    observe_states(model, None)
    return model.eval()
