"""Mehta et al. 2021 (DeLighT): a deep transformation of grouped maps, then attention with one head at half the width.

    Y^1 = F(X, g^1),  Y^l = F(H(X, Y^{l-1}), g^l)             (section 3.1; Y^N has d_o = d_m / 2 channels)
    o = softmax(Q K^T / sqrt(d_o)) V W_o,  Q, K and V from Y^N  (section 3.1; W_o maps d_o to d_m channels)

F is a group linear transform: g^l groups of channels, each with a map of its own, and an activation. H shuffles the
channels of Y^{l-1} over its groups and puts X beside it, group by group. The first ceil(N / 2) layers widen linearly to
w d_m channels and double the groups, g^l = min(2^{l-1}, g_max); the others narrow to d_o with the groups mirrored.

Blocks near the output are deeper and wider (section 3.2), for block b of B:
    N^b = N_min + (N_max - N_min) b / (B - 1),  w^b = w + (N_max - N_min) b / (N_min (B - 1)).
"""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import Parameter

from xscale.core.config import FractionBelowOne, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.attention.core import CoreSlot
from xscale.nn.attention.ops.mask import ScoreEdge
from xscale.nn.attention.softmax import Softmax
from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import Activation, activation
from xscale.nn.init import ZEROS, Init
from xscale.nn.linear import Linear
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import CAUSAL_OR_BIDIRECTIONAL, MIXERS, Mixer
from xscale.nn.module import Module
from xscale.nn.position.position import PositionSlot
from xscale.nn.tokens import Tokens


def layers_and_width(config: Any, layer: int, depth: int) -> tuple[int, float]:
    """Return N^b, rounded, and w^b of a block of a stack of `depth`."""
    fraction = layer / max(1, depth - 1)
    more = (config.max_layers - config.min_layers) * fraction
    return math.floor(
        config.min_layers + more + 0.5
    ), config.width_factor + more / config.min_layers


def largest_groups(config: Any, width: int) -> int:
    """Return g_max: as the config says, or the power of two that leaves a group 32 channels or more."""
    return config.max_groups or 1 << max(0, (width // 32).bit_length() - 1)


def group_sizes(layers: int, factor: float, width: int, largest: int) -> list[tuple[int, int]]:
    """Return (groups, output channels) of each layer of a transformation, from `width` to half of it."""
    widening = math.ceil(layers / 2)
    groups = [min(2**at, largest) for at in range(widening)]
    groups += groups[: layers - widening][::-1]
    top, end = factor * width, width // 2
    sizes = [width + (top - width) * at / widening for at in range(1, widening + 1)]
    sizes += [
        top + (end - top) * at / (layers - widening) for at in range(1, layers - widening + 1)
    ]
    # Both the groups that make the channels and those that read them divide their number.
    multiples = [max(pair) for pair in pairwise([*groups, 1])]
    return [
        (group, math.ceil(size / of) * of)
        for group, size, of in zip(groups, sizes, multiples, strict=True)
    ]


class GroupLinear(Module):
    """Group linear transform: y_i = W_i x_i + b_i for each group i of channels."""

    weight: Parameter
    bias: Parameter

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        # Xavier, as the authors' code.
        init = Init(std=(2 * groups / (inputs + outputs)) ** 0.5)
        shape = (groups, outputs // groups, inputs // groups)
        self.declare("weight", shape, ("state", "state", "state"), init, linear_map=True)
        self.declare("bias", (groups, outputs // groups), ("state", "state"), ZEROS, decays=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, g, inputs / g] -> [B, T, g, outputs / g]."""
        return torch.einsum("btgi,goi->btgo", x, self.use(self.weight)) + self.use(self.bias)


class Transformation(Module):
    """The DeLighT transformation: [B, T, D] -> [B, T, D / 2]."""

    def __init__(self, sizes: list[tuple[int, int]], width: int, function: Activation) -> None:
        super().__init__()
        self.activation = activation(function)
        inputs = [width, *(width + size for _, size in sizes[:-1])]
        self.groups = [group for group, _ in sizes]
        layers = (
            GroupLinear(read, size, group)
            for read, (group, size) in zip(inputs, sizes, strict=True)
        )
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor | None = None
        for groups, layer in zip(self.groups, self.layers, strict=True):
            inputs = x.reshape(*x.shape[:2], groups, -1)  # [B, T, g, D / g]
            if hidden is not None:
                # Neighbours come from different groups of the layer before.
                shuffled = hidden.transpose(-1, -2).reshape(*x.shape[:2], groups, -1)
                inputs = torch.cat((inputs, shuffled), -1)
            hidden = self.activation(layer(inputs))
        assert hidden is not None
        return hidden.flatten(-2)


@MIXERS.register(
    "delight",
    traits=CAUSAL_OR_BIDIRECTIONAL,
    deviations=(
        "A group linear transform has an activation and no norm; the authors' code has a norm in each, and a "
        "dense layer before the first and after the last.",
        "Numbers of layers are rounded, and channels rounded up to multiples of the groups.",
    ),
)
class Delight(Attention):
    class Config(Mixer.Config):
        min_layers: int = Field(default=4, ge=2)
        """N_min, layers of the transformation in the first block."""
        max_layers: int = Field(default=8, ge=2)
        """N_max, layers of the transformation in the last block."""
        width_factor: float = Field(default=2.0, ge=1)
        """w, widest layer of the first block's transformation, in widths."""
        max_groups: PositiveInt | None = None
        """g_max, most groups of a layer, a power of two; null: width / 32, rounded down to one."""
        activation: Activation = "gelu"
        """The function after each group linear transform."""
        core: CoreSlot = Softmax.Config()
        """The attention core, q, k, v -> o."""
        bias: bool = True
        """Whether the projections of attention have biases."""
        position: PositionSlot | None = None
        """Position encoding of this mixer, which acts on its queries and keys or scores; null: the model's."""
        dropout: FractionBelowOne = 0.0
        """Dropout probability of the attention weights."""

        @property
        def heads(self) -> int:
            """One head, for tables that the layers share."""
            return 1

        @property
        def attention(self) -> Attention.Config:
            """The attention behind the transformation."""
            return Attention.Config(
                heads=1,
                core=self.core,
                bias=self.bias,
                position=self.position,
                dropout=self.dropout,
            )

    # One head: cores that share heads out among others have nothing to share.
    cores = (
        "softmax",
        "block_sparse",
        "entmax",
        "linear",
        "performer",
    )

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config.attention, half_width(dims))
        layers, factor = layers_and_width(config, dims.layer, dims.depth)
        sizes = group_sizes(layers, factor, dims.width, largest_groups(config, dims.width))
        self.transformation = Transformation(sizes, dims.width, config.activation)
        self.o = Linear.to_width(dims, self.head_width, "heads", bias=config.bias)

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = []
        if config.max_layers < config.min_layers:
            what = f"max_layers={config.max_layers} is below min_layers={config.min_layers}"
            fix = "Or more: blocks near the output are deeper."
            problems.append(
                Problem(f"{path}.max_layers", what, fix, choices=take(config.min_layers))
            )
        groups = largest_groups(config, dims.width)
        if groups & (groups - 1):
            what = f"max_groups={groups} is no power of two"
            problems.append(
                Problem(f"{path}.max_groups", what, choices=take(1 << (groups.bit_length() - 1)))
            )
        elif dims.width % (2 * groups):
            what = f"width={dims.width} is no multiple of twice the {groups} groups"
            fewer = [
                1 << power for power in range(groups.bit_length()) if dims.width % (2 << power) == 0
            ]
            wider = take(-(-dims.width // (2 * groups)) * 2 * groups, key="model.width")
            problems.append(Problem(f"{path}.max_groups", what, choices=take(*fewer) + wider))
        return problems + super().check(config.attention, half_width(dims), path)

    def forward(
        self,
        x: Tensor,
        tokens: Tokens,
        memory: Tensor | None = None,
        source: Tokens | None = None,
        edge: ScoreEdge | None = None,
    ) -> Tensor:
        return super().forward(self.transformation(x), tokens, memory, source, edge)


def half_width(dims: Dims) -> Dims:
    """`dims` of the attention behind the transformation: d_o = d_m / 2."""
    return replace(dims, width=max(1, dims.width // 2))
