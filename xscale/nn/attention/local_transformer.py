"""Yang et al. 2018 (modeling localness, "Local Transformer"): a Gaussian bias around a place that the query predicts.

    G_ij = -(j - p_i)^2 / (2 sigma_i^2),  sigma_i = D_i / 2
    p_i = I sigmoid(U_p^T tanh(W_p q_i)),  D_i = I sigmoid(U_d^T tanh(W_p q_i))

G is added to the scores. I is the number of keys that the query sees: those of its document, and in a causal model no
later ones. Places j count from 0 at the start of the document. The window D may also be one of all queries of a layer,
given or predicted from the mean of the keys, D = I sigmoid(U_d^T tanh(W_d mean(k_j))).
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveFloat
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.attention.core import CORES, SCORES
from xscale.nn.attention.ops.dense import repeat_kv, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.softmax import Softmax
from xscale.nn.dims import Dims

NARROWEST = 0.01
"""Tokens of the narrowest window: it leaves one key, whose square is still a number."""


@CORES.register(
    "local_transformer",
    traits=replace(SCORES, cost="2*T*S*K + T*K*K + 2*T*K"),
    deviations=(
        "In a causal model I and the mean of the keys are of the tokens up to the query, not of a whole sentence.",
    ),
)
class LocalTransformer(Softmax):
    reads_bias = True
    hidden: Parameter
    center: Parameter
    window: Parameter
    window_hidden: Parameter

    class Config(Softmax.Config):
        window_from: Literal["query", "layer"] = "query"
        """Input of the prediction of D. query: each query; layer: the mean of the keys that a query sees, so that all
        queries of a bidirectional layer have one window, as in the paper's layer-specific windows."""
        fixed_window: PositiveFloat | None = None
        """D of all queries, in tokens (the paper tries 10); null: it is predicted."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.fixed_window, self.window_from = config.fixed_window, config.window_from
        self.declare(
            "hidden", (heads, head_width, head_width), ("heads", "state", "state"), dims.init
        )
        self.declare("center", (heads, head_width), ("heads", "state"), dims.init)
        if config.fixed_window is None:
            self.declare("window", (heads, head_width), ("heads", "state"), dims.init)
            if config.window_from == "layer":
                shape = (heads, head_width, head_width)
                self.declare("window_hidden", shape, ("heads", "state", "state"), dims.init)

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        if config.fixed_window is not None and config.window_from == "layer":
            what = (
                f"the window is given, fixed_window={config.fixed_window}, so it is not predicted"
            )
            problems.append(
                Problem(
                    f"{path}.window_from",
                    what,
                    choices=take("query") + take(None, key=f"{path}.fixed_window"),
                )
            )
        return problems

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        bias = self.gaussian(q, k, mask)
        bias = bias if mask.bias is None else bias + mask.bias
        return super().forward(q, k, v, replace(mask, bias=bias))

    def gaussian(self, q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor:
        """Return the bias G [B, H, T, S] of queries [B, H, T, K] and keys [B, G, S, K]."""
        hidden = torch.tanh(q @ self.use(self.hidden).mT)  # [B, H, T, K]
        seen: Tensor | int = mask.keys
        if mask.allowed is not None:
            seen = mask.allowed.to(q.device).sum(-1, keepdim=True)  # [B or 1, 1, T, 1]
        center = seen * torch.sigmoid(
            upcast(hidden @ self.use(self.center)[..., None])
        )  # [B, H, T, 1]
        window: Tensor | float
        if self.fixed_window is not None:
            window = self.fixed_window
        else:
            if self.window_from == "layer":
                means = repeat_kv(mean_of_seen(k, mask), q.shape[1])  # [B, H, T or 1, K]
                hidden = torch.tanh(means @ self.use(self.window_hidden).mT)
            window = seen * torch.sigmoid(upcast(hidden @ self.use(self.window)[..., None]))
            window = window.clamp(min=NARROWEST)
        return -2 * ((key_places(mask, q.device)[:, None, None] - center) / window).square()

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        predicted = queries * head_width * (head_width + (1 if self.fixed_window else 2))
        if self.fixed_window is None and self.window_from == "layer":
            predicted += queries * head_width * (head_width + keys)
        return super().multiply_adds(queries, keys, heads, head_width) + heads * predicted


def mean_of_seen(k: Tensor, mask: AttentionMask) -> Tensor:
    """Return the mean of the keys [B, G, S, K] that each query sees, [B, G, T, K]; [B, G, 1, K] where it sees all."""
    if mask.allowed is None:
        return k.mean(2, keepdim=True)
    allowed = upcast(mask.allowed.to(k.device, k.dtype))  # [B or 1, 1, T, S]
    # A query that observes nothing has an output of 0, whatever its window.
    weights = allowed / allowed.sum(-1, keepdim=True).clamp(min=1)
    return (weights @ upcast(k)).to(k.dtype)


def key_places(mask: AttentionMask, device: torch.device) -> Tensor:
    """Return the place of each key in its document, [B or 1, S]."""
    places = torch.arange(mask.keys, device=device)[None]
    documents = mask.key_documents
    if documents is None:
        return places
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - torch.where(first, places, 0).cummax(1).values
