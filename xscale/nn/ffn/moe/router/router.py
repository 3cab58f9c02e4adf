"""Base class and registry of routers: a router scores the experts, selects some of them, and balances their load.

A router is put together from three kinds of pieces, and is never a subclass of another router:

- score (`score.py`): a token's logits over the experts, with jitter or noise in training;
- select (`select.py`, and the file of each paper): which experts a token uses, or which tokens an expert takes;
- balance (`balance.py`): auxiliary losses, z-loss, and the state that follows the load (bias update).

Pieces that need parameters declare them on the router, so that checkpoints store `router.weight`, `router.bias` ...
"""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from xscale.core.errors import Problem
from xscale.core.registry import Family
from xscale.core.requirements import at_most
from xscale.nn.ffn.moe.replay import given_experts
from xscale.nn.ffn.moe.routing import Routing
from xscale.nn.init import Init
from xscale.nn.module import Part
from xscale.nn.post_step import PostStepState, WeightWriter
from xscale.nn.tokens import Tokens


@dataclass(frozen=True)
class RouterTraits:
    """Properties that a router declares and the conformance suite checks."""

    choice: Literal["token", "expert"]
    """Who chooses: each token its experts, or each expert its tokens."""
    top_k: int | None
    """Experts of each token; None: the config says."""
    drops: bool
    """More tokens than an expert's capacity may choose it."""
    scope: Literal["token", "batch"]
    """Tokens that a token's routing depends on in training: that token alone, or all tokens of the micro-batch."""
    causal: bool
    """A token's routing does not depend on later tokens."""
    balance: Literal["loss", "assignment", "none"]
    """Source of load balancing: an auxiliary loss, the assignment itself, or none."""
    learned: bool = True
    """Has trainable parameters."""
    random: bool = False
    """Draws random numbers in training, with its default config."""


@dataclass(frozen=True)
class RouterDims:
    """The sizes a router is built for."""

    width: int
    """D."""
    experts: int
    """E."""
    vocabulary: int
    """V."""
    groups: int
    """Groups of consecutive tokens, each with a capacity and a balancing loss of its own."""
    init: Init
    """Initialiser of its weights."""


class Router(Part, PostStepState):
    """Built as `Router(config, dims)` with RouterDims. Its parameters are replicated on every rank."""

    keeps_precision = True
    """Its weights are used in master precision, not in compute precision (Fedus et al. 2021, section 2.4)."""

    def __init__(self) -> None:
        super().__init__()
        self.post_step: list[PostStepState] = []
        """Pieces with state that moves after each step; they add themselves."""
        self.route_layer: int | None = None
        """Number of its mixture in a file of routes; None: none is written or read."""

    def why_not_static(self) -> str | None:
        if self.route_layer is not None:
            return "it is given its experts by the text so far"
        traits = ROUTERS.get(str(self.Config.kind)).traits
        if traits.choice == "token" and traits.balance != "assignment":
            return None
        return f"router '{self.Config.kind}' assigns the tokens of a call together"

    @classmethod
    def experts_per_token(cls, config: Any, experts: int) -> float:
        """Assignments per token: k, or the mean where experts choose tokens."""
        raise NotImplementedError

    def forward(self, x: Tensor, tokens: Tokens) -> Routing:
        """x [N, D], N = B*T in the order of `tokens`."""
        raise NotImplementedError

    def repeat(self, choice: Tensor, tokens: Tokens) -> Tensor:
        """Return `choice`, indices or a mask; in a recomputation, what the router chose in its first forward.

        Each choice by comparison of scores goes through here, and is then read for weights, losses and statistics.
        """
        choices = tokens.forward.choices
        return choice if choices is None else choices.make_or_repeat(choice)

    def replay(self, selected: Tensor, tokens: Tokens) -> Tensor:
        """Return the experts [N, k] that tokens are given, or `selected` itself, those that the router has chosen.

        Weights are those of what this returns. Losses and statistics are of `selected`: what the model would have done.
        """
        return (
            selected
            if self.route_layer is None
            else given_experts(selected, tokens, self.route_layer)
        )

    def draws(self, tokens: Tokens) -> bool:
        """Whether this forward may use random numbers."""
        return self.training and tokens.forward.rng_seed is not None

    def update_state(self, means: dict[str, Tensor], weights: WeightWriter) -> None:
        """Move the state that follows the load (bias, load of the global batch); see `nn.post_step`.

        `means` are the statistics of the whole optimizer step over all ranks; `<path of the mixture>/load` and `/share`
        [E] are read.
        """
        for piece in self.post_step:
            piece.update_state(means, weights)


def check_top_k(top_k: int, experts: int, path: str) -> list[Problem]:
    """A problem if a token cannot have `top_k` different experts."""
    if top_k <= experts:
        return []
    return [at_most(f"{path}.top_k", f"top_k={top_k} exceeds experts={experts}", experts)]


ROUTERS = Family("router", RouterTraits, Router)
