"""Luo et al. 2021 (NPRF): normalised kernel attention by random features, with a learned relative bias, by FFT.

o_i = phi(q_i) sum_j e^(b_(j-i)) phi(k_j)^T v_j / (phi(q_i) . sum_j e^(b_(j-i)) phi(k_j)): the biases form a Toeplitz
matrix, which an FFT multiplies in T log T. The rounding error of an FFT over a sequence reaches every position; so the
causal form transforms only blocks of earlier tokens, each for the block of the same length after it, in T log^2 T.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import NonNegativeInt, PositiveInt
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.chunks import split_chunks
from xscale.nn.attention.ops.dense import repeat_kv, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.ops.random_features import RandomProjection
from xscale.nn.dims import Dims, check_trained_length
from xscale.nn.init import ZEROS
from xscale.nn.module import Module


@CORES.register(
    "nprf",
    traits=CoreTraits(
        causal=True,
        bidirectional=True,
        cross=False,
        per_head=True,
        cost="T * features * (3 * K + 1)",
        context=("ulysses",),
    ),
)
class Nprf(Core):
    distance: Parameter

    class Config(Core.Config):
        features: PositiveInt = 32
        """Random directions, each a feature."""
        shared: bool = False
        """Whether all layers have one table of biases, as in the paper; false: each has its own."""
        seed: NonNegativeInt = 0
        """Seed of the directions."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.projection = RandomProjection(
            config.features, head_width, config.seed + dims.layer, False
        )
        self.length = dims.length
        owner: Module = self
        if config.shared:
            owner = self.layer_tables = Module()
        owner.declare(
            "distance", (heads, 2 * dims.length - 1), ("heads", "tokens"), ZEROS, decays=False
        )

    @classmethod
    def shares_layer_tables(cls, config: Config) -> bool:
        return bool(config.shared)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        length = mask.keys
        assert mask.queries == length
        check_trained_length(self.path, length, self.length)
        fq, fk = self._map(q), repeat_kv(self._map(k), q.shape[1])  # [B, H, T, F]
        ones = F.pad(repeat_kv(upcast(v), q.shape[1]), (0, 1), value=1.0)
        # b_(j-i) for j - i from -(T - 1) to T - 1.
        middle = self.length - 1
        owner = self.layer_tables or self
        distance = (
            owner.use(owner.get_parameter("distance"))[:, middle - length + 1 : middle + length]
            .to(fq.dtype)
            .exp()
        )
        pairs = fk[..., :, None] * ones[..., None, :]  # [B, H, T, F, K + 1]
        if mask.causal:
            sums = _causal_sums(distance[:, :length].flip(-1), pairs.flatten(3)).view_as(pairs)
        else:
            sums = _sums(distance, pairs)
        out: Tensor = (fq[..., None, :] @ sums)[..., 0, :]
        return (out[..., :-1] / out[..., -1:]).to(v.dtype)

    def _map(self, x: Tensor) -> Tensor:
        directions = self.projection(upcast(x), self.random if self.training else None)
        return (F.normalize(upcast(x), dim=-1) @ directions.mT - 0.5).exp()

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        """Count the features and the matmuls; the FFTs add a factor of order log T."""
        features = self.projection.shape[0]
        sums = _BLOCK * keys * (head_width + 1) if self.causal else 0
        return float(
            heads * features * ((queries + keys) * head_width + queries * (head_width + 1) + sums)
        )


def _sums(weights: Tensor, x: Tensor) -> Tensor:
    """sum_j weights[:, j - i + T - 1] x_j: weights [H, 2 T - 1], x [B, H, T, F, P] -> the shape of x."""
    length = x.shape[2]
    # Rotated so that distance 0 is first.
    kernel = torch.fft.rfft(weights.flip(-1).roll(1 - length, -1), dim=-1)[
        :, :, None, None
    ]  # [H, W, 1, 1]
    padded = torch.fft.rfft(F.pad(x, (0, 0, 0, 0, 0, length - 1)), dim=2)
    sums: Tensor = torch.fft.irfft(padded * kernel, n=2 * length - 1, dim=2)[:, :, :length]
    return sums


_BLOCK = 32
"""Tokens of a block in which the causal sums are a matmul."""


def _causal_sums(weights: Tensor, x: Tensor) -> Tensor:
    """sum_(j <= i) weights[:, i - j] x_j: weights [H, T], x [B, H, T, P] -> the shape of x."""
    length = x.shape[2]
    size = _BLOCK
    full = size << max(0, math.ceil(length / size) - 1).bit_length()
    x, weights = F.pad(x, (0, 0, 0, full - length)), F.pad(weights, (0, full - length))
    positions = torch.arange(size, device=x.device)
    offset = positions[:, None] - positions  # i - j
    inside = weights[:, offset.clamp(min=0)].masked_fill(offset < 0, 0.0)  # [H, L, L]
    sums: Tensor = (inside[:, None] @ split_chunks(x, 2, size)).flatten(2, 3)
    while size < full:
        # The sums of the second block of each pair over the first one.
        first, _ = split_chunks(split_chunks(x, 2, size), 2, 2).unbind(3)  # [B, H, N, L, P]
        spectrum = torch.fft.rfft(weights[:, : 2 * size], dim=-1)[:, None, :, None]
        transformed = torch.fft.rfft(first, n=2 * size, dim=3)
        second = torch.fft.irfft(transformed * spectrum, n=2 * size, dim=3)[
            :, :, :, size:
        ]  # [B, H, N, L, P]
        added = torch.stack((torch.zeros_like(second), second), 3)
        sums = sums + added.flatten(2, 4)
        size *= 2
    return sums[:, :, :length]
