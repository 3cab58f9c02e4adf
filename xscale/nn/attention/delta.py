"""Schlag et al. 2021 (DeltaNet): the delta rule reads the value stored at a key and replaces part of it by the new one.

S_t = S_(t-1) + b_t phi(k_t) (v_t - S_(t-1)^T phi(k_t))^T, o_t = S_t^T phi(q_t), phi normalised by its sum, b_t a gate.
A chunk at a time (`ops.delta_rule`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveInt
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.linear import dpfp_features
from xscale.nn.attention.ops.delta_rule import CHUNK, DeltaRule
from xscale.nn.attention.ops.dense import upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.init import ZEROS


@CORES.register(
    "delta",
    traits=CoreTraits(
        normalised=False,
        causal=True,
        bidirectional=False,
        cross=False,
        per_head=True,
        cost="T * (64 * (4 * nu + 1) * K + 6 * nu * K * K)",
        context=("ulysses", "scan"),
        documents=True,
        decode=True,
    ),
)
class Delta(Core):
    gate: Parameter

    class Config(Core.Config):
        renamed = {"order": "nu"}

        nu: PositiveInt = 1
        """Capacity of the feature map DPFP-nu: 2 * nu * K features."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config, self.head_width = config, head_width
        # The paper's gate reads the token's hidden state, of which the key is a linear map.
        # Its last column is a bias, so none of it decays.
        self.declare("gate", (heads, head_width + 1), ("heads", "state"), ZEROS, decays=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        assert mask.causal
        repeats = q.shape[1] // k.shape[1]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        gate = upcast(self.use(self.gate))
        strength = torch.sigmoid(
            (upcast(k) * gate[:, None, :-1]).sum(-1) + gate[:, None, -1]
        )  # [B, H, S]
        kernel = self.kernel_choices.get("delta_rule")
        fq, fk = (self._map(upcast(x)) for x in (q, k))
        rule = DeltaRule(
            F.pad(fq, (0, 0, mask.offset, 0)),
            fk,
            upcast(v),
            strength,
            documents=mask.key_documents,
            kernel=kernel,
        )
        out, _ = rule.outputs_and_state(
            None if mask.carried_state is None else mask.carried_state(rule)
        )
        return out[:, :, mask.offset :].to(v.dtype)

    def _map(self, x: Tensor) -> Tensor:
        features = dpfp_features(x, self.config.nu)
        return features / (features.sum(-1, keepdim=True) + 1e-6)

    @property
    def transition_size(self) -> int:
        features = 2 * self.config.nu * self.head_width
        return features * (features + self.head_width)

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        features = 2 * self.config.nu * head_width
        return float(
            heads * keys * (CHUNK * (2 * features + head_width) + 3 * features * head_width)
        )
