"""Substitution of what hands the states of a student and of its teacher to the losses of distillation."""

from torch import nn

from xscale.nn.class_head import ClassHead
from xscale.nn.distillation import (
    DistilledClassHead,
    DistilledHead,
    FullVocabulary,
    ObservedBlocks,
    ObservedOutput,
    ObservedScores,
    attentions_of,
)
from xscale.nn.head import Head
from xscale.nn.module import substitute
from xscale.nn.stack import Stack


def observe_states(model: nn.Module, vocabulary: FullVocabulary | None) -> None:
    """Substitute wrappers that hand the states of a model to `Tokens.states`, if a forward has it; a model without
    `vocabulary` has no head, as a stage of a pipeline, or is a teacher."""
    stack = getattr(model, "stack", None)
    if isinstance(stack, Stack):
        substitute(stack, "run_block", ObservedBlocks(stack.run_block))
        if vocabulary is None or isinstance(getattr(model, "head", None), Head):
            substitute(stack, "output", ObservedOutput(stack.output))
        for layer, attention in attentions_of(stack).items():
            substitute(attention, "attend_input", ObservedScores(layer, attention.attend_input))
    if vocabulary is not None:
        head = model.get_submodule("head")
        if isinstance(head, ClassHead):
            substitute(head, "class_loss", DistilledClassHead(head.class_loss, head.scores))
            return
        assert isinstance(head, Head)
        substitute(head, "prediction_loss", DistilledHead(head.prediction_loss, vocabulary, head.soft_cap))
