"""Knowledge distillation (Hinton et al. 2015, section 2): a student learns from the outputs and states of a teacher.

Losses of the student, each with its weight; z are logits, p = softmax(z / temperature), S and T student and teacher:

    soft       temperature^2 KL(p_T || p_S), the mean over targets or all tokens (Hinton et al. 2015)
    cosine     1 - cos(h_S, h_T), the mean over tokens of the outputs of the stacks (Sanh et al. 2019, DistilBERT)
    embedding  mean square of E_S W_e - E_T (Jiao et al. 2020, TinyBERT, equation 9)
    hidden     mean square of H_S W_h - H_T, summed over the student's blocks (equation 8)
    attention  mean square of A_S - A_T, summed over the student's blocks (equation 7); A are scores before the softmax

The tokens are those of the text: global tokens of either model are left out. Where samples are padded, a mean over
tokens is that over the text of each sequence, and then over the sequences. For a head of classes z are the logits of
classes, and of a score the soft loss is the squared difference from the teacher's.
The model's own loss is what a step reports; the other losses are in its statistics.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from xscale.core.config import Config, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from xscale.core.paths import PathText
from xscale.nn.attention.ops.dense import grouped_matmul, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.auxiliary import attach
from xscale.nn.init import Init
from xscale.nn.linear import Linear
from xscale.nn.module import Module, name_modules
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


class DistillConfig(Config):
    teacher: PathText | None = None
    """Folder of the teacher: a run, or a model of Hugging Face transformers; null: `teacher` in run.dir."""
    train_teacher: dict[str, Any] | None = None
    """Sections of the config in which the teacher's run differs from this one, such as {model: {stack: {depth: 4}}}:
    the teacher is trained first, until its run is done. null: the teacher is there."""
    temperature: PositiveFloat = 2.0
    """Divisor of the logits of both models in the soft loss."""
    soft_weight: NonNegativeFloat = 0.5
    """Weight of the soft loss."""
    soft_over: Literal["targets", "all"] = "targets"
    """Tokens of the soft loss. targets: those that have a target; all: every token, as in the authors' code of
    DistilBERT."""
    hard_weight: NonNegativeFloat = 0.5
    """Weight of the objective's own loss, with those of heads beside the model's, such as a sentence head."""
    cosine_weight: NonNegativeFloat = 0.0
    """Weight of the cosine loss between the outputs of the stacks."""
    embedding_weight: NonNegativeFloat = 0.0
    """Weight of the loss between the inputs of the first blocks."""
    hidden_weight: NonNegativeFloat = 0.0
    """Weight of the loss between the outputs of blocks."""
    attention_weight: NonNegativeFloat = 0.0
    """Weight of the loss between the attention scores of blocks."""
    layers: tuple[NonNegativeInt, ...] | None = None
    """For each block of the student the teacher's block, from 0, that it learns from or is initialised from; null: the
    last ones of N / M blocks each, for N blocks of the teacher and M of the student (Jiao et al. 2020)."""
    map_width: PositiveInt | None = None
    """Width of the teacher, to which learned maps W_e and W_h take the student's states; null: there are no maps, and
    the widths are equal."""
    inner_until: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of the run's steps in which only the losses of inner states are trained; afterwards only the others are
    (Jiao et al. 2020, section 4.2). null: all are trained together."""
    init_from_teacher: bool = False
    """Whether the student starts with the teacher's embeddings, head and blocks `layers` (Sanh et al. 2019)."""
    tp: PositiveInt | None = None
    """Tensor parallelism of the teacher, a divisor of the ranks of a pipeline stage; null: that of the run. Where it is
    more than the run's, the ranks of a group run the teacher on the micro-batch of each of them in turn."""
    zero: Literal[0, 3] = 0
    """0: each tp group has the whole teacher; 3: it is sharded over all ranks of a pipeline stage (ZeRO-3)."""

    @property
    def inner_weight(self) -> float:
        """Sum of the weights of the losses of inner states."""
        return self.embedding_weight + self.hidden_weight + self.attention_weight

    @property
    def outer_weight(self) -> float:
        """Sum of the weights of the other losses."""
        return self.soft_weight + self.hard_weight + self.cosine_weight

    def layers_of(self, student: int, teacher: int) -> tuple[int, ...] | None:
        """Return the teacher's block of each of the student's; None: its depth does not divide that of the teacher."""
        if self.layers is not None:
            return self.layers
        return (
            None
            if teacher % student
            else tuple(range(teacher // student - 1, teacher, teacher // student))
        )


class WidthMaps(Module):
    """The learned maps from the student's width to that of the teacher, which are used in training alone."""

    beside_stages = True
    seams = {"embedding": Role.ON_FIRST_STAGE}

    def __init__(
        self, width: int, teacher_width: int, std: float, *, embedding: bool, hidden: bool
    ) -> None:
        super().__init__()
        init = Init("normal", std)
        self.embedding = (
            Linear(width, teacher_width, ("state", "width"), init) if embedding else None
        )
        self.hidden = Linear(width, teacher_width, ("state", "width"), init) if hidden else None


def add_width_maps(model: nn.Module, config: DistillConfig, width: int, std: float) -> None:
    """Add the learned maps of a student to its model."""
    if config.map_width is not None:
        embedding, hidden = config.embedding_weight > 0, config.hidden_weight > 0
        model.add_module(
            "distillation",
            WidthMaps(width, config.map_width, std, embedding=embedding, hidden=hidden),
        )
        name_modules(model)


@dataclass
class TeacherStates:
    """States of the teacher in a forward; it collects them there, and the student's losses read them."""

    config: DistillConfig
    layers: tuple[int, ...] = ()
    """The teacher's block of each of the student's."""
    hidden_states: dict[int, Tensor] = field(default_factory=dict)
    """[B, T, D] after each block that the student learns from; -1: before the first block."""
    attention_scores: dict[int, Tensor] = field(default_factory=dict)
    """[B, H, T, T] of each such block."""
    output_states: Tensor | None = None
    """[B, T, D], output of the stack."""
    output_logits: Tensor | None = None
    """[B, T, V]."""
    wanted: frozenset[int] | None = None
    """The blocks whose states are kept, -1 for the input of the first; None: all that the student learns from."""
    last: int | None = None
    """The last block that is computed, -1 for none; None: all are."""

    def keeps(self, layer: int) -> bool:
        """Whether the states of block `layer` are kept, if they have a weight."""
        return (
            layer in self.wanted if self.wanted is not None else layer < 0 or layer in self.layers
        )

    def skips(self, layer: int) -> bool:
        """Whether block `layer` is not computed, because nothing is learned from it or from a later one."""
        return self.last is not None and layer > self.last

    def hidden(self, layer: int, x: Tensor, tokens: Tokens) -> Tensor:
        """Keep x [B, T, D], the output of block `layer`, -1 for the first block's input; return it."""
        if self.keeps(layer) and (
            self.config.embedding_weight if layer < 0 else self.config.hidden_weight
        ):
            self.hidden_states[layer] = x[:, tokens.global_tokens :]
        return x

    def attention(
        self, layer: int, q: Tensor, k: Tensor, mask: AttentionMask, o: Tensor, tokens: Tokens
    ) -> Tensor:
        """Keep the scores of q and k [B, H, T, K] in block `layer`; return o [B, H, T, K]."""
        if self.keeps(layer) and self.config.attention_weight:
            first = tokens.global_tokens
            self.attention_scores[layer] = attention_scores(q, k, mask)[:, :, first:, first:]
        return o

    def output(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Keep x [B, T, D], the output of the stack; return it."""
        if self.config.cosine_weight:
            self.output_states = x[:, tokens.global_tokens :]
        return x

    def further_loss_weight(self, tokens: Tokens) -> float:
        """Return 1: a teacher has no loss."""
        return 1.0


@dataclass
class StudentLosses:
    """Attaches the losses of the student where its states arise."""

    config: DistillConfig
    teacher: TeacherStates
    maps: WidthMaps | None = None
    padded: bool = False
    """Whether tokens of other documents than 0 are padding, of which nothing is learned."""
    gather: Callable[[Tensor, Tokens], Tensor] | None = None
    """Gathers states whose sequence is sharded over tp, [B, T/R, D] -> [B, T, D]; None: they are not sharded."""
    scores: Callable[[Tensor, Tensor, AttentionMask], Tensor] = field(
        default_factory=lambda: attention_scores
    )
    """Computes attention scores [B, H, T, S] of this process' queries."""

    def skips(self, layer: int) -> bool:
        """Whether block `layer` is not computed: all are."""
        return False

    def hidden(self, layer: int, x: Tensor, tokens: Tokens) -> Tensor:
        """Return x [B, T, D], the output of block `layer`, -1 for the first block's input, with its loss attached."""
        weight = self.config.embedding_weight if layer < 0 else self.config.hidden_weight
        if not weight:
            return x
        taught = self.teacher.hidden_states[layer if layer < 0 else self.teacher.layers[layer]]
        linear = (
            None if self.maps is None else self.maps.embedding if layer < 0 else self.maps.hidden
        )
        states = self._full(x, tokens)
        difference = upcast(states if linear is None else linear(states)) - upcast(
            taught
        )  # [B, T, D]
        loss = self._mean(difference.square().mean(-1), tokens)
        return self._attach(
            x, loss, weight * self._stage(tokens, inner=True), tokens, _name(layer, "hidden")
        )

    def attention(
        self, layer: int, q: Tensor, k: Tensor, mask: AttentionMask, o: Tensor, tokens: Tokens
    ) -> Tensor:
        """Return o [B, H, T, K], the heads' outputs in block `layer`, with the loss of their scores attached."""
        if not self.config.attention_weight:
            return o
        taught = self.teacher.attention_scores[self.teacher.layers[layer]]
        scores = self.scores(q, k, mask)[:, :, _first_compared(tokens) :, tokens.global_tokens :]
        squares = (scores - taught).square().mean(1)  # [B, T, T]
        loss = self._mean(squares, tokens)
        weight = self.config.attention_weight * self._stage(tokens, inner=True)
        return self._attach(o, loss, weight, tokens, _name(layer, "attention"))

    def output(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Return x [B, T, D], the output of the stack, with the cosine loss attached."""
        taught = self.teacher.output_states
        if taught is None:
            return x
        states = upcast(self._full(x, tokens))
        loss = self._mean(1 - F.cosine_similarity(states, upcast(taught), dim=-1), tokens)
        weight = self.config.cosine_weight * self._stage(tokens, inner=False)
        return self._attach(x, loss, weight, tokens, "distillation/cosine_loss")

    def further_loss_weight(self, tokens: Tokens) -> float:
        """Return the weight of the objective's loss, where it is trained at this step."""
        return self.config.hard_weight * self._stage(tokens, inner=False)

    def predict(self, hard: Tensor, soft: Callable[[], Tensor], tokens: Tokens) -> Tensor:
        """Return the value of the objective's loss `hard` with the gradient of the weighted sum of the two losses."""
        stage = self._stage(tokens, inner=False)
        loss = hard.detach() + self.further_loss_weight(tokens) * (hard - hard.detach())
        if not self.config.soft_weight:
            return loss
        divergence = soft() * self.config.temperature**2
        if self.config.soft_over == "all":
            weight = self.config.soft_weight * stage
            return self._attach(
                loss, divergence / _text_count(tokens), weight, tokens, "distillation/soft_loss"
            )
        forward = tokens.forward
        if (
            forward.stats is not None
            and forward.aux_loss_weight
            and forward.target_weight is not None
        ):
            share = forward.target_weight / forward.aux_loss_weight / tokens.fraction()
            forward.stats.add("distillation/soft_loss", divergence * share)
        return loss + self.config.soft_weight * stage * (divergence - divergence.detach())

    def _full(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Return the states of the text, of all of a sequence that is sharded over tp. A shard over cp keeps its global
        tokens, which `_mean` leaves out."""
        full = x if self.gather is None else self.gather(x, tokens)
        return full[:, _first_compared(tokens) :]

    def _mean(self, values: Tensor, tokens: Tokens) -> Tensor:
        """Mean of values [B, T], or [B, T, S] of pairs of tokens, over the text: a scalar.

        The mean of what the shards of a sequence give is that of the sequence.
        """
        if self.padded and tokens.documents is not None:
            documents = tokens.documents_of_sequence()
            assert documents is not None
            is_query, is_key = tokens.documents == 0, documents == 0  # [B, P], [B, T]
            counts = is_key.sum(1) ** (values.dim() - 1)
            weight = is_query if values.dim() == 2 else is_query[:, :, None] & is_key[:, None, :]
            return (values.where(weight, 0.0).flatten(1).sum(1) / counts).mean() / tokens.fraction()
        if (own_text := tokens.text_of_shard()) is not None:
            if values.dim() == 3:
                values = values.mean(-1)
            # Not a product: a token of padding has no score, and its value is no number.
            return values.where(own_text, 0.0).sum() / _text_count(tokens)
        return values.mean()

    def _stage(self, tokens: Tokens, *, inner: bool) -> float:
        """Return 1 where the losses of inner states, or the others, are trained at this step, else 0."""
        until = self.config.inner_until
        if until is None or tokens.forward.progress is None:
            return 1.0
        return float((tokens.forward.progress < until) == inner)

    def _attach(self, x: Tensor, loss: Tensor, weight: float, tokens: Tokens, name: str) -> Tensor:
        if tokens.forward.stats is not None:
            tokens.forward.stats.add(name, loss)
        if tokens.forward.aux_loss_weight is None:
            return x
        return attach(x, loss, weight * tokens.forward.aux_loss_weight * tokens.fraction())


def _first_compared(tokens: Tokens) -> int:
    """Return the index of the first token whose states are compared: that after the global tokens, which are before the
    text unless this is a shard."""
    return tokens.global_tokens if tokens.text_of_shard() is None else 0


def _text_count(tokens: Tokens) -> float:
    """Return the tokens of the micro-batch's text times `fraction`."""
    return tokens.count() - tokens.global_tokens * len(tokens.ids) * tokens.fraction()


def _name(layer: int, states: str) -> str:
    return (
        "distillation/embedding_loss" if layer < 0 else f"distillation/block_{layer}/{states}_loss"
    )


def attention_scores(q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor:
    """Return the scores [B, H, T, S] of q [B, H, T, K] and k [B, G, S, K] before the softmax, in float32 at least; 0
    where a query does not see a key, as in the authors' code of TinyBERT."""
    scores: Tensor = upcast(grouped_matmul(q, k.mT)) * q.shape[-1] ** -0.5
    bias, allowed = mask.score_bias(q, k), mask.allowed
    if mask.relative_bias is not None:
        places = [torch.arange(count, device=q.device) for count in (mask.queries, mask.keys)]
        distances = places[1] - places[0][:, None] - mask.offset  # [T, S]
        by_distance = mask.relative_bias(distances.flatten()).view(
            -1, *distances.shape
        )  # [H, T, S]
        bias = by_distance if bias is None else bias + by_distance
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if allowed is not None:
        scores = scores.masked_fill(~allowed.to(q.device), 0.0)
    return scores
