"""The teacher of a distilled model: frozen, in evaluation mode, on a layout of its own."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from xscale.checkpoint.load import load
from xscale.core.errors import ConfigError
from xscale.mesh.mesh import Mesh, build_mesh, create_communicators
from xscale.nn.distillation import DistillConfig, TeacherStates
from xscale.nn.tokens import SharedValues, Tokens
from xscale.objective.objective import Batch
from xscale.parallel.config import ParallelConfig, ZeroConfig
from xscale.parallel.context.sequence_sharding import SequenceSharding, TokenShard
from xscale.parallel.distillation import observe_states
from xscale.parallel.full_tensors import gather_full
from xscale.parallel.plan import ParallelPlan
from xscale.parallel.sharded import fill_parameters, local_shape_and_offset, shard_like, sharded_parameters
from xscale.train.settings import Settings, build_on_meta
from xscale.train.teacher_source import TeacherSource, teacher_degrees


@dataclass(frozen=True)
class Teacher:
    """The frozen model and the blocks that the student learns from."""

    model: nn.Module
    config: DistillConfig
    layers: tuple[int, ...]

    @torch.no_grad()
    def states(self, batch: Batch) -> TeacherStates:
        """Run the teacher in evaluation mode on the inputs of a micro-batch of the student.

        It reads full sequences. Where the student has shards of them, so have the states that are returned.
        """
        states = TeacherStates(self.config, self.layers)
        tokens = replace(_plain(batch.tokens), states=states, only_last_logits=not self.config.soft_weight)
        source = None if batch.source is None else _plain(batch.source)
        states.output_logits = self.model(tokens, None, source)
        if isinstance(batch.tokens, TokenShard):
            _shard(states, batch.tokens.sharding)
        return states

    @torch.no_grad()
    def copy_to(self, student: nn.Module, blocks: Mapping[str, str]) -> int:
        """Copy the parameters that the student has too, each of block N of the teacher to block `blocks[N]`; return
        how many. Collective."""
        targets = {parameter.name: parameter.parameter for parameter in sharded_parameters(student)}
        count = 0
        for parameter in sharded_parameters(self.model):
            head, marker, tail = parameter.name.partition("stack.blocks.")
            number, _, inner = tail.partition(".")
            name = f"{head}{marker}{blocks.get(number, '-')}.{inner}" if marker else parameter.name
            full = gather_full(parameter.parameter)
            if name in targets:
                targets[name].copy_(shard_like(full.to(targets[name].dtype), targets[name]))
                count += 1
        return count


def _shard(states: TeacherStates, sharding: SequenceSharding) -> None:
    """Slice this rank's shard from the states of all tokens [B, T, ...]; there are no attention scores."""
    assert not states.attention_scores, "of pairs of tokens"
    states.hidden_states = {layer: sharding.shard(x) for layer, x in states.hidden_states.items()}
    states.output_states = None if states.output_states is None else sharding.shard(states.output_states)
    logits, has_all = states.output_logits, states.config.soft_weight > 0
    states.output_logits = sharding.shard(logits) if logits is not None and has_all else None


def _plain(tokens: Tokens) -> Tokens:
    """Return the full sequences' tokens without what belongs to the training of the student."""
    tokens = tokens.full if isinstance(tokens, TokenShard) else tokens
    return Tokens(
        tokens.ids,
        tokens.positions,
        tokens.documents,
        types=tokens.types,
        prefix=tokens.prefix,
        observed=tokens.observed,
        shared_values=SharedValues(),
    )


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
