"""Ma et al. 2021 (Luna): pack attention from learned slots to the sequence, unpack attention from queries to the slots.

Bidirectional: A = softmax(p k^T / sqrt(K)), o = softmax(q (A k)^T / sqrt(K)) (A v). Causal: elementwise
A = elu(p k^T / sqrt(K)) + 1, w_t = softmax((1/t) sum_(j<=t) (q_t . k_j / sqrt(K)) A_j),
o_t = (1/t) sum_(j<=t) (w_t . A_j) v_j.
The paper passes the slots p from layer to layer, as the mixer `luna` does; in this core each layer has its own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveInt
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.chunked_scan import linear_sums, scan_multiply_adds
from xscale.nn.attention.ops.dense import dense_attention, repeat_kv, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.init import Init


@CORES.register(
    "luna",
    traits=CoreTraits(
        normalised=False,
        causal=True,
        bidirectional=True,
        cross=True,
        per_head=True,
        cost="slots * (3 * S + 2 * T) * K",
        context=("ulysses",),
        decode=True,
    ),
    deviations=(
        "The slots are learned anew in each layer; the mixer luna carries them, in bidirectional models.",
    ),
)
class Luna(Core):
    slots: Parameter

    class Config(Core.Config):
        slots: PositiveInt = 16
        """l, learned slots of each head (the paper's extra sequence p)."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.declare(
            "slots", (heads, config.slots, head_width), ("heads", "state", "state"), Init(std=1.0)
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
        slots = self.use(self.slots).to(upcast(k).dtype)
        gathered = slots @ upcast(k).mT * k.shape[-1] ** -0.5  # [B, H, M, S]
        if not mask.causal:
            gathered = gathered.softmax(-1)
            return dense_attention(upcast(q), gathered @ upcast(k), gathered @ upcast(v)).to(
                v.dtype
            )
        rows = (F.elu(gathered) + 1).mT  # [B, H, S, M]
        seen = torch.arange(mask.offset + 1, mask.offset + mask.queries + 1, device=q.device)[
            :, None
        ]  # [T, 1]
        kernel = self.kernel_choices.get("linear_attention")
        scaled = upcast(q) * q.shape[-1] ** -0.5
        weights = (linear_sums(scaled, k, rows, mask, kernel=kernel) / seen).softmax(
            -1
        )  # [B, H, T, M]
        return (linear_sums(weights, rows, v, mask, kernel=kernel) / seen).to(v.dtype)

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        slots = self.slots.shape[1]
        if not self.causal:
            return float(heads * slots * (3 * keys + 2 * queries) * head_width)
        read = scan_multiply_adds(queries, keys, head_width, slots - 1, True)
        return heads * (
            slots * keys * head_width
            + read
            + scan_multiply_adds(queries, keys, slots, head_width - 1, True)
        )
