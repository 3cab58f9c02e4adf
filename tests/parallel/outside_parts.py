"""A user's parts, in a file of his own that no engine has heard of: they declare axes, seams and roles, and no more.

`sloped`, a core: softmax attention whose scores fall with the distance, by a slope that follows from the index of the
head in the model, and whose outputs have a gain for each head. `normed_mean`, a mixer: the mean of the values of a few
tokens, normalised over the channels of all heads, with gates that read all channels.
"""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import Parameter

from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.dense import masked_softmax, repeat_kv, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.init import ONES
from xscale.nn.linear import Linear
from xscale.nn.mixer.local_mixer import LocalMixer
from xscale.nn.mixer.mixer import MIXERS, Mixer, MixerTraits
from xscale.nn.neighbours import same_document
from xscale.nn.norm.norm import NORMS, Norm, Rms
from xscale.nn.roles import Role, Seams
from xscale.nn.tokens import Tokens


@CORES.register(
    "sloped",
    traits=CoreTraits(
        causal=True,
        bidirectional=True,
        cross=False,
        per_head=True,
        cost="2*T*S*K",
        context=("ulysses",),
        documents=True,
        dropout=True,
    ),
)
class Sloped(Core):
    gain: Parameter

    class Config(Core.Config):
        slope: float = Field(default=0.5, gt=0)
        """Slope of the first head; that of head h is 1 / (h + 1) of it."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.slope = config.slope
        self.declare("gain", (heads,), ("heads",), ONES, decays=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
        scores = upcast(q @ k.mT) * q.shape[-1] ** -0.5
        queries, keys = scores.shape[2:]
        heads = self.first_head + torch.arange(q.shape[1], device=q.device)
        distance = torch.arange(queries, device=q.device)[:, None] - torch.arange(keys, device=q.device)
        scores = scores - (self.slope / (heads + 1))[:, None, None] * distance.abs()
        weights = masked_softmax(scores, None if mask.allowed is None else ~mask.allowed)
        return self.mix_values(weights, v, mask) * self.use(self.gain)[:, None, None].to(v.dtype)

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        return 2.0 * heads * queries * keys * head_width


@MIXERS.register(
    "normed_mean",
    traits=MixerTraits(causal=True, bidirectional=False, cross=False, documents=True, decode=True),
)
class NormedMean(LocalMixer):
    class Config(Mixer.Config):
        heads: int = Field(default=4, ge=1)
        """H, heads of the values."""
        before: int = Field(default=2, ge=0)
        """Tokens before each token whose values it averages with its own."""
        dropout: float = Field(default=0.0, ge=0, lt=1)
        """Dropout probability of a head at a token."""

    seams: ClassVar[Seams] = {
        "first_head": Role.FIRST_HEAD,
        "norm_all_heads": Role.NORM_OVER_HEADS,
        "sum_over_heads": Role.SUM_OVER_HEADS,
    }
    uses_position: ClassVar[bool] = False

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        self.heads, self.left, self.dropout = config.heads, config.before, config.dropout
        self.first_head = 0
        self.v = Linear(dims.width, dims.width, ("heads", "width"), dims.init)
        self.predict = Linear(dims.width, config.heads, ("state", "heads"), dims.init)
        self.o = Linear(dims.width, dims.width, ("width", "heads"), dims.residual_init, bias=True)
        self.norm: Norm = NORMS.build(Rms.Config(), dims.width)

    def forward(self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None) -> Tensor:
        v = self.v(x)
        near, documents = self.with_neighbours(v, tokens)
        windows = near.unfold(1, self.left + 1, 1)  # [B, T, H * K, left + 1]
        if documents is not None:
            windows = windows * same_document(documents, self.left, 0)[:, :, None]
        mean = self.norm_all_heads(self.norm, windows.mean(-1))  # [B, T, H * K]
        gates = self.sum_over_heads(self.predict(mean)).sigmoid()  # [B, T, heads]
        local = mean.shape[-1] // (self.width // self.heads)
        gates = gates.narrow(-1, self.first_head, local)
        drops = self.dropout if self.training and tokens.forward.rng_seed is not None else 0.0
        gates = self.random.dropout(gates, drops, ("batch", "tokens", "heads"), tokens)
        out: Tensor = self.o((mean.unflatten(-1, (local, -1)) * gates[..., None]).flatten(2))
        return out

    def norm_all_heads(self, norm: Norm, x: Tensor) -> Tensor:
        normalised: Tensor = norm(x)
        return normalised

    def sum_over_heads(self, terms: Tensor) -> Tensor:
        return terms

    @property
    def width(self) -> int:
        """D of all ranks."""
        return int(self.norm.weight.shape[0])

    @property
    def exchanged_width(self) -> int:
        return self.width

    @property
    def gathered_channels(self) -> int:
        return self.width

    @property
    def summed_channels(self) -> int:
        return self.heads

    def multiply_adds(self, queries: int, keys: int) -> float:
        return float(queries * (self.left + 1) * self.width)
