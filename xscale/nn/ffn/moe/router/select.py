"""Scores of the experts, a linear map with jitter in training, and the k experts of highest gate with their weights."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xscale.nn.ffn.moe.router.router import Router, RouterDims
from xscale.nn.init import ZEROS
from xscale.nn.tokens import Tokens
from xscale_kernels.router.op import route


class LinearScore:
    """Logits = W x, or W x + b; declares `weight` [E, D], and `logit_bias` [E] if there is one, on its router."""

    class Config(Router.Config):
        precision: Literal["float32", "compute"] = "float32"
        """Dtype of the logits: float32, or that of the layer's input (float64 stays float64)."""
        jitter: float = Field(default=0.0, ge=0, lt=1)
        """Training multiplies the router's input by uniform noise in [1 - jitter, 1 + jitter] (Fedus et al. 2021:
        0.01)."""
        logit_bias: bool = False
        """Whether the logits have a learned bias for each expert, which starts at 0 (OpenAI 2025, gpt-oss)."""

    def __init__(self, router: Router, config: Config, dims: RouterDims) -> None:
        self.router: Any = router
        self.config = config
        router.declare("weight", (dims.experts, dims.width), ("state", "width"), dims.init)
        if config.logit_bias:
            router.declare("logit_bias", (dims.experts,), ("state",), ZEROS, decays=False)

    def logits(self, x: Tensor, tokens: Tokens) -> Tensor:
        """[N, D] -> [N, E]."""
        x = self.upcast(x)
        if self.config.jitter and self.router.draws(tokens):
            jitter = self.config.jitter
            x = x * self.router.random.uniform(
                x, ("tokens", "width"), low=1 - jitter, high=1 + jitter
            )
        logits = self.linear(x, self.router.weight)
        return (
            logits + self.router.use(self.router.logit_bias).to(x.dtype)
            if self.config.logit_bias
            else logits
        )

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x` [N, D], upcast, times a parameter of the router [E, D] -> [N, E]."""
        return F.linear(x, self.router.use(weight).to(x.dtype))

    def upcast(self, x: Tensor) -> Tensor:
        """`x` in the dtype that logits are computed in."""
        return (
            x
            if self.config.precision == "compute"
            else x.to(torch.promote_types(x.dtype, torch.float32))
        )


ScoreFunction = Literal["softmax", "sigmoid"]


class TopKConfig(Router.Config):
    """Options of the routers that choose by gates: how many experts, which gates, which weights."""

    top_k: int = Field(default=2, ge=1)
    """Experts of each token."""
    score: ScoreFunction = "softmax"
    """Function from logits to gates: softmax over the experts, or a sigmoid of each (DeepSeek-AI 2024)."""
    normalise: bool = True
    """Divide the chosen gates by their sum (`norm_topk_prob`); with softmax this equals a softmax over the chosen
    logits alone."""
    scale: float = Field(default=1.0, gt=0)
    """Factor of the weights after that (`routed_scaling_factor`; DeepSeek-AI 2024: 2.5)."""


def select_topk(
    router: Router,
    tokens: Tokens,
    logits: Tensor,
    k: int,
    score: ScoreFunction = "softmax",
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [N, E] -> gates [N, E], the gates of each token's k best experts [N, k], and these experts [N, k].

    Best first. `bias` [E] is added to the gates for the selection only. A recomputation repeats the selection.
    """
    routed = route(
        logits, k, score=score, bias=bias, implementation=router.kernel_choices.get("router")
    )
    if tokens.forward.choices is None:
        return routed.scores, routed.weights, routed.experts
    # The forward gathers too, so that it saves the same tensors as its recomputation.
    experts = router.repeat(routed.experts, tokens)
    return routed.scores, routed.scores.gather(1, experts), experts


def gates_of(logits: Tensor, score: ScoreFunction) -> Tensor:
    """Gates [N, E] of logits [N, E], for a selection that is not the operator's top-k."""
    return logits.softmax(1) if score == "softmax" else logits.sigmoid()


def combine_weights(gates: Tensor, config: TopKConfig) -> Tensor:
    """Weights [N, k] of the chosen experts' outputs from their gates [N, k]."""
    if config.normalise:
        # Without an epsilon: gates that are all zero must show as a step that is not finite.
        gates = gates / gates.sum(1, keepdim=True)
    return gates * config.scale if config.scale != 1 else gates


def probabilities_of(gates: Tensor, score: ScoreFunction) -> Tensor:
    """Gates [N, E] as probabilities: rows sum to 1."""
    return gates if score == "softmax" else gates / gates.sum(1, keepdim=True)
