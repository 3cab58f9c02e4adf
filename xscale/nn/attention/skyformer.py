"""Chen et al. 2021 (Skyformer): a Gaussian kernel instead of the softmax, approximated by Nystrom from sampled rows.

C = kappa(q, k), kappa(a, b) = exp(-|a - b|^2 / (2 sqrt(K))), out = C v, without a divisor. With landmarks s sampled
from the rows of [q; k]: C ~ kappa(q, s) (kappa(s, s) + gamma)^-1 kappa(s, k).
"""

import torch
from pydantic import Field
from torch import Tensor

from xscale.core.config import PositiveFloat
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.dense import repeat_kv, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims


@CORES.register(
    "skyformer",
    traits=CoreTraits(
        normalised=False,
        causal=False,
        bidirectional=True,
        # Landmarks are sampled from all queries: a generated token would depend on later ones.
        cross=False,
        per_head=True,
        cost="2 * landmarks * (T + S) * K + landmarks**2 * (2 * K + 22 * landmarks)",
        context=("ulysses",),
    ),
    deviations=(
        "Landmarks are evenly spaced, half of them queries and half keys, from a random start in training; the paper "
        "samples each of them uniformly.",
    ),
)
class Skyformer(Core):
    class Config(Core.Config):
        landmarks: int = Field(default=128, ge=2)
        """Landmarks, half of them queries and half keys, evenly spaced (in training from a random start)."""
        gamma: PositiveFloat = 0.1
        """Number added to the diagonal of the landmarks' kernel matrix, so that its inverse exists."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config

    @classmethod
    def example(cls) -> "Skyformer.Config":
        """Config for sequences of a few hundred tokens."""
        return cls.Config(landmarks=32)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        assert not mask.causal
        scale = q.shape[-1] ** -0.25
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
        q, k = upcast(q) * scale, upcast(k) * scale
        sampled = torch.cat((self._sample(q), self._sample(k)), 2)  # [B, H, M, K]
        sampled_kernel = gaussian(sampled, sampled)
        sampled_kernel = sampled_kernel + self.config.gamma * torch.eye(
            sampled.shape[2], dtype=q.dtype, device=q.device
        )
        right = gaussian(sampled, k) @ upcast(v)  # [B, H, M, K]
        return (gaussian(q, sampled) @ (inverse(sampled_kernel) @ right)).to(v.dtype)

    def _sample(self, x: Tensor) -> Tensor:
        length, count = x.shape[2], max(1, min(x.shape[2], self.config.landmarks // 2))
        start = int(self.random.integer(-(-length // count))) if self.training else 0
        return x[:, :, (start + torch.arange(count, device=x.device) * length // count) % length]

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        count = sum(max(1, min(length, self.config.landmarks // 2)) for length in (queries, keys))
        products = 2 * count * (queries + keys) * head_width + 2 * count * count * head_width
        return float(heads * (products + 22 * count**3))


def gaussian(a: Tensor, b: Tensor) -> Tensor:
    """exp(-|a_i - b_j|^2 / 2): [..., M, K] and [..., N, K] -> [..., M, N]."""
    squared_distance = (
        a.square().sum(-1, keepdim=True) + b.square().sum(-1)[..., None, :] - 2 * (a @ b.mT)
    )
    return (-squared_distance.clamp(min=0) / 2).exp()


def inverse(a: Tensor, steps: int = 6) -> Tensor:
    """Inverse of symmetric positive matrices [..., M, M], by an iteration after scaling by row sums."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    side = a.sum(-1).rsqrt()
    scaled = side[..., :, None] * a * side[..., None, :]
    z = identity.expand_as(scaled)
    for step in range(steps):
        kz = scaled if step == 0 else scaled @ z
        inner = 13 * identity - kz @ (15 * identity - kz @ (7 * identity - kz))
        z = 0.25 * (inner if step == 0 else z @ inner)
    return side[..., :, None] * z * side[..., None, :]
