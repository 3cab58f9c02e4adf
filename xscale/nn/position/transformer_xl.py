"""Dai et al. 2019 (Transformer-XL), section 3.3: relative positions by projected sinusoids and two learned biases.

The score of query i and key j is ((q_i + u) k_j + (q_i + v) W r_ij) / sqrt(K), where r_ij is the sinusoid of i - j, W a
projection to each head, and u and v are a vector of each head: those of a layer, or of all layers, as in the paper
(`shared_biases`). XLNet (Yang et al. 2019) has it bidirectional.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveFloat
from xscale.nn.dims import Dims
from xscale.nn.module import Module
from xscale.nn.position.distance_tables import DistanceTables
from xscale.nn.position.pairs import Pairs
from xscale.nn.position.position import POSITIONS, Position, PositionTraits

CHUNK = 512
"""Distances whose sinusoids are made at a time: they are wider than what is made of them."""


class _ProjectedSinusoids(torch.autograd.Function):
    """Sinusoids of distances [N], projected by weights [H, K, D]: [H, N, K]. Backward makes the sinusoids again."""

    @staticmethod
    def forward(
        context: Any, weight: Tensor, distances: Tensor, position: "TransformerXl"
    ) -> Tensor:
        context.save_for_backward(weight, distances)
        context.position = position
        rows = weight.new_empty(weight.shape[0], len(distances), weight.shape[1])
        for chunk in _chunks(distances):
            rows[:, chunk] = position.sinusoids(distances[chunk], weight) @ weight.mT
        return rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        weight, distances = context.saved_tensors
        weight_gradient = torch.zeros_like(weight)
        for chunk in _chunks(distances):
            weight_gradient += gradient[:, chunk].mT @ context.position.sinusoids(
                distances[chunk], weight
            )
        return weight_gradient, None, None


def _chunks(distances: Tensor) -> Iterator[slice]:
    return (slice(start, start + CHUNK) for start in range(0, len(distances), CHUNK))


@POSITIONS.register(
    "transformer_xl",
    traits=PositionTraits(where="scores", relative=True, extrapolates=True, cost="H*T*S*K"),
)
class TransformerXl(Position):
    adds_scores = True
    has_tables = True
    weight: Parameter
    content_bias: Parameter
    position_bias: Parameter

    class Config(Position.Config):
        base: PositiveFloat = 10000.0
        """Ratio of the longest to the shortest wavelength, which is 2 pi."""
        shared_biases: bool = False
        """Whether all blocks of a stack have one u and v, as in the paper; false: each block has its own, as XLNet."""

    def __init__(self, config: Config, dims: Dims, heads: int = 0, head_width: int = 0) -> None:
        super().__init__()
        self.base = config.base
        width = dims.width
        self.declare(
            "weight", (heads * head_width, width), ("heads", "width"), dims.init, linear_map=True
        )
        owner: Module = self
        self.layer_tables: Module | None = None
        if config.shared_biases:
            owner = self.layer_tables = Module()
        for name in ("content_bias", "position_bias"):
            owner.declare(name, (heads, head_width), ("heads", "state"), dims.init, decays=False)

    needs_even_width = True

    def scores(self, q: Tensor, k: Tensor, pairs: Pairs) -> Tensor:
        u, v, weight = self._weights_of_heads(pairs)
        scale = q.shape[-1] ** -0.5
        sinusoids = self.sinusoids(pairs.distances(q.device), weight)  # [R, D]
        biased = (q + pairs.query_factor * v[:, None]) * scale
        by_distance = biased @ (weight @ sinusoids.mT)  # [B, H, T, R]
        grouped = (u * (pairs.query_factor * scale)).view(
            k.shape[1], -1, u.shape[-1]
        )  # [G, H/G, K]
        by_key: Tensor = (grouped @ k.mT).flatten(1, 2)[:, :, None]  # [B, H, 1, S]
        scores: Tensor = pairs.shift(by_distance) + by_key  # [B, H, T, S]
        return scores

    def distance_tables(self, q: Tensor, distances: Tensor, pairs: Pairs) -> DistanceTables:
        u, v, weight = self._weights_of_heads(pairs)
        rows: Tensor = _ProjectedSinusoids.apply(weight, distances, self)  # type: ignore[no-untyped-call]
        return DistanceTables(
            rows, content_bias=u * pairs.query_factor, position_bias=v * pairs.query_factor
        )

    def _weights_of_heads(self, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
        """u and v [H, K] and W [H, K, D] of the heads of these pairs."""
        owner: Any = self.layer_tables or self
        u, v = owner.use(owner.content_bias), owner.use(owner.position_bias)
        weight = self.use(self.weight).view(*u.shape, -1)  # [H, K, D]
        u, v, weight = (pairs.select_heads(parameter) for parameter in (u, v, weight))
        return u, v, weight

    def sinusoids(self, distances: Tensor, like: Tensor) -> Tensor:
        """Sines, then cosines, of query - key: [R, D], of the dtype and width of `like` [..., D]."""
        # Angles of far positions need more digits than half precision has.
        width, dtype = like.shape[-1], torch.promote_types(like.dtype, torch.float32)
        rates = self.base ** (
            -torch.arange(width // 2, device=distances.device, dtype=dtype) * 2 / width
        )
        angles = -distances[:, None].to(dtype) * rates
        return torch.cat((angles.sin(), angles.cos()), -1).to(like.dtype)
