"""Places of assignments in their experts' buffers (Lepikhin et al. 2020, GShard), by one stable sort."""

from __future__ import annotations

from typing import Literal

import torch


def slots(
    experts: torch.Tensor, E: int, *, order: Literal["choice", "token"] = "choice"
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many assignments to the same expert stand before each one, and how many each expert has.

    experts: [N, k] int64 in [0, E). order: who stands first: "choice", all tokens' first choices before any second
    (GShard); "token", a token with all its choices before the next token. Returns places [N, k] int64 (an assignment
    fits a capacity C where its place is < C) and counts [E] int64. Nothing of size N x E is made, and the device does
    not wait.
    """
    flat = (experts.t() if order == "choice" else experts).reshape(-1)  # [M]
    ordered, at = flat.sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(E + 1, device=flat.device))  # [E + 1]
    ranks = torch.arange(flat.shape[0], device=flat.device) - bounds[ordered]
    places = torch.empty_like(ranks).scatter_(0, at, ranks)
    shape = experts.t().shape if order == "choice" else experts.shape
    places = places.view(shape)
    return (places.t() if order == "choice" else places).contiguous(), bounds.diff()
