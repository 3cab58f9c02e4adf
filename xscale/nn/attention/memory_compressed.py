"""Liu et al. 2018 (memory-compressed attention): a strided convolution shortens keys and values.

A causal query sees the windows that end at or before it, and one zero slot before them, as the paper pads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveInt
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.dense import dense_attention
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.init import Init


@CORES.register(
    "memory_compressed",
    traits=CoreTraits(
        normalised=False,
        causal=True,
        bidirectional=True,
        cross=True,
        per_head=True,
        cost="2 * S * K * K + 2 * T * (S // compression_factor + 1) * K",
        context=("ulysses",),
        dropout=True,
        decode=True,
    ),
    deviations=(
        "Every layer with this core compresses; the paper's alternate with local ones, for which a stack has rules.",
        "Each head convolves its own channels with weights that the heads share; the paper's convolution mixes all "
        "channels.",
    ),
)
class MemoryCompressed(Core):
    key_kernel: Parameter
    value_kernel: Parameter

    class Config(Core.Config):
        renamed = {"ratio": "compression_factor"}

        compression_factor: PositiveInt = 3
        """Kernel size and stride of the convolution: tokens that become one key."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        start = Init(std=(config.compression_factor * head_width) ** -0.5)
        for name in ("key_kernel", "value_kernel"):
            self.declare(
                name,
                (head_width, head_width, config.compression_factor),
                ("state", "state", "state"),
                start,
            )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        ratio = self.key_kernel.shape[2]
        keys, values = self._shorten(k, self.key_kernel), self._shorten(v, self.value_kernel)
        hidden = None
        if mask.causal:
            positions = torch.arange(mask.offset, mask.offset + mask.queries, device=q.device)[
                :, None
            ]
            # Slot 0 is the zero slot; slot c is the window that ends at c * ratio - 1.
            hidden = (
                torch.arange(keys.shape[2], device=q.device)[None] * ratio - 1 > positions
            )  # [T, 1 + S / ratio]
        return dense_attention(
            q, keys, values, hidden, lambda weights: self.drop_weights(weights, mask)
        )

    def _shorten(self, x: Tensor, kernel: Tensor) -> Tensor:
        """[B, G, S, K] -> [B, G, 1 + S / ratio, K], rounded up if bidirectional and down if causal."""
        kernel = self.use(kernel).to(x.dtype)
        ratio = kernel.shape[2]
        rows = x.flatten(0, 1).mT  # [B*G, K, S]
        # A causal sequence omits an incomplete last window; a bidirectional one pads it with zeros.
        rows = (
            rows[..., : x.shape[2] // ratio * ratio]
            if self.causal
            else F.pad(rows, (0, -x.shape[2] % ratio))
        )
        short = F.conv1d(rows, kernel, stride=ratio) if rows.shape[2] else rows
        return F.pad(short, (1, 0)).mT.view(*x.shape[:2], -1, x.shape[3])

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        ratio = self.key_kernel.shape[2]
        slots = keys // ratio if self.causal else -(-keys // ratio)
        return 2.0 * heads * head_width * (slots * ratio * head_width + queries * (slots + 1))
