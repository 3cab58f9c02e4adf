"""You et al. 2020, section 3: hard-coded self-attention, whose weights are a Gaussian density over positions.

    A_ij = N(j; i + offset_h, sigma_h^2) = exp(-(j - i - offset_h)^2 / (2 sigma_h^2)) / (sigma_h sqrt(2 pi))

There are no queries and keys; values and output are projected as in attention. Rows are densities and need not sum to
1: what a mask hides, and what lies beyond the ends of the sequence, is not made up for. The authors' encoder has heads
with the offsets -1 and 1, their decoder -1 and 0, all with sigma = 1.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xscale.core.config import PositiveFloat
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.dims import Dims
from xscale.nn.mixer.mixer import CAUSAL_OR_BIDIRECTIONAL, MIXERS
from xscale.nn.mixer.value_mixer import ValueMixer
from xscale.nn.tokens import Tokens

REACH = 9.0
"""Standard deviations from the mean beyond which a weight is left out: 3e-18 of the largest, which float64 cannot add
to it."""
SHORTEST_BLOCK = 16
"""Tokens of the shortest block, so that its product is no long row of dot products."""


@MIXERS.register(
    "hard_coded_gaussian",
    traits=CAUSAL_OR_BIDIRECTIONAL,
    deviations=(
        "Weights further than 9 sigma from the mean, below the resolution of float64 beside the largest, are left out.",
    ),
)
class HardCodedGaussian(ValueMixer):
    class Config(ValueMixer.Config):
        offsets: tuple[int, ...] | None = Field(default=None, min_length=1)
        """Mean of each head's Gaussian minus the token's own position, repeated over the heads; null: the paper's,
        [-1, 0] in a causal model and [-1, 1] in a bidirectional one."""
        sigmas: tuple[PositiveFloat, ...] = Field(default=(1.0,), min_length=1)
        """Standard deviation of each head's Gaussian, in tokens, repeated over the heads."""

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        offsets = offsets_of(config, dims)
        heads = range(config.heads)
        self.gaussians = [
            (offsets[head % len(offsets)], config.sigmas[head % len(config.sigmas)])
            for head in heads
        ]
        """(offset, sigma) of each head, of all ranks."""
        # The same on all ranks, whichever heads they have.
        self.left = max(0, *(math.ceil(REACH * sigma) - offset for offset, sigma in self.gaussians))
        self.right = max(
            0, *(math.ceil(REACH * sigma) + offset for offset, sigma in self.gaussians)
        )
        if self.causal:
            self.right = 0

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        for key, values in (("offsets", config.offsets or ()), ("sigmas", config.sigmas)):
            if len(values) > config.heads:
                what = f"{len(values)} values are more than heads={config.heads}"
                problems.append(
                    Problem(f"{path}.{key}", what, choices=take(list(values[: config.heads])))
                )
        for offset in offsets_of(config, dims):
            reach = math.ceil(REACH * max(config.sigmas))
            if dims.causal and offset - reach > 0:
                what = f"the Gaussian at offset {offset} lies on later tokens, which a causal model hides"
                fix = "The paper's decoder has offsets of 0 and less."
                problems.append(Problem(f"{path}.offsets", what, fix, choices=take([-1, 0])))
        return problems

    def mix(self, x: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
        length, band = v.shape[2], self.left + self.right
        past = v.new_zeros(*v.shape[:2], self.left, v.shape[3])
        if tokens.forward.cache is not None:
            past = tokens.forward.cache.get(self.path, past)
            tokens.forward.cache[self.path] = (
                torch.cat((past, v), 2).narrow(2, length, self.left).clone()
            )
        block = min(max(band, SHORTEST_BLOCK), length)
        surplus = -length % block
        padded = F.pad(torch.cat((past, v), 2), (0, 0, 0, self.right + surplus))
        windows = padded.unfold(2, block + band, block)  # [B, H, T / block, K, block + band]
        weights = self.weights(block, v.shape[1], v.device)  # [H, block, block + band]
        if tokens.documents is None:
            mixed = torch.einsum("hcs,bhnks->bhnck", weights.to(v.dtype), windows)
        else:
            # Nothing outside the sequence has the number of a document.
            numbers = F.pad(tokens.documents, (self.left, self.right + surplus), value=-1)
            keys = numbers.unfold(1, block + band, block)[
                :, None, :, None
            ]  # [B, 1, n, 1, block + band]
            queries = numbers.narrow(1, self.left, length + surplus).view(len(v), 1, -1, block, 1)
            apart = weights[:, None] * (keys == queries)  # [B, H, n, block, block + band]
            mixed = torch.einsum("bhncs,bhnks->bhnck", apart.to(v.dtype), windows)
        return mixed.flatten(2, 3).narrow(2, 0, length)

    def weights(self, block: int, heads: int, device: torch.device) -> Tensor:
        """Weights of the local heads for a block of tokens and what they reach, float64 [H, block, block + band]."""
        local = self.gaussians[self.first_head : self.first_head + heads]
        offset, sigma = torch.tensor(local, dtype=torch.float64, device=device).T[
            ..., None, None
        ]  # [H, 1, 1]
        query = torch.arange(block, dtype=torch.float64, device=device)[:, None]
        key = torch.arange(-self.left, block + self.right, dtype=torch.float64, device=device)
        distance = key - query  # [block, block + band]
        density = torch.exp(-((distance - offset) ** 2) / (2 * sigma**2)) / (
            sigma * math.sqrt(2 * math.pi)
        )
        near = (distance >= -self.left) & (distance <= self.right)
        weights: Tensor = density * near
        return weights

    def multiply_adds(self, queries: int, keys: int) -> float:
        return float(self.heads * queries * min(keys, self.left + self.right + 1) * self.head_width)


def offsets_of(config: Any, dims: Dims) -> tuple[int, ...]:
    """Offsets that the config gives, or the paper's."""
    paper = (-1, 0) if dims.causal else (-1, 1)
    return paper if config.offsets is None else tuple(config.offsets)
