"""Peng et al. 2021 (random feature attention, RFA): sines and cosines of unit queries and keys, optionally gated.

phi(x) = [sin(w . x), cos(w . x)] of x / |x|, w = sigma o N(0, I) with sigma learned, estimates exp(q . k) up to a
factor that cancels. Gated, S_t = g_t S_(t-1) + (1 - g_t) phi(k_t) v_t^T and likewise the divisor.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import NonNegativeInt, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.chunked_scan import (
    decayed_sums,
    scan_multiply_adds,
    trigonometric_attention,
)
from xscale.nn.attention.ops.dense import upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.ops.random_features import RandomProjection
from xscale.nn.dims import Dims
from xscale.nn.init import ONES, ZEROS


@CORES.register(
    "rfa",
    traits=CoreTraits(
        causal=True,
        bidirectional=True,
        cross=True,
        per_head=True,
        cost="(T + S) * (features * K + 2 * features * (K + 1))",
        context=("ulysses", "scan"),
        documents=True,
        decode=True,
    ),
    deviations=(
        "Training draws new directions at every call or never (`redraw`); the paper draws from a pool of them.",
        "Without a gate the divisor is at least the share of one feature; with a gate only its absolute value has a "
        "bound, the rounding error.",
        "The gate reads the key; the paper's reads the hidden state.",
    ),
)
class Rfa(Core):
    sigma: Parameter
    gate: Parameter

    class Config(Core.Config):
        features: PositiveInt = 64
        """Random directions; each gives a sine and a cosine."""
        gated: bool = False
        """Whether the state decays by a gate of each key, sigmoid(k . w + b); causal models only. The paper's gate
        reads the token's hidden state, of which the key is a linear map."""
        redraw: bool = False
        """Whether training draws new directions at every call; evaluation has fixed ones."""
        seed: NonNegativeInt = 0
        """Seed of the directions."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config
        self.projection = RandomProjection(
            config.features, head_width, config.seed + dims.layer, config.redraw
        )
        self.declare("sigma", (heads, head_width), ("heads", "state"), ONES, decays=False)
        if config.gated:
            # Its last column is a bias, so none of it decays.
            self.declare("gate", (heads, head_width + 1), ("heads", "state"), ZEROS, decays=False)

    @property
    def unsummable_state(self) -> str | None:
        return (
            "gated states decay and cannot be summed; take gated=false"
            if self.config.gated
            else None
        )

    @classmethod
    def check(cls, config: Config, dims: Any, path: str) -> list[Problem]:
        if not config.gated or (dims.causal and not dims.cross):
            return []
        return [Problem(f"{path}.gated", "the gate needs a causal model", choices=take(False))]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        directions = self.projection(upcast(q), self.random if self.training else None)
        repeats = q.shape[1] // k.shape[1]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        fq, fk = self._map(q, directions), self._map(k, directions)
        kernel = self.kernel_choices.get("linear_attention")
        if not self.config.gated:
            return trigonometric_attention(
                fq, fk, v, mask, torch.ones_like(fk[..., :1]), kernel=kernel
            )
        gate = upcast(self.use(self.gate))
        log_keep = F.logsigmoid(
            (upcast(k) * gate[:, None, :-1]).sum(-1) + gate[:, None, -1]
        )  # [B, H, S]
        written = (fk * (-log_keep.expm1())[..., None], F.pad(upcast(v), (0, 1), value=1.0))
        sums = decayed_sums(fq, *written, log_keep, mask, kernel=kernel)
        out: Tensor = sums[..., :-1] / _clamp_abs(
            sums[..., -1:], float(torch.finfo(sums.dtype).eps)
        )
        return out.to(v.dtype)

    def _map(self, x: Tensor, directions: Tensor) -> Tensor:
        x = F.normalize(upcast(x), dim=-1) * upcast(self.use(self.sigma))[:, None]
        along = x @ directions.mT
        pair: Tensor = (
            torch.cat((along.sin(), along.cos()), -1) * float(directions.shape[0]) ** -0.5
        )
        return pair

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        features = self.config.features
        scanned = scan_multiply_adds(queries, keys, 2 * features, head_width, self.causal)
        return heads * ((queries + keys) * features * head_width + scanned)


def _clamp_abs(x: Tensor, floor: float) -> Tensor:
    return torch.where(x.abs() < floor, floor, x)
