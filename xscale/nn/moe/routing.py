"""What a router decides: a flat list of (token, expert, weight), the same for every router."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """M assignments of N tokens to E experts. Differentiable in `weight`, `probabilities` and `loss`."""

    token: Tensor
    """[M] int64: the token of each assignment."""
    expert: Tensor
    """[M] int64: the expert it goes to."""
    weight: Tensor
    """[M]: what multiplies the expert's output."""
    probabilities: Tensor
    """[N, E]: how much each token wants each expert; for priorities and statistics."""
    choices: int = 1
    """The assignments are this many blocks of equal length: all first choices by position, then all second ones ..."""
    sent: Tensor | None = None
    """[M] bool: False where the router itself lets go of an assignment. None: all are sent."""
    loss: Tensor | None = None
    """Weighted auxiliary loss, a scalar."""
    measured: dict[str, Tensor] = field(default_factory=dict)
    """Further statistics by name, such as the unweighted losses."""

    @staticmethod
    def of(
        experts: Tensor,
        weights: Tensor,
        probabilities: Tensor,
        sent: Tensor | None = None,
        loss: Tensor | None = None,
        measured: dict[str, Tensor] | None = None,
    ) -> "Routing":
        """From k choices of each token: `experts`, `weights` and `sent` are [N, k]."""
        tokens, choices = experts.shape
        token = torch.arange(tokens, device=experts.device)
        return Routing(
            token=token.repeat(choices),  # [k * N]
            expert=experts.t().reshape(-1),
            weight=weights.t().reshape(-1),
            probabilities=probabilities,
            choices=choices,
            sent=None if sent is None else sent.t().reshape(-1),
            loss=loss,
            measured=measured or {},
        )
