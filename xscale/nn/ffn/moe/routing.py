"""Routing: the assignments (token, expert, weight) that every router returns, as flat lists."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """M assignments of N tokens to E experts. Differentiable in `weight`, `probabilities` and `loss`."""

    token: Tensor
    """[M] int64: the token of each assignment."""
    expert: Tensor
    """[M] int64: the expert of each assignment."""
    weight: Tensor
    """[M]: factor of the expert's output."""
    probabilities: Tensor
    """[N, E]: the router's probabilities, for priorities and statistics."""
    k: int = 1
    """The assignments are this many blocks of equal length: all first choices by position, then all second ones ..."""
    all_tokens: bool = False
    """Whether each of the k blocks is of all tokens in their order: assignment m is one of token m % N."""
    kept: Tensor | None = None
    """[M] bool: False for assignments that the router itself drops. None: all are kept."""
    loss: Tensor | None = None
    """Weighted auxiliary loss, a scalar."""
    selected: Tensor | None = None
    """[N, k] experts that the router would have chosen, where it was given others, and the number of experts for an
    assignment that it would have dropped; None: it chose by itself."""
    stats: dict[str, Tensor] = field(default_factory=dict)
    """Further statistics by name, such as the unweighted losses."""

    @staticmethod
    def from_topk(
        experts: Tensor,
        weights: Tensor,
        probabilities: Tensor,
        kept: Tensor | None = None,
        loss: Tensor | None = None,
        stats: dict[str, Tensor] | None = None,
        selected: Tensor | None = None,
    ) -> "Routing":
        """Routing of k choices of each token: `experts`, `weights` and `kept` are [N, k], and so is the router's
        `selected` ones, which may be `experts` itself."""
        tokens, k = experts.shape
        token = torch.arange(tokens, device=experts.device)
        return Routing(
            token=token.expand(k, -1).reshape(
                -1
            ),  # [k * N]; `repeat` takes thrice as long on a CPU
            expert=experts.t().reshape(-1),
            weight=weights.t().reshape(-1),
            probabilities=probabilities,
            k=k,
            all_tokens=True,
            kept=None if kept is None else kept.t().reshape(-1),
            loss=loss,
            stats=stats or {},
            selected=None if selected is experts else selected,
        )
