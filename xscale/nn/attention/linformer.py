"""Wang et al. 2020 (Linformer): keys and values are projected along the sequence to a fixed length before the softmax.

o_i = softmax(q_i (E_i k_i)^T / sqrt(K)) (F_i v_i) with learned E and F [projected_length, S]; longer sequences than
trained fail. The paper's alternatives to the matrices are mean pooling, max pooling and a convolution, with kernel and
stride = trained length / projected_length. The convolution mixes the channels of a head, not heads, so that tensor
parallelism can shard them.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.chunks import split_chunks
from xscale.nn.attention.ops.dense import repeat_kv
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.axes import Axis
from xscale.nn.dims import Dims, check_trained_length
from xscale.nn.init import Init
from xscale.nn.module import Module


@CORES.register(
    "linformer",
    traits=CoreTraits(
        normalised=False,
        causal=False,
        bidirectional=True,
        cross=True,
        per_head=True,
        cost="2 * projected_length * (T + S) * K",
        context=("ulysses",),
        dropout=True,
    ),
)
class Linformer(Core):
    e: Parameter
    f: Parameter

    class Config(Core.Config):
        renamed = {"rows": "projected_length", "share": "sharing"}

        projected_length: PositiveInt = 128
        """k, length to which keys and values are projected."""
        projection: Literal["linear", "convolution", "mean", "max"] = "linear"
        """linear: the matrices E and F; convolution: over windows of the sequence; mean and max: pooling, without
        parameters. Kernel and stride of the last three are the trained length / projected_length, rounded up."""
        sharing: Literal["none", "heads", "values", "layers"] = "heads"
        """none: each head has an E and an F; heads: headwise sharing, all heads have the same E and F; values:
        key-value sharing, E = F as well; layers: layerwise sharing, one E for all layers too."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.length, self.projected_length = dims.length, config.projected_length
        self.projection, self.sharing = config.projection, config.sharing
        self.kernel = -(-dims.length // config.projected_length)
        if config.projection in ("mean", "max"):
            return
        shape: tuple[int, ...] = (config.projected_length, dims.length)
        axes: tuple[Axis, ...] = ("state", "tokens")
        start = Init(std=config.projected_length**-0.5)
        if config.projection == "convolution":
            shape, axes = (self.kernel, head_width, head_width), ("state", "state", "state")
            start = Init(std=(self.kernel * head_width) ** -0.5)
        if config.sharing == "none":
            shape, axes = (heads, *shape), ("heads", *axes)
        owner: Module = self
        if config.sharing == "layers":
            owner = self.layer_tables = Module()
        owner.declare("e", shape, axes, start)
        if config.sharing in ("none", "heads"):
            self.declare("f", shape, axes, start)

    @classmethod
    def shares_layer_tables(cls, config: Config) -> bool:
        return bool(config.sharing == "layers")

    @classmethod
    def check(cls, config: Config, dims: Any, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        if config.projection in ("mean", "max") and config.sharing != "heads":
            what = f"{config.projection} pooling has no weights to share, and sharing is '{config.sharing}'"
            choices = take("heads") + take("linear", "convolution", key=f"{path}.projection")
            problems.append(Problem(f"{path}.sharing", what, choices=choices))
        return problems

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        check_trained_length(self.path, k.shape[2], self.length)
        if self.sharing == "none":
            k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
        if self.projection in ("mean", "max"):
            k, v = self._pool(k), self._pool(v)
        else:
            owner = self.layer_tables or self
            e = owner.use(owner.get_parameter("e"))
            f = self.use(self.f) if self.sharing in ("none", "heads") else e
            k, v = self._project(e, k), self._project(f, v)
        return self.random.attention(q, k, v, mask.dropout if self.training else 0.0)

    def _project(self, weight: Tensor, x: Tensor) -> Tensor:
        """[B, G, S, K] -> [B, G, P, K], by E [P, S] or a convolution [W, K, K], or by those of each head."""
        weight = weight.to(x.dtype)
        if self.projection == "linear":
            weight = weight[..., : x.shape[2]]
            if weight.ndim > 2:
                return weight @ x
            # All heads in one product, in the layout of the mixer's projection, so that nothing is copied.
            projected = weight.expand(len(x), -1, -1).bmm(
                x.transpose(1, 2).flatten(2)
            )  # [B, P, G * K]
            return projected.view(len(x), -1, x.shape[1], x.shape[3]).transpose(1, 2)
        return split_chunks(x, 2, self.kernel).flatten(3) @ weight.flatten(-3, -2)

    def _pool(self, x: Tensor) -> Tensor:
        """Mean or maximum of each window, of which the last may be shorter: [B, G, S, K] -> [B, G, P, K]."""
        windows = split_chunks(x, 2, self.kernel)  # [B, G, P, W, K]
        if self.projection == "max":
            padding = torch.arange(windows.shape[2] * self.kernel, device=x.device) >= x.shape[2]
            return windows.masked_fill(padding.view(windows.shape[2], -1, 1), float("-inf")).amax(3)
        counts = x.new_full((windows.shape[2], 1), self.kernel)
        counts[-1] -= -x.shape[2] % self.kernel
        return windows.sum(3) / counts

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        if self.projection == "linear":
            return 2.0 * heads * self.projected_length * (queries + keys) * head_width
        windows = -(-keys // self.kernel)
        convolution = self.kernel * head_width if self.projection == "convolution" else 0
        return 2.0 * heads * windows * (queries + convolution) * head_width
