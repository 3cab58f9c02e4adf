"""Linear attention, without a matrix of scores: `linear` and `efficient_attention`."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.core.config import NonNegativeFloat, PositiveInt
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.chunked_scan import linear_attention, linear_sums, scan_multiply_adds
from xscale.nn.attention.ops.dense import upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims


@CORES.register(
    "linear",
    traits=CoreTraits(
        causal=True,
        bidirectional=True,
        cross=True,
        per_head=True,
        cost="(T + S) * K * (K + 1) * (2 * nu if features == 'dpfp' else 1)",
        context=("ulysses", "scan"),
        documents=True,
        decode=True,
    ),
)
class LinearAttention(Core):
    """Katharopoulos et al. 2020 (linear attention): a feature map replaces the softmax, so keys and values sum to a
    state.

    o_i = phi(q_i) sum_j phi(k_j)^T v_j / (phi(q_i) . sum_j phi(k_j)), with phi(x) = elu(x) + 1. `dpfp` is the
    deterministic parameter-free projection of Schlag et al. 2021, phi(x)_(i + 2K(j-1)) = relu([x, -x])_i relu([x,
    -x])_(i+j).
    """

    class Config(Core.Config):
        renamed = {"order": "nu"}

        features: Literal["elu", "relu", "dpfp"] = "elu"
        """elu: elu(x) + 1; relu: max(x, 0); dpfp: products of relu([x, -x]) with itself, rolled."""
        nu: PositiveInt = 1
        """Capacity of dpfp: 2 * nu * K features."""
        normalize: Literal["attention", "sum"] = "attention"
        """attention: divide by the sum of weights; sum: divide the features of each query and key by their own sum
        (Schlag et al. 2021, section 4.2)."""
        eps: NonNegativeFloat = 1e-6
        """Number added to the divisor."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        q, k = self._features(q), self._features(k)
        kernel = self.kernel_choices.get("linear_attention")
        if self.config.normalize == "attention":
            return linear_attention(q, k, v, mask, self.config.eps, kernel=kernel)
        q, k = (x / (x.sum(-1, keepdim=True) + self.config.eps) for x in (q, k))
        return linear_sums(q, k, v, mask, kernel=kernel).to(v.dtype)

    def _features(self, x: Tensor) -> Tensor:
        kind = self.config.features
        if kind == "elu":
            return F.elu(x) + 1
        return F.relu(x) if kind == "relu" else dpfp_features(x, self.config.nu)

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        features = head_width * (2 * self.config.nu if self.config.features == "dpfp" else 1)
        return heads * scan_multiply_adds(queries, keys, features, head_width, self.causal)


def dpfp_features(x: Tensor, nu: int) -> Tensor:
    """Features of DPFP-nu: [..., K] -> [..., 2 * nu * K]."""
    both = F.relu(torch.cat((x, -x), -1))
    return torch.cat([both * both.roll(-shift, -1) for shift in range(1, nu + 1)], -1)


@CORES.register(
    "efficient_attention",
    aliases=("efficient",),
    traits=CoreTraits(
        causal=False,
        bidirectional=True,
        cross=True,
        per_head=True,
        cost="(T + S) * K * K",
        context=("ulysses",),
    ),
)
class EfficientAttention(Core):
    """Shen et al. 2021 (efficient attention): softmax over each query's features and over each feature's positions.

    o = rho_q(q) (rho_k(k)^T v): each key feature is a distribution over the sequence.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        assert not mask.causal
        return linear_sums(upcast(q).softmax(-1), upcast(k).softmax(2), v, mask).to(v.dtype)

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        return heads * scan_multiply_adds(queries, keys, head_width, head_width - 1, False)
