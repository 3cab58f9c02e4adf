"""The definition of bias_dropout_residual in plain torch, differentiable as it stands."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def bias_dropout_residual(x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None, p: float) -> torch.Tensor:
    """residual + dropout(x + bias)."""
    branch = x if bias is None else x + bias
    return residual + (F.dropout(branch, p) if p else branch)
