"""Experts as stacked weights: dense or gated ffns with an axis of experts in front (Lepikhin et al. 2020)."""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.nn.axes import Axis
from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import Dense, Ffn, Gated, GateLimits, activation, gated_hidden
from xscale.nn.init import ZEROS
from xscale.nn.module import Module
from xscale.nn.random import hashed_dropout
from xscale.nn.roles import Role, Seams
from xscale_kernels.gated_activation.op import activate, gated_activation
from xscale_kernels.grouped_gemm import gate_up, gated, plain
from xscale_kernels.grouped_gemm.gated import grouped_gated
from xscale_kernels.grouped_gemm.op import grouped_gemm
from xscale_kernels.grouped_gemm.plain import grouped_plain


class Experts(Module):
    """Rows sorted by expert -> their outputs. The weights' first dimension says how many experts are local."""

    seams: ClassVar[Seams] = {"first_hidden": Role.FIRST_HIDDEN}
    up: Parameter
    down: Parameter
    kind: str
    """Kind of the gate, or of the activation if there is no gate."""

    def __init__(self, config: Ffn.Config, dims: Dims, experts: int, dropout: float = 0.0) -> None:
        """`config` is that of a `dense` or `gated` ffn; `dropout` is the dropout probability of its hidden layer."""
        super().__init__()
        assert isinstance(config, Dense.Config | Gated.Config)
        width, has_gate = dims.width, isinstance(config, Gated.Config)
        self.first_hidden = 0
        """Index in the model of the first local hidden unit: set when they are sharded over ranks."""
        self.limits = GateLimits()
        if isinstance(config, Gated.Config):
            hidden = gated_hidden(config.hidden, width)
            self.kind = config.gate
            self.limits = GateLimits(config.clamp_value, config.linear_offset)
        else:
            hidden = config.hidden or 4 * width
            self.kind = config.activation
            self.activation: Callable[[Tensor], Tensor] = activation(config.activation)
        self.dropout = dropout
        init, residual = replace(dims.init, slices=True), replace(dims.residual_init, slices=True)
        self.gate: Tensor | None
        self.up_bias: Tensor | None
        self.gate_bias: Tensor | None
        self.down_bias: Tensor | None
        # [E, F, D], [E, D, F]: each slice is the weight of a Linear for that expert.
        self.declare(
            "up", (experts, hidden, width), ("experts", "ffn", "width"), init, linear_map=True
        )
        down = (experts, width, hidden)
        self.declare("down", down, ("experts", "width", "ffn"), residual, linear_map=True)
        if has_gate:
            self.declare(
                "gate", (experts, hidden, width), ("experts", "ffn", "width"), init, linear_map=True
            )
        else:
            self.register_parameter("gate", None)
        for name, size in (("up_bias", hidden), ("gate_bias", hidden), ("down_bias", width)):
            if config.bias and (has_gate or name != "gate_bias"):
                axis: Axis = "width" if name == "down_bias" else "ffn"
                self.declare(name, (experts, size), ("experts", axis), ZEROS, decays=False)
            else:
                self.register_parameter(name, None)

    def forward(
        self, rows: Tensor, tokens_per_expert: Tensor, dropout_keys: Tensor | None = None
    ) -> Tensor:
        """Outputs [M, D] of rows [M, D] sorted by expert.

        tokens_per_expert [E] counts the rows of each local expert. dropout_keys [M]: as in `DispatchPlan`; None: no
        dropout.
        """
        if (
            rows.is_cpu
            and dropout_keys is None
            and not self.kernel_choices
            and (y := self._fused(rows, tokens_per_expert)) is not None
        ):
            return y
        hidden = self._hidden(rows, tokens_per_expert)  # [M, F]
        if dropout_keys is not None:
            units = torch.arange(hidden.shape[1], device=hidden.device) + self.random.offset("ffn")
            hidden = hashed_dropout(hidden, self.dropout, dropout_keys, units)
        return self._grouped_linear(hidden, self.down, self.down_bias, tokens_per_expert)

    def _hidden(self, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Hidden layer [M, F] of rows [M, D] sorted by expert."""
        if self.gate is None:
            return self.activation(
                self._grouped_linear(rows, self.up, self.up_bias, tokens_per_expert)
            )
        kernel = self.kernel_choices.get("gated_activation")
        if (
            self.up_bias is None
            and not self.limits.changes
            and gate_up.saves_traffic(rows, self.gate)
        ):
            product = self.kernel_choices.get("grouped_gemm")
            up, gate = self.use(self.up), self.use(self.gate)
            return gate_up.gate_up_hidden(
                rows,
                gate,
                up,
                tokens_per_expert,
                self.kind,
                implementation=product,
                activation_implementation=kernel,
            )
        up = self._grouped_linear(rows, self.up, self.up_bias, tokens_per_expert)
        gate = self._grouped_linear(rows, self.gate, self.gate_bias, tokens_per_expert)
        gate, up = self.limits.apply(gate, up)
        return gated_activation(gate, up, self.kind, implementation=kernel)

    @property
    def hidden_units(self) -> int:
        """F, of all ranks."""
        return self.up.shape[1]

    def of_token(self, x: Tensor, experts: list[int]) -> Tensor:
        """Outputs [k, D] of `experts` for one token x [1, D], without dropout: its row need not be grouped."""
        up, down = self.use(self.up), self.use(self.down)
        gate = None if self.gate is None else self.use(self.gate)
        biases = [
            None if bias is None else self.use(bias)
            for bias in (self.up_bias, self.gate_bias, self.down_bias)
        ]
        outputs = []
        for expert in experts:
            up_bias, gate_bias, down_bias = (
                None if bias is None else bias[expert] for bias in biases
            )
            hidden = F.linear(x, up[expert], up_bias)
            if gate is None:
                hidden = self.activation(hidden)
            else:
                gate_part, hidden = self.limits.apply(F.linear(x, gate[expert], gate_bias), hidden)
                hidden = activate(gate_part, self.kind) * hidden
            outputs.append(F.linear(hidden, down[expert], down_bias))
        return torch.cat(outputs)

    def _fused(self, rows: Tensor, tokens_per_expert: Tensor) -> Tensor | None:
        """Outputs [M, D] by the operator that computes whole experts; None where it does not support this call."""
        up = self.use(self.up)
        if self.gate is None:
            if not plain.supports(rows, up, self.kind):
                return None
            up_bias = None if self.up_bias is None else self.use(self.up_bias)
            down_bias = None if self.down_bias is None else self.use(self.down_bias)
            return grouped_plain(
                rows,
                up,
                self.use(self.down),
                tokens_per_expert,
                self.kind,
                up_bias=up_bias,
                down_bias=down_bias,
            )
        if (
            self.up_bias is not None
            or self.limits.changes
            or not gated.supports(rows, up, self.kind)
        ):
            return None
        return grouped_gated(
            rows, self.use(self.gate), up, self.use(self.down), tokens_per_expert, self.kind
        )

    def _grouped_linear(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, tokens_per_expert: Tensor
    ) -> Tensor:
        out = grouped_gemm(
            rows,
            self.use(weight),
            tokens_per_expert,
            implementation=self.kernel_choices.get("grouped_gemm"),
        )
        if bias is None:
            return out
        return out + self.use(bias).repeat_interleave(
            tokens_per_expert, dim=0, output_size=len(rows)
        )
