"""Correia et al. 2019 (adaptively sparse Transformers): alpha-entmax in place of the softmax, alpha learned by head.

p_i = [(alpha - 1) z_i - tau]_+ ^ (1 / (alpha - 1)) with tau such that p sums to one; low scores get exactly zero. Alpha
is 1 + sigmoid(a), between softmax (1) and sparsemax (2), and at least 1.01; a begins with variance 1, so that the heads
differ from the start (both as in the authors' code).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from xscale.nn.attention.core import CORES, SCORES, Core
from xscale.nn.attention.ops.dense import grouped_matmul, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.compiling.eager import eager
from xscale.nn.dims import Dims
from xscale.nn.init import Init

STEPS = 10
LEAST_ALPHA = 1.01
"""Closer to softmax the power 1 / (alpha - 1) has no bound, nor have its gradients."""


@CORES.register(
    "entmax",
    aliases=("adaptive",),
    traits=SCORES,
)
class Entmax(Core):
    a: Parameter

    def __init__(self, config: Core.Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.declare("a", (heads,), ("heads",), Init(std=1.0), decays=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        scores = upcast(grouped_matmul(q, k.mT)) * q.shape[-1] ** -0.5
        bias = mask.score_bias(q, k)
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        if mask.allowed is not None:
            scores = scores.masked_fill(~mask.allowed.to(q.device), float("-inf"))
        alpha = (1 + torch.sigmoid(upcast(self.use(self.a)))).clamp(min=LEAST_ALPHA)
        return self.mix_values(entmax(scores, alpha[:, None, None].to(scores.dtype)), v, mask)

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        return 2.0 * heads * queries * keys * head_width


@eager
def entmax(z: Tensor, alpha: Tensor) -> Tensor:
    """alpha-entmax over the last axis; alpha, above 1, broadcasts against z. A row of -inf gives zeros."""
    weights: Tensor = _Entmax.apply(z, alpha)  # type: ignore[no-untyped-call]
    return weights


class _Entmax(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, z: Tensor, alpha: Tensor) -> Tensor:
        scaled = z * (alpha - 1)
        top = scaled.amax(-1, keepdim=True).clamp(min=torch.finfo(z.dtype).min)
        scaled = scaled - top
        # The p-norm of (scaled - tau)_+ with p = 1 / (alpha - 1) is above one at tau = -1, and convex, decreasing and
        # nearly linear in tau: Newton's method converges to norm 1 from the left in a few steps.
        tau = torch.full_like(top, -1.0)
        for _ in range(STEPS):
            gap = (scaled - tau).clamp_(min=0)
            power = gap.pow(1 / (alpha - 1) - 1).mul_(gap > 0)
            slope = power.sum(-1, keepdim=True)
            total = (power.mul_(gap)).sum(-1, keepdim=True)
            norm = total.pow(alpha - 1)
            step = ((norm - 1) * total / (norm * slope)).nan_to_num_(0.0, 0.0, 0.0)
            tau = tau + step
            if not z.is_cuda and float(step.abs().max()) < 4 * torch.finfo(z.dtype).eps:
                break
        p = (scaled - tau).clamp_(min=0).pow_(1 / (alpha - 1))
        total = p.sum(-1, keepdim=True)
        p = p / torch.where(total == 0, 1.0, total)
        context.save_for_backward(p, alpha)
        return p

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        p, alpha = context.saved_tensors
        # Peters et al. 2019, proposition 2, and Correia et al. 2019, proposition 1.
        slope = torch.where(p > 0, p.pow(2 - alpha), 0.0)
        total = slope.sum(-1, keepdim=True)
        slope_fraction = slope / torch.where(total == 0, 1.0, total)
        dz = slope * (gradient - (slope_fraction * gradient).sum(-1, keepdim=True))
        entropy = -torch.xlogy(p, p)
        to_alpha = (p - slope_fraction) / (alpha - 1) ** 2 + (
            entropy - slope_fraction * entropy.sum(-1, keepdim=True)
        ) / (alpha - 1)
        return dz, (gradient * to_alpha).sum_to_size(alpha.shape)
