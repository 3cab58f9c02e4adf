"""Heads of a student (Hinton et al. 2015): the objective's loss, and the soft loss by the logits of its teacher.

    soft  temperature^2 KL(softmax(t / temperature) || softmax(z / temperature)),  z the student's and t the teacher's

`xscale.nn.head.distillation` has the weights and the other losses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.nn.attention.ops.dense import upcast
from xscale.nn.head.distillation import StudentLosses
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.tokens import Tokens


class LocalVocabulary(Protocol):
    """The logits of a vocabulary that this process has; parallelism shards it."""

    def own(self, logits: Tensor, count: int) -> Tensor:
        """Return those of the logits [N, V] whose tokens this process has, [N, count]."""

    def logsumexp(self, logits: Tensor) -> Tensor:
        """Over the vocabulary: [N, count] -> [N]."""

    def total(self, sums: Tensor) -> Tensor:
        """Sum over the shards of the vocabulary: [N] -> [N]."""


@dataclass(frozen=True)
class FullVocabulary:
    """The logits of all tokens of the vocabulary, as one process has them."""

    def own(self, logits: Tensor, count: int) -> Tensor:
        return logits.narrow(-1, 0, count)

    def logsumexp(self, logits: Tensor) -> Tensor:
        return logits.logsumexp(-1)

    def total(self, sums: Tensor) -> Tensor:
        return sums


class SoftLoss(torch.autograd.Function):
    """KL(softmax(t / temperature) || softmax(z / temperature)), summed over N tokens whose logits may be sharded."""

    @staticmethod
    def forward(
        context: Any, z: Tensor, t: Tensor, temperature: float, vocabulary: LocalVocabulary
    ) -> Tensor:
        """z and t, the logits [N, V] of student and teacher, in float32 or wider -> a scalar."""
        z, t = z / temperature, t / temperature
        log_sum, teacher_log_sum = vocabulary.logsumexp(z), vocabulary.logsumexp(t)
        p = (t - teacher_log_sum[:, None]).exp()
        divergence = vocabulary.total((p * (t - z)).sum(-1)) - teacher_log_sum + log_sum
        context.save_for_backward(((z - log_sum[:, None]).exp() - p) / temperature)
        return divergence.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        (difference,) = context.saved_tensors
        return gradient * difference, None, None, None


@dataclass(frozen=True)
class DistilledHead:
    """The loss of a student's head: the objective's, with the gradient of the soft loss."""

    hard: Callable[..., Tensor]
    vocabulary: LocalVocabulary
    soft_cap: float | None

    def __call__(
        self, x: Tensor, weight: Tensor, targets: Tensor, tokens: Tokens | None = None
    ) -> Tensor:
        """x [N, D], this process' rows of the weight [V, D], targets [N] -> summed loss in nats, a scalar."""
        hard = self.hard(x, weight, targets, tokens)
        if tokens is None or not isinstance(tokens.forward.states, StudentLosses):
            return hard
        taught, config = tokens.forward.states.teacher.output_logits, tokens.forward.states.config

        def soft() -> Tensor:
            assert taught is not None, "the soft loss reads the teacher's logits"
            is_text = tokens.text_of_shard()
            every = None if is_text is None else is_text.flatten()
            learned = (
                every if config.soft_over == "all" else targets != IGNORE_INDEX
            )  # [N]; None: all
            # Without this the logits of tokens that nothing is learned from would be computed too. A GPU would have to
            # wait for the count, and computes them.
            on_cpu = x.device.type == "cpu"
            kept = learned.nonzero()[:, 0] if on_cpu and learned is not None else slice(None)
            z = upcast(F.linear(x[kept], weight))
            if self.soft_cap is not None:
                z = self.soft_cap * torch.tanh(z / self.soft_cap)
            t = self.vocabulary.own(upcast(taught.flatten(0, 1)[kept]), len(weight))
            if not on_cpu and learned is not None:
                # Equal logits have no loss and no gradient.
                z, t = (logits.masked_fill(~learned[:, None], 0.0) for logits in (z, t))
            divergence: Tensor = SoftLoss.apply(z, t, config.temperature, self.vocabulary)  # type: ignore[no-untyped-call]
            return divergence

        return tokens.forward.states.predict(hard, soft, tokens)


@dataclass(frozen=True)
class DistilledClassHead:
    """The loss of a student's head of classes or of a score: the objective's, with the gradient of the soft loss."""

    hard: Callable[..., Tensor]
    scores: bool

    def __call__(self, outputs: Tensor, targets: Tensor, tokens: Tokens | None = None) -> Tensor:
        """Outputs [B, T, C] and targets [B, T] -> summed loss, a scalar."""
        hard = self.hard(outputs, targets, tokens)
        if tokens is None or not isinstance(tokens.forward.states, StudentLosses):
            return hard
        taught, temperature = (
            tokens.forward.states.teacher.output_logits,
            tokens.forward.states.config.temperature,
        )

        def soft() -> Tensor:
            assert taught is not None, "the soft loss reads the teacher's outputs"
            # Equal outputs have no loss and no gradient.
            ignored = (targets == IGNORE_INDEX).flatten()[:, None]
            z, t = (
                upcast(x).flatten(0, 1).masked_fill(ignored, 0.0) for x in (outputs, taught)
            )  # [N, C]
            if self.scores:
                return ((z - t) / temperature).square().sum()
            divergence: Tensor = SoftLoss.apply(z, t, temperature, FullVocabulary())  # type: ignore[no-untyped-call]
            return divergence

        return tokens.forward.states.predict(hard, soft, tokens)
