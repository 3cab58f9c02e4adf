"""The span-boundary head of SpanBERT (Joshi et al. 2020, section 3.2): a masked token by the tokens around its span.

    h_0 = [x_{s-1}; x_{e+1}; p_{i-s+1}],  h_1 = LN(GeLU(W_1 h_0)),  y_i = LN(GeLU(W_2 h_1))

x are hidden states [B, T, D], s and e the first and the last token of the span of token i, and p learned positions. The
logits of y_i are those of the table of embeddings.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import Config, PositiveInt
from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.module import Module
from xscale.nn.norm.norm import NORMS, Norm
from xscale.nn.roles import Role
from xscale.nn.signals import BATCH, TARGETS, Signal, TokenAxes
from xscale.nn.tokens import Tokens

BOUNDARIES = Signal[Tensor](
    "boundary_head.boundaries", TokenAxes((BATCH, TARGETS, "ends"), counts_tokens=True)
)
"""[B, T, 2] places of the tokens before and after the masked span of each token; those of a token in no span are its
own place. None: there are no spans."""


class BoundaryHeadConfig(Config):
    max_span: PositiveInt = 10
    """Longest span, in tokens: rows of the table of positions within one."""
    position_width: PositiveInt = 200
    """Width of the embedding of a position within a span."""


class BoundaryHead(Module):
    """[B, T, D] and tokens with `BOUNDARIES` -> [B, T, D]."""

    seams = {"full_sequence": Role.FULL_SEQUENCE}
    positions: Parameter

    def __init__(self, config: BoundaryHeadConfig, norm: Norm.Config, dims: Dims) -> None:
        super().__init__()
        width, inputs = dims.width, 2 * dims.width + config.position_width
        self.declare(
            "positions", (config.max_span, config.position_width), ("state", "width"), dims.init
        )
        self.first = Linear(inputs, width, ("state", "width"), dims.init, bias=True)
        self.first_norm: Norm = NORMS.build(norm, width)
        self.second = Linear(width, width, ("state", "width"), dims.init, bias=True)
        self.second_norm: Norm = NORMS.build(norm, width)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        boundaries = tokens.get(BOUNDARIES)
        assert boundaries is not None
        left, right = boundaries.unbind(-1)  # [B, T]
        full, own_places = self.full_sequence(x, tokens)
        around = [
            full.gather(1, index[..., None].expand(*index.shape, x.shape[2]))
            for index in (left, right)
        ]
        table = self.use(self.positions).to(x.dtype)
        # A token in no span has its own place as left boundary, and its prediction is ignored.
        position = F.embedding((own_places - left - 1).clamp(0, len(table) - 1), table)
        hidden = self.first_norm(F.gelu(self.first(torch.cat((*around, position), -1))))
        out: Tensor = self.second_norm(F.gelu(self.second(hidden)))
        return out

    def full_sequence(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return all hidden states of the sequences of x [B, T, D], and the places of its tokens [T].

        A seam: a rank of context parallelism has some of the tokens.
        """
        return x, torch.arange(x.shape[1], device=x.device)
