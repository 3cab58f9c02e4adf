"""Whole models: token ids to logits or to the loss."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from xscale.core import config as schema
from xscale.core.config import FractionBelowOne, NonNegativeFloat, PositiveFloat, PositiveInt
from xscale.core.errors import Problem
from xscale.core.registry import Family
from xscale.nn.blocks.stack import Stack
from xscale.nn.depth.depth_pass import Prediction
from xscale.nn.dims import Dims
from xscale.nn.module import Part
from xscale.nn.position.position import POSITIONS, PositionSlot
from xscale.nn.position.rope import Rope
from xscale.nn.signals import Signal
from xscale.nn.tokens import Tokens


@dataclass(frozen=True)
class ModelTraits:
    """Properties of a model, which objectives ask for."""

    causal: bool
    """A token's output depends only on that token and earlier ones."""
    source: bool
    """Reads a second, source sequence."""
    decode: bool
    """Can generate text."""


class MupConfig(schema.Config):
    base_width: PositiveInt
    """Width at which learning rate and initial weights were tuned; there the parametrisation changes nothing."""
    base_head_width: PositiveInt | None = None
    """Width of a head at the base width; null: that of the model, so that a wider model has more heads."""


class Model(Part):
    """Built as `Model(config, vocabulary, length)`."""

    class Config(Part.Config):
        width: PositiveInt = 256
        """D, the width of the residual stream."""
        position: PositionSlot = Rope.Config()
        """The position encoding."""
        tied: bool = True
        """Whether the head shares the embedding's weight."""
        dropout: FractionBelowOne = 0.0
        """Dropout probability of the embeddings."""
        scale_embeddings: bool = False
        """Whether token embeddings are multiplied by sqrt(width) (Vaswani et al. 2017, section 3.4)."""
        fix_norm: bool = False
        """Whether the rows of the embedding and of the head are divided by their l2 norms (Nguyen and Chiang 2018)."""
        logit_soft_cap: PositiveFloat | None = None
        """Logits become cap * tanh(logit / cap) (Gemma team 2024); null: no cap."""
        init_std: NonNegativeFloat = 0.02
        """Standard deviation of initial weights; divided by sqrt(2 depth) if they write into the residual stream."""
        mup: MupConfig | None = None
        """Maximal update parametrisation (Yang et al. 2022): initial weights, logits, attention's scores and learning
        rates by the width, so that those tuned at a base width hold at this one; null: none."""

    signals_of_decoder: ClassVar[tuple[Signal[Tensor], ...]] = ()
    """Signals that every block of the decoder reads, of an encoder-decoder: stages send them on beside the memory. They
    are the outputs of its inputs (`Role.STACK_INPUT`) beside that of the stack."""

    computed_once: ClassVar[tuple[str, ...]] = ()
    """Names of the submodules that generation computes once, before its steps."""

    def forward(
        self, tokens: Tokens, targets: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        """Logits [B, T, V]; with `targets` [B, T] their summed loss in nats, a scalar of float32 or wider."""
        raise NotImplementedError

    @staticmethod
    def predict(stack: nn.Module, x: Tensor, tokens: Tokens, prediction: Prediction) -> Tensor:
        """Return what the model's head makes of the output x [B, T, D] of its stack: logits, or the summed loss."""

        def of_head(x: Tensor) -> Tensor:
            out: Tensor = prediction.head(x, prediction.targets, tokens)
            return out

        head: Callable[[Tensor], Tensor] = of_head
        for part in stack.passes() if isinstance(stack, Stack) else ():
            head = partial(part.predict, tokens=tokens, prediction=prediction, head=head)
        return head(x)


def model_dims(config: Model.Config, vocabulary: int, length: int, *, causal: bool) -> Dims:
    """Dims of all parts of the model; each stack sets `depth`."""
    where = POSITIONS.of(config.position).traits.where
    return Dims(
        width=config.width,
        depth=1,
        vocabulary=vocabulary,
        length=length,
        causal=causal,
        position=config.position if where in ("qk", "bias", "scores") else None,
        std=config.init_std,
    )


def check_position(config: Model.Config, dims: Dims, path: str) -> list[Problem]:
    """List the problems of the model's position part."""
    return list(POSITIONS.of(config.position).part.check(config.position, dims, f"{path}.position"))


MODELS = Family("model", ModelTraits, Model)
