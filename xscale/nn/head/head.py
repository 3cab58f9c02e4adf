"""The language-model head: logits over the vocabulary, or the loss without keeping all logits; BERT's transform."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from xscale.nn.auxiliary import attach
from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import Activation, activation
from xscale.nn.head.boundary_head import BOUNDARIES, BoundaryHead
from xscale.nn.head.pooler import SentenceHead
from xscale.nn.init import ZEROS
from xscale.nn.linear import Embedding, Linear
from xscale.nn.module import Module, parameter_axes
from xscale.nn.norm.norm import NORMS, Norm
from xscale.nn.roles import Role
from xscale.nn.signals import Signal
from xscale.nn.tokens import Tokens
from xscale_kernels.linear_cross_entropy.op import linear_cross_entropy


class HeadTransform(Module):
    """[B, T, D] -> [B, T, E]; E, the width of the table, is D unless the embeddings are factorised."""

    def __init__(
        self, name: Activation, norm: Norm.Config, dims: Dims, width: int | None = None
    ) -> None:
        super().__init__()
        self.activation = activation(name)
        self.dense = Linear.from_width(dims, width or dims.width, "state", bias=True)
        self.norm: Norm = NORMS.build(norm, width or dims.width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.activation(self.dense(x)))
        return out


IGNORE_INDEX = -100
"""A target with this value is ignored."""


ONLY_LAST_LOGITS = Signal[bool]("head.only_last_logits")
"""Whether the head returns the logits of the last token alone, [B, 1, V], as generation reads them."""


class Head(Module):
    """Hidden states to logits; with `tied` the embedding's table is the weight (Press and Wolf 2017)."""

    seams = {
        "transform": Role.IN_REGION,
        "boundary": Role.IN_REGION,
        "sentence": Role.IN_REGION,
        "globals": Role.GLOBAL_TOKENS,
        "cross_entropy": Role.VOCABULARY_LOSS,
        "prediction_loss": Role.PREDICTION_LOSS,
        "token_rows": Role.VOCABULARY_ROWS,
    }
    weight: Parameter
    per_example = False
    """Whether one token predicts for its example, at which the only target is."""
    unpadded_vocabulary: int | None = None
    """Rows that are tokens: the further ones are padding, and have no probability; None: all rows are tokens."""

    def __init__(
        self,
        dims: Dims,
        tied: Embedding | None,
        *,
        bias: bool = False,
        transform: HeadTransform | None = None,
        sentence: SentenceHead | None = None,
        boundary: BoundaryHead | None = None,
        globals: int = 0,
        soft_cap: float | None = None,
        scale: float | None = None,
        fix_norm: bool = False,
    ) -> None:
        super().__init__()
        self.fix_norm = fix_norm
        """Whether the rows of the weight are divided by their lengths."""
        self.soft_cap = soft_cap
        """Logits become cap * tanh(logit / cap); None: no cap."""
        self.scale = scale
        """Factor of the hidden states; None: 1."""
        self.globals = globals
        """Global tokens before the text, for which there are no logits."""
        self.transform = transform
        """Applied to the hidden states first; None: nothing."""
        self.sentence = sentence
        """Classifier of the sequences, whose loss is attached to the hidden states; None: there is none."""
        self.boundary = boundary
        """Predicts masked tokens by the boundaries of their spans, with a loss beside that of the head; None: nothing
        does."""
        self.bias: Tensor | None
        if bias:
            self.declare("bias", (dims.vocabulary,), ("vocab",), ZEROS, decays=False)
        else:
            self.register_parameter("bias", None)
        if tied is None:
            self.declare("weight", (dims.vocabulary, dims.width), ("vocab", "width"), dims.init)
        else:
            self.weight = tied.weight

    @property
    def width(self) -> int:
        """D, the width of the hidden states."""
        return int(
            (self.weight if self.transform is None else self.transform.dense.weight).shape[1]
        )

    def forward(
        self, x: Tensor, targets: Tensor | None = None, tokens: Tokens | None = None
    ) -> Tensor:
        """[B, M + T, D] -> logits [B, T, V]; with targets [B, T], the sum of their cross-entropy in nats, a float32
        scalar. M are the global tokens.

        `tokens` are those of `x`; a wrapper of the head may need them. A target of -100 is ignored. With targets, the
        logits of a whole batch never exist at once. The logits of padding rows are the least finite number.
        """
        if self.sentence is not None and targets is not None and tokens is not None:
            x = self.sentence.attach_loss(x, tokens)
        x = x[:, self.globals :]
        if self.boundary is not None and targets is not None and tokens is not None:
            x = self._attach_boundary_loss(self.boundary, x, targets, tokens)
        if tokens is not None and tokens.get(ONLY_LAST_LOGITS) and targets is None:
            x = x[:, -1:]
        if self.transform is not None:
            x = self.transform(x)
        if self.scale is not None:
            x = x * self.scale
        weight = self.use(self.weight)
        if self.fix_norm:
            weight = F.normalize(weight, dim=-1)
        if self.bias is not None:
            # The bias is one more column, so that the (vocabulary-parallel) loss needs no bias argument.
            weight = torch.cat((weight, self.use(self.bias)[:, None]), 1)  # [V, D + 1]
            x = F.pad(x, (0, 1), value=1.0)
        rows, weight = len(weight), self.token_rows(weight)
        if targets is None:
            logits: Tensor = F.linear(x, weight)
            if self.soft_cap is not None:
                logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
            if len(weight) == rows:
                return logits
            # Finite, so that a probability of 0 times its logarithm is 0.
            return F.pad(logits, (0, rows - len(weight)), value=torch.finfo(logits.dtype).min)
        return self.prediction_loss(x.flatten(0, 1), weight, targets.flatten(), tokens)

    def token_rows(self, rows: Tensor) -> Tensor:
        """Leave out the padding rows of a weight [V, D]. A seam: the rows of a shard of the vocabulary."""
        return rows if self.unpadded_vocabulary is None else rows[: self.unpadded_vocabulary]

    def prediction_loss(
        self, x: Tensor, weight: Tensor, targets: Tensor, tokens: Tokens | None = None
    ) -> Tensor:
        """x [N, D], weight [V, D], targets [N] -> summed loss in nats, a scalar of float32 or wider.

        A seam: distillation adds a loss by the teacher's logits, which `tokens` has.
        """
        if tokens is None:
            return self.cross_entropy(x, weight, targets)
        return self.cross_entropy(
            x, weight, targets, tokens.forward.label_smoothing, tokens.forward.z_loss_weight
        )

    def _attach_boundary_loss(
        self, boundary: BoundaryHead, x: Tensor, targets: Tensor, tokens: Tokens
    ) -> Tensor:
        """Return x [B, T, D] with the loss of the targets attached that the boundary head predicts."""
        forward = tokens.forward
        if tokens.get(BOUNDARIES) is None or forward.target_weight is None:
            return x
        predictions = boundary(x, tokens)  # [B, T, D]
        rows = self.token_rows(self.use(self.weight))
        loss = self.cross_entropy(predictions.flatten(0, 1), rows, targets.flatten())
        if forward.stats is not None and forward.aux_loss_weight is not None:
            # Its mean over the targets of the step is the mean of these over its micro-batches, and their shards.
            weight = forward.target_weight / forward.aux_loss_weight / tokens.fraction()
            forward.stats.add(f"{boundary.path}/loss", loss.detach() * weight)
        return attach(x, loss, forward.target_weight * tokens.further_loss_weight())

    def cross_entropy(
        self,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Tensor:
        """x [N, D], weight [V, D], targets [N] -> summed cross-entropy in nats, a scalar of float32 or wider, with
        `z_loss` times the square of each target's log-sum-exp of the logits.

        A seam: the vocabulary-parallel loss of a sharded weight.
        """
        kernel = self.kernel_choices.get("linear_cross_entropy")
        # Float16 holds gradients of the scaled loss alone: they are computed in backward, where the scale is known.
        half = x.dtype == torch.float16
        losses = linear_cross_entropy(
            x,
            weight,
            targets,
            reduction="none" if half else "sum",
            ignore_index=IGNORE_INDEX,
            softcap=self.soft_cap,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
            implementation=kernel,
        )
        return losses.sum() if half else losses


def vocabulary_parameters(model: nn.Module) -> frozenset[str]:
    """Return the full names of the parameters that have a row for each token of the vocabulary."""
    return frozenset(name for name, axes in parameter_axes(model).items() if axes[:1] == ("vocab",))


def with_padding_rows(weight: Tensor, rows: int) -> Tensor:
    """Return a weight with a row for each token, and rows of zeros for padding up to `rows`."""
    return torch.cat((weight, weight.new_zeros(rows - len(weight), *weight.shape[1:])))


def hide_padding(model: nn.Module, vocabulary: int, unpadded: int) -> None:
    """Give no probability to the rows `unpadded` .. `vocabulary` of the heads of a model that predict tokens."""
    for module in model.modules():
        if isinstance(module, Head) and len(module.weight) == vocabulary and unpadded < vocabulary:
            module.unpadded_vocabulary = unpadded
