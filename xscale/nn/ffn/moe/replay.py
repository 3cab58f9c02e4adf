"""Router replay: the experts of each token from a recorded forward, in place of those that the router chooses.

Routes travel with the tokens as signals, so that whatever shards, cuts or pads tokens does it to them. A mixture reads
those of its own layer. The router still scores: weights, auxiliary losses and statistics are functions of its scores.
"""

from dataclasses import replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from xscale.core.config import Config
from xscale.core.paths import PathText
from xscale.nn.ffn.moe.routing import Routing
from xscale.nn.signals import BATCH, TOKENS, Signal, TokenAxes
from xscale.nn.tokens import Tokens


class RouteRecorder(Protocol):
    """Gets the routes of a forward, layer by layer."""

    def add(self, layer: int, experts: Tensor, weights: Tensor) -> None:
        """Get the experts [N, k] of the N tokens of the text in mixture number `layer`, and their weights."""
        ...


ROUTES = Signal[Tensor]("replay.routes", TokenAxes((BATCH, TOKENS, "layers", "choices")))
"""[B, T, L, K] expert of each token in each mixture, plus 1, so that 0, as at padding and global tokens, is none."""
ROUTE_WEIGHTS = Signal[Tensor]("replay.weights", TokenAxes((BATCH, TOKENS, "layers", "choices")))
"""[B, T, L, K] factors of the experts' outputs. None: they are computed from the router's scores."""
RECORDER = Signal[RouteRecorder]("replay.recorder")
"""Gets the routes of this forward."""


class Replay(Config):
    """Routes that take the place of the router's choice."""

    file: PathText
    """The file of routes: that of `xscale eval RUN --record-routes FILE`, or of `write_routes`."""
    weights: Literal["recomputed", "recorded"] = "recomputed"
    """Factors of the experts' outputs. recomputed: from this model's scores of the given experts; recorded: those of
    the file, with the gradient of the recomputed ones."""


def given_routes(tokens: Tokens, layer: int, k: int) -> Tensor | None:
    """Return the given routes [N, k] of mixture number `layer`: expert plus 1, or 0; None: there are none."""
    routes = tokens.get(ROUTES)
    return None if routes is None else routes.flatten(0, 1)[:, layer, :k]


def given_experts(selected: Tensor, tokens: Tokens, layer: int) -> Tensor:
    """Return the given experts [N, k]; `selected`, those of the router, for tokens without any."""
    routes = given_routes(tokens, layer, selected.shape[1])
    return selected if routes is None else torch.where(routes > 0, routes.long() - 1, selected)


def with_recorded_weights(routing: Routing, tokens: Tokens, layer: int) -> Routing:
    """Return a routing with the recorded weights where there are some, whose gradient is that of its own weights."""
    values, routes = tokens.get(ROUTE_WEIGHTS), given_routes(tokens, layer, routing.k)
    if values is None or routes is None:
        return routing
    recorded = values.flatten(0, 1)[:, layer, : routing.k].t().reshape(-1).to(routing.weight.dtype)
    is_given = (routes > 0).t().reshape(-1)
    weight = routing.weight
    # The second term is exactly 0 and has the gradient.
    value = recorded.where(is_given, weight.detach())
    return replace(routing, weight=value + (weight - weight.detach()))


def record_routes(routing: Routing, tokens: Tokens, layer: int) -> None:
    """Give the routes of mixture number `layer` to whoever records this forward."""
    recorder = tokens.get(RECORDER)
    if recorder is not None:
        by_token = (
            value.detach().view(routing.k, -1).t() for value in (routing.expert, routing.weight)
        )
        recorder.add(layer, *by_token)


def fraction_replaced(routing: Routing) -> Tensor:
    """Fraction of the tokens for which the router would have chosen other experts than they are given."""
    assert routing.selected is not None
    used = routing.expert.view(routing.k, -1)
    selected = routing.selected.t().sort(0).values
    return (used.sort(0).values != selected).any(0).double().mean()
