"""Nguyen et al. 2021 (FMMformer): near-field attention (softmax in a band) plus far-field (linear) attention.

o = s(w1) softmax_band(q k^T / sqrt(K)) v + s(w2) sum_l phi_l(q) (phi_l(k)^T v) / (phi_l(q) . sum phi_l(k)), with the
sigmoid s, phi_1 = elu(x) + 1, phi_2 = elu(-x) + 1, phi_3 = tanh(x).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import NonNegativeInt
from xscale.nn.attention.block_sparse import BlockSparse
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.chunked_scan import linear_attention, scan_multiply_adds
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.init import ONES, ZEROS
from xscale.nn.pattern.window import Band


@CORES.register(
    "fmmformer",
    traits=CoreTraits(
        normalised=False,
        causal=True,
        bidirectional=True,
        cross=False,
        per_head=True,
        cost="2 * 32 * K * ((1 + 2 * -(-bandwidth // 32)) * T - 32 * -(-bandwidth // 32) * (1 + -(-bandwidth // 32)))"
        " + 2 * feature_maps * T * K * (K + 1)",
        context=("ulysses",),
        documents=True,
        decode=True,
    ),
    deviations=("1e-6 is added to the far field's divisors.",),
)
class Fmmformer(Core):
    near_weight: Parameter
    far_weight: Parameter

    class Config(Core.Config):
        renamed = {"band": "bandwidth", "far": "feature_maps"}

        bandwidth: NonNegativeInt = 20
        """Near field: keys on each side of a query."""
        feature_maps: int = Field(default=2, ge=1, le=3)
        """Far field: feature maps (rank), of elu(x) + 1, elu(-x) + 1 and tanh(x) the first ones."""
        positive_tanh: bool = False
        """Whether the third map is tanh(x) + 1, as in the authors' code. It is positive, so its divisor cannot vanish,
        as that of tanh(x) can."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.feature_maps = config.feature_maps
        self.tanh_offset = float(config.positive_tanh)
        band = BlockSparse.Config(
            pattern=Band.Config(left=config.bandwidth, right=config.bandwidth), block=32
        )
        self.near = BlockSparse(band, dims, heads, head_width)
        self.declare("near_weight", (1,), ("state",), ZEROS, decays=False)
        self.declare("far_weight", (1,), ("state",), ONES, decays=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        near, far = (
            torch.sigmoid(self.use(weight)).to(v.dtype)
            for weight in (self.near_weight, self.far_weight)
        )
        out: Tensor = near * self.near(q, k, v, replace(mask, dropout=0.0))
        kernel = self.kernel_choices.get("linear_attention")
        for feature_map in self._feature_maps():
            out = out + far * linear_attention(
                feature_map(q), feature_map(k), v, mask, kernel=kernel
            )
        return out

    def _feature_maps(self) -> tuple[Callable[[Tensor], Tensor], ...]:
        maps: tuple[Callable[[Tensor], Tensor], ...] = (
            lambda x: F.elu(x) + 1,
            lambda x: F.elu(-x) + 1,
            lambda x: torch.tanh(x) + self.tanh_offset,
        )
        return maps[: self.feature_maps]

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        far = heads * scan_multiply_adds(queries, keys, head_width, head_width, self.causal)
        return self.near.multiply_adds(queries, keys, heads, head_width) + self.feature_maps * far
