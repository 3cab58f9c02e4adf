"""The teacher of a distilled model: frozen, in evaluation mode, on a layout of its own."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from xscale.checkpoint.load import load
from xscale.core.errors import ConfigError
from xscale.distill.teacher_source import BLOCKS, TeacherSource, teacher_degrees
from xscale.mesh.mesh import Mesh, build_mesh, create_communicators
from xscale.nn.adapt.observed_states import (
    ObservedBlocks,
    ObservedOutput,
    ObservedScores,
    attentions_of,
)
from xscale.nn.blocks.stack import Stack
from xscale.nn.forward import Forward
from xscale.nn.head.class_head import ClassHead
from xscale.nn.head.distillation import DistillConfig, TeacherStates
from xscale.nn.head.distilled_head import DistilledClassHead, DistilledHead, LocalVocabulary
from xscale.nn.head.head import ONLY_LAST_LOGITS, Head
from xscale.nn.module import substitute
from xscale.nn.tokens import SharedValues, Tokens
from xscale.objective.objective import Batch
from xscale.parallel.config import ParallelConfig, ZeroConfig
from xscale.parallel.context.sequence_sharding import SequenceSharding, TokenShard
from xscale.parallel.distillation import TeacherRanks, teacher_ranks
from xscale.parallel.plan import ParallelPlan
from xscale.parallel.shard.full_tensors import ShardedWeightWriter, gather_full
from xscale.parallel.shard.sharded import (
    fill_parameters,
    local_shape_and_offset,
    sharded_parameters,
)
from xscale.settings.settings import Settings, build_on_meta


@dataclass(frozen=True)
class Teacher:
    """The frozen model and the blocks that the student learns from."""

    model: nn.Module
    config: DistillConfig
    layers: tuple[int, ...]
    ranks: TeacherRanks

    def wanted(self, blocks: Iterable[int]) -> frozenset[int]:
        """Return the teacher's blocks whose states the student's `blocks` learn from; -1 for the input of the first."""
        config, blocks = self.config, set(blocks)
        inner = config.hidden_weight + config.attention_weight
        of_blocks = {self.layers[layer] for layer in blocks} if inner else set()
        return frozenset(of_blocks | ({-1} if config.embedding_weight and 0 in blocks else set()))

    @torch.no_grad()
    def states(self, batch: Batch, wanted: frozenset[int], *, outputs: bool) -> TeacherStates:
        """Run the teacher in evaluation mode on the inputs of a micro-batch of the student, up to the last of the
        blocks that are `wanted`, or, with `outputs`, to its logits.

        It reads full sequences. Where the student has shards of them, so have the states that are returned. Collective
        over the ranks that run the teacher together.
        """
        of_ranks = self.ranks.micro_batches(_plain(batch.tokens))
        sources: list[Tokens | None] = [None] * len(of_ranks)
        if batch.source is not None:
            sources = list(self.ranks.micro_batches(_plain(batch.source)))
        kept = TeacherStates(self.config)
        for turn, (tokens, source) in enumerate(zip(of_ranks, sources, strict=True)):
            states = self._run(tokens, source, wanted, outputs=outputs)
            if turn == self.ranks.turn:
                kept = states
        if isinstance(batch.tokens, TokenShard):
            _shard(kept, batch.tokens.sharding)
        return kept

    def _run(
        self, tokens: Tokens, source: Tokens | None, wanted: frozenset[int], *, outputs: bool
    ) -> TeacherStates:
        last = None if outputs else max(wanted, default=-1)
        states = TeacherStates(self.config, self.layers, wanted=wanted, last=last)
        needs_logits = outputs and self.config.soft_weight > 0
        observed = tokens.with_forward(states=states).with_signals(
            {ONLY_LAST_LOGITS: not needs_logits}
        )
        logits = self.model(observed, None, source)
        states.output_logits = logits if needs_logits else None
        states.output_states = states.output_states if outputs else None
        scores = states.attention_scores
        states.attention_scores = {
            layer: self.ranks.own_heads(scores[layer]) for layer in sorted(scores)
        }
        return states

    @torch.no_grad()
    def copy_to(self, student: nn.Module) -> int:
        """Copy the parameters that the student has too, those of its blocks from the blocks `layers`; return how many
        it has of them. Collective."""
        weights = ShardedWeightWriter(student)
        targets = {parameter.name: parameter.parameter for parameter in sharded_parameters(student)}
        count = 0
        for parameter in sharded_parameters(self.model):
            names = self._names_in_student(parameter.name)
            full = gather_full(parameter.parameter)
            for target in [targets[name] for name in names if name in targets]:
                weights.write(target, full)
                count += 1
        return count

    def _names_in_student(self, name: str) -> list[str]:
        """Return the student's parameters that one of the teacher initialises: a block may teach several."""
        # Blocks of multi-token prediction are no blocks of the stack, and keep their names.
        if not name.startswith(BLOCKS):
            return [name]
        number, _, inner = name.removeprefix(BLOCKS).partition(".")
        return [
            f"{BLOCKS}{layer}.{inner}"
            for layer, taught in enumerate(self.layers)
            if taught == int(number)
        ]


def _shard(states: TeacherStates, sharding: SequenceSharding) -> None:
    """Slice this rank's shard from the states of all tokens [B, T, ...], and that of its queries from the scores.

    They are 0 at the student's global tokens."""
    shard = sharding.shard_predicted
    outputs = states.output_states
    logits = states.output_logits
    states.attention_scores = {
        layer: shard(scores.transpose(1, 2)).transpose(1, 2)
        for layer, scores in states.attention_scores.items()
    }
    states.hidden_states = {layer: shard(x) for layer, x in states.hidden_states.items()}
    states.output_states = None if outputs is None else shard(outputs)
    states.output_logits = None if logits is None else shard(logits)


def _plain(tokens: Tokens) -> Tokens:
    """Return the full sequences' tokens without what belongs to the training of the student."""
    tokens = tokens.full if isinstance(tokens, TokenShard) else tokens
    # The teacher knows padding as a document of its own.
    return replace(tokens, padding=None, forward=Forward(), shared_values=SharedValues())


def load_teacher(
    settings: Settings, source: TeacherSource, vocabulary: int, mesh: Mesh
) -> tuple[nn.Module, TeacherRanks]:
    """Build the teacher on its own layout and read its weights; return it and the ranks that run it together.

    Collective; ConfigError where it does not fit.
    """
    assert settings.distill is not None, "the run has no teacher"
    info = mesh.rank_info
    config, degrees = teacher_degrees(settings, info.world)
    own_mesh = mesh
    if not info.is_single_process:
        own_mesh = build_mesh(info, degrees, mesh.device, mesh.timeout)
        create_communicators(own_mesh)
    parallel = ParallelConfig(mesh=config, zero=ZeroConfig(stage=settings.distill.zero))
    length = source.settings.data.sequence_length
    precision = settings.precision.model_copy(update={"float8": None, "float8_kernel": "torch"})
    plan = ParallelPlan(parallel, precision, length)
    model = build_on_meta(source.settings, vocabulary)
    if problems := plan.check(model, info.world):
        raise ConfigError(
            replace(problem, path=f"distill.teacher ({problem.path})") for problem in problems
        )
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
        tensors = {
            f"model.{parameter.name}": parameter.parameter.detach()
            for parameter in sharded_parameters(model)
        }
        verify = settings.checkpoint.verify
        load(
            source.checkpoint,
            tensors,
            only="model.",
            cast_types=True,
            verify=verify,
            group=mesh.background,
        )
    observe_states(model, None)
    return model.eval(), teacher_ranks(mesh, own_mesh)


def observe_states(model: nn.Module, vocabulary: LocalVocabulary | None) -> None:
    """Substitute wrappers that hand the states of a model to `Tokens.states`, if a forward has it.

    `vocabulary`: that of a student's head; None for a teacher, and for a stage of a pipeline without a head, which
    sends the output of its last block to the next one.
    """
    stack, head = getattr(model, "stack", None), getattr(model, "head", None)
    if isinstance(stack, Stack):
        substitute(stack, "run_block", ObservedBlocks(stack.run_block))
        if isinstance(head, Head):
            substitute(stack, "output", ObservedOutput(stack.output))
        for layer, attention in attentions_of(stack).items():
            substitute(attention, "attend_input", ObservedScores(layer, attention.attend_input))
    if vocabulary is None:
        return
    if isinstance(head, ClassHead):
        substitute(head, "class_loss", DistilledClassHead(head.class_loss, head.scores))
        return
    assert isinstance(head, Head)
    substitute(
        head, "prediction_loss", DistilledHead(head.prediction_loss, vocabulary, head.soft_cap)
    )
