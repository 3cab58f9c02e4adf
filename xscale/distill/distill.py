"""Knowledge distillation in a run: the teacher is set up, and the objective calls it on each micro-batch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from xscale.core.errors import ConfigError
from xscale.data.tokenizer.tokenizer import Tokenizer
from xscale.distill.distill_check import check_teacher, layers_of
from xscale.distill.teacher import Teacher, load_teacher, observe_states
from xscale.distill.teacher_source import check_vocabulary, find_teacher, teacher_degrees
from xscale.mesh.mesh import Mesh
from xscale.nn.blocks.stack import Stack
from xscale.nn.head.distillation import StudentLosses, WidthMaps
from xscale.nn.head.distilled_head import FullVocabulary, LocalVocabulary
from xscale.nn.head.head import Head
from xscale.nn.model.model import MODELS
from xscale.nn.tokens import Tokens
from xscale.objective.objective import OBJECTIVES, Batch, Objective
from xscale.objective.wrapped import WrappedObjective
from xscale.parallel.distillation import scores_of_shard, sequence_gather
from xscale.parallel.shard.sharded import stage_models
from xscale.parallel.tensor.vocabulary import VocabParallelCrossEntropy, VocabularyShard
from xscale.settings.settings import Settings, build_on_meta


class DistilledObjective(WrappedObjective):
    """An objective whose training loss also reads a teacher on the same micro-batch; evaluation does not."""

    def __init__(
        self,
        objective: Objective,
        teacher: Teacher,
        gather: Callable[[Tensor, Tokens], Tensor] | None = None,
    ) -> None:
        """`gather`: gathers states of the student whose sequence is sharded over tp; None: it is not."""
        super().__init__(objective)
        self.teacher = teacher
        self.gather = gather

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if batch.tokens.forward.target_weight is None:
            return self.objective.loss(model, batch)
        config, stack = self.teacher.config, getattr(model, "stack", None)
        # A stage of a pipeline runs the teacher up to the blocks that its own learn from; the last one has the head.
        wanted = self.teacher.wanted(map(int, stack.blocks) if isinstance(stack, Stack) else ())
        has_head = isinstance(getattr(model, "head", None), Head)
        outputs = has_head and config.soft_weight + config.cosine_weight > 0
        if not wanted and not has_head:
            return self.objective.loss(model, batch)
        maps = getattr(model, "distillation", None)
        assert maps is None or isinstance(maps, WidthMaps)
        states = StudentLosses(
            config,
            self.teacher.states(batch, wanted, outputs=outputs),
            maps,
            padded=OBJECTIVES.of(self.config).traits.labels is not None,
            gather=self.gather,
            scores=scores_of_shard,
        )
        return self.objective.loss(
            model, replace(batch, tokens=batch.tokens.with_forward(states=states))
        )


def distil(
    settings: Settings,
    objective: Objective,
    model: nn.Module,
    tokenizer: Tokenizer,
    mesh: Mesh,
    *,
    fresh: bool,
) -> tuple[Objective, list[str]]:
    """Load the teacher of a run and let its student `model` learn from it: the objective, and lines for the log.

    `fresh`: the student has its initial weights, which may be the teacher's. Without a teacher the objective is
    returned as it is. Collective; ConfigError for a teacher that the student cannot learn from.
    """
    config = settings.distill
    if config is None:
        return objective, []
    source = find_teacher(settings, weights=True)
    if problems := check_vocabulary(source, tokenizer) + check_teacher(settings, source):
        raise ConfigError(problems)
    network, ranks = load_teacher(settings, source, tokenizer.vocabulary, mesh)
    full_student = build_on_meta(settings, tokenizer.vocabulary)
    layers = layers_of(config, full_student, network) or ()
    teacher = Teacher(network, config, layers, ranks)
    for stage in stage_models(model):
        head = getattr(stage, "head", None)
        observe_states(stage, vocabulary_of(head) if isinstance(head, Head) else None)
    lines = [
        f"distill: teacher {MODELS.of(source.settings.model).summary} of {source.checkpoint or source.folder}, "
        f"{_layout(settings, mesh)}"
    ]
    if config.init_from_teacher and fresh:
        count = sum(teacher.copy_to(stage) for stage in stage_models(model))
        lines.append(
            f"distill: initialised {count} parameters by the teacher's, blocks by its {list(layers)}"
        )
    return DistilledObjective(objective, teacher, sequence_gather(mesh, settings.parallel)), lines


def _layout(settings: Settings, mesh: Mesh) -> str:
    assert settings.distill is not None
    _, degrees = teacher_degrees(settings, mesh.rank_info.world)
    return f"frozen, tp={degrees.tp}, ZeRO-{settings.distill.zero}"


def vocabulary_of(head: Head) -> LocalVocabulary:
    """Return this rank's part of the vocabulary of a student's head."""
    loss: Any = head.cross_entropy
    return (
        VocabularyShard(loss.region, loss.first)
        if isinstance(loss, VocabParallelCrossEntropy)
        else FullVocabulary()
    )
