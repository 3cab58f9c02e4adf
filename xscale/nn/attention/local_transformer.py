"""Yang et al. 2018 (modeling localness, "Local Transformer"): a Gaussian bias around a place that the query predicts.

    G_ij = -(j - p_i)^2 / (2 sigma_i^2),  sigma_i = D_i / 2
    p_i = I sigmoid(U_p^T tanh(W_p q_i)),  D_i = I sigmoid(U_d^T tanh(W_p q_i))

G is added to the scores. I is the number of keys that the query sees: those of its document, and in a causal model no
later ones. Places j count from 0 at the start of the document.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import Parameter

from xscale.nn.attention.core import CORES, CoreTraits
from xscale.nn.attention.ops.dense import upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.softmax import Softmax
from xscale.nn.dims import Dims

NARROWEST = 0.01
"""Tokens of the narrowest window: it leaves one key, whose square is still a number."""


@CORES.register(
    "local_transformer",
    traits=CoreTraits(
        causal=True,
        bidirectional=True,
        cross=True,
        per_head=True,
        cost="2*T*S*K + T*K*K + 2*T*K",
        context=("ulysses",),
        dropout=True,
        bias=True,
        position_terms=True,
        documents=True,
        decode=True,
    ),
    deviations=(
        "The paper's window of a layer, which is predicted from the mean of its keys, is not part of it.",
        "In a causal model I counts the tokens up to the query; the paper has I of a whole sentence.",
    ),
)
class LocalTransformer(Softmax):
    reads_bias: ClassVar[bool] = True
    hidden: Parameter
    center: Parameter
    window: Parameter

    class Config(Softmax.Config):
        fixed_window: float | None = Field(default=None, gt=0)
        """D of all queries, in tokens (the paper tries 10); null: each query predicts its own."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.fixed_window = config.fixed_window
        self.declare("hidden", (heads, head_width, head_width), ("heads", "state", "state"), dims.init)
        self.declare("center", (heads, head_width), ("heads", "state"), dims.init)
        if config.fixed_window is None:
            self.declare("window", (heads, head_width), ("heads", "state"), dims.init)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        bias = self.gaussian(q, mask)
        bias = bias if mask.bias is None else bias + mask.bias
        return super().forward(q, k, v, replace(mask, bias=bias))

    def gaussian(self, q: Tensor, mask: AttentionMask) -> Tensor:
        """Return the bias G [B, H, T, S] of queries [B, H, T, K]."""
        hidden = torch.tanh(q @ self.use(self.hidden).mT)  # [B, H, T, K]
        seen: Tensor | int = mask.keys
        if mask.allowed is not None:
            seen = mask.allowed.to(q.device).sum(-1, keepdim=True)  # [B or 1, 1, T, 1]
        center = seen * torch.sigmoid(upcast(hidden @ self.use(self.center)[..., None]))  # [B, H, T, 1]
        window: Tensor | float
        if self.fixed_window is None:
            window = seen * torch.sigmoid(upcast(hidden @ self.use(self.window)[..., None]))
            window = window.clamp(min=NARROWEST)
        else:
            window = self.fixed_window
        return -2 * ((key_places(mask, q.device)[:, None, None] - center) / window).square()

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        predicted = head_width * (head_width + (1 if self.fixed_window else 2))
        return super().multiply_adds(queries, keys, heads, head_width) + heads * queries * predicted


def key_places(mask: AttentionMask, device: torch.device) -> Tensor:
    """Return the place of each key in its document, [B or 1, S]."""
    places = torch.arange(mask.keys, device=device)[None]
    documents = mask.key_documents
    if documents is None:
        return places
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - torch.where(first, places, 0).cummax(1).values
