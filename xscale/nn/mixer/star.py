"""Guo et al. 2019 (Star-Transformer), algorithm 1: a ring of satellite nodes, one for each token, and one relay node.

With the input e, h = e and s = mean(e) at first, each step computes, with the same weights,
    h_i <- LN(ReLU(MultiAtt(h_i, [h_(i-1); h_i; h_(i+1); e_i; s]))) for all i at once, in a ring,
    s <- LN(ReLU(MultiAtt(s, [s; h]))), with the new h.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.core.config import PositiveInt
from xscale.core.errors import ConfigError
from xscale.nn.attention.ops.dense import upcast
from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.mixer.mixer import ACTS_INSIDE, BIDIRECTIONAL, MIXERS, Mixer, RefusedPositions
from xscale.nn.mixer.without_padding import without_padding
from xscale.nn.module import Module
from xscale.nn.norm.norm import Layer
from xscale.nn.tokens import Tokens


class StarAttention(Module):
    """Multi-head attention of each node to its own context, then ReLU and layer norm."""

    def __init__(self, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        inner = heads * head_width
        # Not sharded over tp: ReLU and norm need the sum over all heads.
        self.q, self.k, self.v = (Linear.from_width(dims, inner, "state") for _ in range(3))
        self.o = Linear(inner, dims.width, ("width", "state"), dims.init)
        self.norm = Layer(Layer.Config(), dims.width)

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of nodes [..., D]: [..., H, K] each."""
        return self._heads(self.k(x)), self._heads(self.v(x))

    def forward(self, nodes: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Update nodes [..., D] from their contexts, k and v [..., C, H, K] -> [..., D]."""
        q = self._heads(self.q(nodes))
        scores = torch.einsum("...hk,...chk->...hc", upcast(q), upcast(k)) * self.head_width**-0.5
        out = torch.einsum("...hc,...chk->...hk", scores.softmax(-1).to(v.dtype), v)
        updated: Tensor = self.norm(F.relu(self.o(out.flatten(-2))))
        return updated

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_width)


@MIXERS.register(
    "star",
    traits=BIDIRECTIONAL,
    deviations=(
        "The output is the satellites; the relay's last update, by which the paper classifies a sequence, is left out.",
    ),
)
class StarTransformerLayers(Mixer):
    """Guo et al. 2019 (Star-Transformer): steps of a ring of satellites and a relay, with shared weights.

    It is a whole encoder: take it in one block, with residual none and ffn none.
    """

    class Config(Mixer.Config):
        heads: PositiveInt = 8
        """H, heads of both attentions."""
        head_width: PositiveInt | None = None
        """K, width of a head; null: width / heads."""
        steps: PositiveInt = 2
        """T, updates of the satellites and the relay, all with the same weights."""

    heads_make_width = True
    refused_positions = RefusedPositions(ACTS_INSIDE, "acts inside the attention of another mixer")

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        head_width = config.head_width or dims.width // config.heads
        self.inner = config.heads * head_width
        self.steps = config.steps
        self.satellites = StarAttention(dims, config.heads, head_width)
        # The relay's update after the last step is read by nobody.
        self.relay: StarAttention | None = None
        if config.steps > 1:
            self.relay = StarAttention(dims, config.heads, head_width)

    @without_padding
    def forward(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        if tokens.documents is not None:
            what = f"the relay of {self.path} is shared by the documents of a sample, which must not see each other"
            raise ConfigError(
                "data.cross_documents", what, "Set it to true, or take the mixer attention."
            )
        satellites, relay = x, x.mean(1)  # [B, T, D], [B, D]
        embedded = self.satellites.keys(x)
        for step in range(self.steps):
            of_satellites, shared = self.satellites.keys(satellites), self.satellites.keys(relay)
            k, v = (
                torch.stack(
                    (a.roll(1, 1), a, a.roll(-1, 1), e, s[:, None].expand_as(a)), 2
                )  # [B, T, 5, H, K]
                for a, e, s in zip(of_satellites, embedded, shared, strict=True)
            )
            satellites = self.satellites(satellites, k, v)
            if self.relay is not None and step < self.steps - 1:
                nodes = torch.cat((relay[:, None], satellites), 1)
                relay = self.relay(relay, *self.relay.keys(nodes))
        return satellites

    def multiply_adds(self, queries: int, keys: int) -> float:
        width = self.satellites.o.weight.shape[0]
        # Weights are counted once for each token, and used in each step: q, k, v, o of satellites, k, v of the relay.
        uses = 4 * self.steps + 2 + 2 * (self.steps - 1) - (4 if self.relay is None else 8)
        scores = 2.0 * self.inner * (5 * self.steps * queries + (self.steps - 1) * (queries + 1))
        return scores + float(uses) * queries * self.inner * width
