"""Experts as stacked weights: dense or gated ffns whose matrices have one more axis in front (Lepikhin et al. 2020)."""

from collections.abc import Callable
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.nn.dims import Dims
from xscale.nn.ffn import Ffn, activation
from xscale.nn.ffn.dense import Dense
from xscale.nn.ffn.gated import Gated, gated_hidden
from xscale.nn.init import ZEROS
from xscale.nn.module import Module
from xscale.nn.tokens import Tokens
from xscale_kernels.gated_activation.op import gated_activation
from xscale_kernels.grouped_gemm.gated import grouped_gated, serves
from xscale_kernels.grouped_gemm.op import grouped_gemm


class Experts(Module):
    """Rows sorted by expert -> their outputs. How many experts are here is read off the weights."""

    up: Parameter
    down: Parameter

    def __init__(self, config: Ffn.Config, dims: Dims, experts: int, dropout: float = 0.0) -> None:
        """`config` is that of a `dense` or `gated` ffn; `dropout` is the share of its hidden layer dropped."""
        super().__init__()
        assert isinstance(config, Dense.Config | Gated.Config)
        width, gated = dims.width, isinstance(config, Gated.Config)
        if isinstance(config, Gated.Config):
            hidden = gated_hidden(config.hidden, width)
            self.kind = config.gate
        else:
            hidden = config.hidden or 4 * width
            self.activation: Callable[[Tensor], Tensor] = activation(config.activation)
        self.dropout = dropout
        start, residual = replace(dims.start, slices=True), replace(dims.residual_start, slices=True)
        self.gate: Tensor | None
        self.up_bias: Tensor | None
        self.gate_bias: Tensor | None
        self.down_bias: Tensor | None
        # [E, F, D], [E, D, F]: each slice is what a Linear of that expert alone would hold.
        self.declare("up", (experts, hidden, width), ("experts", "ffn", "width"), start)
        self.declare("down", (experts, width, hidden), ("experts", "width", "ffn"), residual)
        if gated:
            self.declare("gate", (experts, hidden, width), ("experts", "ffn", "width"), start)
        else:
            self.register_parameter("gate", None)
        for name, size in (("up_bias", hidden), ("gate_bias", hidden), ("down_bias", width)):
            if config.bias and (gated or name != "gate_bias"):
                self.declare(name, (experts, size), ("experts", "width" if name == "down_bias" else "ffn"), ZEROS)
            else:
                self.register_parameter(name, None)

    def forward(self, rows: Tensor, counts: Tensor, tokens: Tokens | None = None) -> Tensor:
        """Rows [M, D] sorted by expert, counts [E] -> [M, D]; `tokens` says whether dropout is on."""
        noisy = self.training and tokens is not None and tokens.noise is not None and self.dropout > 0
        if self.gate is not None and self.up_bias is None and not noisy and not self.named:
            first = self.use(self.gate)
            if serves(rows, first, self.kind):
                return grouped_gated(rows, first, self.use(self.up), self.use(self.down), counts, self.kind)
        hidden = self._map(rows, self.up, self.up_bias, counts)  # [M, F]
        if self.gate is None:
            hidden = self.activation(hidden)
        else:
            gate = self._map(rows, self.gate, self.gate_bias, counts)
            kernel = self.named.get("gated_activation")
            hidden = gated_activation(gate, hidden, self.kind, implementation=kernel)
        if noisy:
            hidden = F.dropout(hidden, self.dropout)
        return self._map(hidden, self.down, self.down_bias, counts)

    def _map(self, rows: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
        out = grouped_gemm(rows, self.use(weight), counts, implementation=self.named.get("grouped_gemm"))
        if bias is None:
            return out
        return out + self.use(bias).repeat_interleave(counts, dim=0, output_size=len(rows))
