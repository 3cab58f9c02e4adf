"""A head that classifies, scores or tags in place of the language-model head (Devlin et al. 2019, section 4)."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.nn.head.head import IGNORE_INDEX, Head
from xscale.nn.init import Init
from xscale.nn.linear import Linear
from xscale.nn.module import Module
from xscale.nn.roles import Role
from xscale.nn.signals import Signal
from xscale.nn.tokens import Tokens


class Predictions:
    """Predicted classes or scores of a micro-batch of an evaluation, with their targets and places."""

    def __init__(self, places: Tensor) -> None:
        """`places` [B, T, 2]: the number of each target's sample, and its index there."""
        self._places = places
        self._rows: list[Tensor] = []

    def add(self, predicted: Tensor, targets: Tensor, is_target: Tensor) -> None:
        """Add the predictions and targets, both [B, T], where there is a target."""
        # In double precision all of them are exact: classes and places are integers below 2**53.
        rows = (*self._places.unbind(-1), predicted.detach(), targets)
        self._rows.append(torch.stack([row.double() for row in rows])[:, is_target])

    def rows(self) -> Tensor:
        """Return sample, index, prediction and target [4, N], in double precision, on the CPU."""
        return (
            torch.cat(self._rows, 1).cpu() if self._rows else torch.zeros(4, 0, dtype=torch.float64)
        )


PREDICTIONS = Signal[Predictions]("class_head.predictions")
"""Collects what a head of classes predicts; None: not collected."""


class ClassHead(Head):
    """Hidden states to the logits of classes, or to a score. The targets say at which tokens it predicts: at one of
    each example, whose hidden state stands for the whole, or at each word.

    It is replicated over tp: its classes are few, and often fewer than the ranks.
    """

    seams = {
        "transform": None,
        "boundary": None,
        "sentence": None,
        "cross_entropy": None,
        "token_rows": None,
        "replicated_input": Role.REPLICATED_INPUT,
        "prediction_loss": None,
        "class_loss": Role.CLASS_LOSS,
    }

    def __init__(
        self,
        width: int,
        outputs: int,
        init: Init,
        *,
        scores: bool = False,
        dense: bool = False,
        activation: str = "tanh",
        per_example: bool = False,
        globals: int = 0,
    ) -> None:
        """`scores`: the one output is a score, whose loss is the squared error. `dense`: a linear map and an
        activation, tanh or relu, come first: the pooler of BERT. `per_example`: one token predicts for its example.
        `globals`: M."""
        Module.__init__(self)
        self.scores, self.globals, self.per_example = scores, globals, per_example
        self.activate = {"tanh": torch.tanh, "relu": torch.relu}[activation]
        self.dense = Linear(width, width, ("state", "width"), init, bias=True) if dense else None
        self.classes = Linear(width, outputs, ("state", "width"), init, bias=True)
        # A classifier is no map between hidden states, which optimizers of matrices update.
        self.classes.linear_maps.clear()
        self.transform = None

    @property
    def weight(self) -> Parameter:  # type: ignore[override]
        """Matrix of the classes [C, D]."""
        return self.classes.weight

    @property
    def width(self) -> int:
        return int(self.classes.weight.shape[1])

    def forward(
        self, x: Tensor, targets: Tensor | None = None, tokens: Tokens | None = None
    ) -> Tensor:
        """[B, M + T, D] -> logits or scores [B, T, C]; with targets [B, T] their summed loss, a float32 scalar.

        M are the global tokens. A target of -100 is ignored. The loss is the cross-entropy in nats, or the squared
        error. Predictions at the targets are added to the `PREDICTIONS`, where they are collected.
        """
        x = self.replicated_input(x, tokens)[:, self.globals :]
        if self.dense is not None:
            x = self.activate(self.dense(x))
        outputs: Tensor = self.classes(x)  # [B, T, C]
        if targets is None:
            return outputs
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        if tokens is not None and (collected := tokens.get(PREDICTIONS)) is not None:
            predicted = outputs[..., 0] if self.scores else outputs.argmax(-1)  # [B, T]
            collected.add(predicted, targets, targets != IGNORE_INDEX)
        return self.class_loss(outputs, targets, tokens)

    def class_loss(self, outputs: Tensor, targets: Tensor, tokens: Tokens | None = None) -> Tensor:
        """Outputs [B, T, C], in float32 at least, and targets [B, T] -> their summed loss, a scalar.

        A seam: distillation adds a loss by the teacher's outputs, which `tokens` has.
        """
        if self.scores:
            is_target = targets != IGNORE_INDEX
            return (
                (outputs[..., 0] - targets.to(outputs.dtype))
                .masked_fill(~is_target, 0.0)
                .square()
                .sum()
            )
        smoothing = 0.0 if tokens is None else tokens.forward.label_smoothing
        return F.cross_entropy(
            outputs.flatten(0, 1),
            targets.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            label_smoothing=smoothing,
        )

    def replicated_input(self, x: Tensor, tokens: Tokens | None) -> Tensor:
        """Return the hidden states of the sequence. A seam: those whose sequence is sharded over tp."""
        return x
