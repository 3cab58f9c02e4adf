"""Hyper-connections: n residual streams, mixed by weights of each token (`hyper_connections`, `mhc`).

H [n, D] are the streams of a token, f a sublayer with its norms, and H' what follows:

    H' = R H + b f(p H),  p [1, n] reads, b [n, 1] writes, R [n, n] mixes

`hyper_connections` (Zhu et al. 2024, equations 9 to 13), with static p, b, R that begin as stream k mod n, ones and the
identity for sublayer k, one weight of each kind for all streams, and layer normalisation:

    p = p_0 + s_a tanh(norm(H) w_p),  R = (R_0 + s_a tanh(norm(H) W_R))^T,  b = b_0 + s_b tanh(norm(H) w_b)

`mhc`, manifold-constrained (Xie et al. 2025, DeepSeek-AI, equations 7 to 9), with x the streams in one vector [n D]:

    p = sigmoid(a_p norm(x) W_p + b_p),  b = 2 sigmoid(a_b norm(x) W_b + b_b),  R = Sinkhorn(exp(a_R norm(x) W_R + b_R))

Sinkhorn's iteration divides columns and rows by their sums in turn, so that R is doubly stochastic: a mean of the
streams stays what it was. Its norm is of the root mean square of the vector. Both begin with n copies of the embeddings
and end with the sum of the streams. Weight decay is for what depends on the token, the maps w, W and their factors s,
and not for the static p_0, R_0, b_0 (Zhu et al., section 4, "Implementation"). Xie et al. (table 5) give one weight
decay and no exceptions; here it is for the maps W, and DeepSeek-V4 (section 2.4) treats biases and factors a apart too.
"""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import NonNegativeFloat
from xscale.nn.dims import Dims
from xscale.nn.init import ONES, ZEROS, Init
from xscale.nn.module import Module
from xscale.nn.residual.residual_stream import (
    RESIDUALS,
    AddingPlacement,
    ResidualStream,
    ResidualTraits,
)
from xscale.nn.residual.sublayer import Sublayer
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens

Weights = tuple[Tensor, Tensor, Tensor]
"""p [B, T, n], b [B, T, n] and R [B, T, n, n] of each token."""


class ConnectionWeights(Module):
    """The weights of one sublayer for each token's streams."""

    seams = {"param_hook": Role.PARAMETERS_BETWEEN_REGIONS}

    def forward(self, streams: Tensor) -> Weights:
        """Streams [B, T, n, D] -> the weights, in float32 at least."""
        raise NotImplementedError

    def upcast(self, parameter: Tensor, like: Tensor) -> Tensor:
        """Return the parameter in the type of `like`."""
        return self.use(parameter).to(like.dtype)


class FreeWeights(ConnectionWeights):
    """Weights of hyper-connections, which may be any numbers."""

    read: Parameter
    write: Parameter
    mix: Parameter
    read_map: Parameter
    write_map: Parameter
    mix_map: Parameter
    scale: Parameter

    def __init__(self, config: Any, dims: Dims, number: int) -> None:
        """`number` is that of the sublayer in its stack, from 0."""
        super().__init__()
        count = config.streams
        reads = tuple(float(stream == number % count) for stream in range(count))
        rows = tuple(float(row == column) for row in range(count) for column in range(count))
        state: Any = ("state",)
        self.declare("read", (count,), state, Init("values", values=reads), decays=False)
        self.declare("write", (count,), state, ONES, decays=False)
        self.declare("mix", (count * count,), state, Init("values", values=rows), decays=False)
        self.declare("read_map", (1, dims.width), ("state", "width"), ZEROS)
        self.declare("write_map", (1, dims.width), ("state", "width"), ZEROS)
        self.declare("mix_map", (count, dims.width), ("state", "width"), ZEROS)
        self.declare("scale", (2,), state, Init("constant", value=config.initial_scale))

    def forward(self, streams: Tensor) -> Weights:
        normed = F.layer_norm(upcast(streams), streams.shape[-1:], eps=1e-6)
        read, write, mix = (
            torch.tanh(F.linear(normed, self.upcast(weight, normed)))
            for weight in (self.read_map, self.write_map, self.mix_map)
        )  # [B, T, n, 1], [B, T, n, 1], [B, T, n, n]
        of_alpha, of_beta = self.upcast(self.scale, normed)
        mix = self.upcast(self.mix, normed).view(mix.shape[-2:]) + of_alpha * mix
        return (
            self.upcast(self.read, normed) + of_alpha * read[..., 0],
            self.upcast(self.write, normed) + of_beta * write[..., 0],
            mix.mT,
        )


class ManifoldWeights(ConnectionWeights):
    """Weights of mHC: those that read and write are positive and bounded, those that mix doubly stochastic."""

    map: Parameter
    bias: Parameter
    scale: Parameter

    def __init__(self, config: Any, dims: Dims, number: int) -> None:
        super().__init__()
        count = self.count = config.streams
        self.iterations = config.iterations
        outputs = count * (2 + count)
        # What is read is the mean of equal streams, all get the output, and each keeps nearly its own.
        reads, writes = [-math.log(count - 1) if count > 1 else 8.0] * count, [0.0] * count
        mixes = [0.0 if row == column else -8.0 for row in range(count) for column in range(count)]
        self.declare("map", (outputs, count * dims.width), ("state", "width"), dims.init)
        self.declare(
            "bias",
            (outputs,),
            ("state",),
            Init("values", values=(*reads, *writes, *mixes)),
            decays=False,
        )
        self.declare(
            "scale", (3,), ("state",), Init("constant", value=config.initial_scale), decays=False
        )

    def forward(self, streams: Tensor) -> Weights:
        count, normed = self.count, normalise(streams.flatten(-2))
        sizes = [count, count, count * count]
        logits = torch.split(F.linear(normed, self.upcast(self.map, normed)), sizes, -1)
        scales, biases = (
            self.upcast(self.scale, normed),
            torch.split(self.upcast(self.bias, normed), sizes),
        )
        read, write, mix = (
            scale * x + bias for scale, x, bias in zip(scales, logits, biases, strict=True)
        )
        return (
            read.sigmoid(),
            2 * write.sigmoid(),
            doubly_stochastic(mix.unflatten(-1, (count, count)), self.iterations),
        )


def upcast(x: Tensor) -> Tensor:
    """Return x in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def normalise(x: Tensor) -> Tensor:
    """Divide x [..., K] by its root mean square, in float32 at least: a gain would be part of the map that follows."""
    x = upcast(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def doubly_stochastic(logits: Tensor, iterations: int) -> Tensor:
    """Return exp(logits) [..., n, n] with columns and rows divided by their sums in turn, so often.

    In the logarithm, where no sum overflows.
    """
    for _ in range(iterations):
        logits = logits - logits.logsumexp(-2, keepdim=True)
        logits = logits - logits.logsumexp(-1, keepdim=True)
    return logits.exp()


class HyperConnected(Sublayer):
    """Reads a weighted sum of the streams, and adds its output to all of them, which are mixed."""

    weights: ClassVar[type[Any]] = FreeWeights
    connection: ConnectionWeights

    def add_parts(self, config: Any, dims: Dims, number: int) -> None:
        self.connection = self.weights(config.residual, dims, number)

    def forward(
        self,
        stream: Tensor,
        tokens: Tokens,
        memory: Tensor | None = None,
        source: Tokens | None = None,
        residual: Tensor | None = None,
        edge: Any = None,
        edges: Any = None,
    ) -> Tensor:
        read, write, mix = (weight.to(stream.dtype) for weight in self.connection(stream))
        x = (read[..., None] * stream).sum(-2)  # [B, T, D]
        y = self.branch(x, tokens, memory, source, edge, edges)
        mixed = mix @ (stream if residual is None else residual)
        after: Tensor = mixed + write[..., None] * y[..., None, :]  # [B, T, n, D]
        return after


class ManifoldConnected(HyperConnected):
    weights = ManifoldWeights


class SeveralStreams(ResidualStream):
    """n residual streams in one tensor [B, T, n, D]."""

    class Config(ResidualStream.Config):
        streams: int = Field(default=4, ge=1, le=64)
        """n, the residual streams: the expansion rate."""
        placement: AddingPlacement = "pre"
        """The residual stream whose norms the sublayers have."""
        initial_scale: NonNegativeFloat = 0.01
        """Initial factor of what depends on the token in the weights of the streams."""

    sublayer = HyperConnected
    skippable = False
    form = "hyper-connections have several residual streams"

    def __init__(self, config: Any, dims: Dims) -> None:
        super().__init__(config, dims)
        self.streams: int = config.streams

    def begin(self, x: Tensor) -> Tensor:
        """Return n copies of the embeddings."""
        return torch.stack([x] * self.streams, -2)

    def end(self, stream: Tensor) -> Tensor:
        """Return the sum of the streams."""
        return stream.sum(-2)

    def sent(self, sublayers: int) -> int:
        return self.streams

    def to_tensors(self, stream: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.contiguous() for x in stream.unbind(-2))

    def from_tensors(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return torch.stack(tensors, -2)


@RESIDUALS.register(
    "hyper_connections",
    traits=ResidualTraits(hidden_states=False),
    deviations=(
        "The layer norm of the streams before their weights has no gain and no bias.",
        "Weights that write into the streams are initialised as usual; the paper scales their standard deviation by "
        "the square root of the number of streams.",
    ),
)
class HyperConnections(SeveralStreams):
    """Zhu et al. 2024: n residual streams, from which a sublayer reads a sum, by weights of each token."""


@RESIDUALS.register(
    "mhc",
    traits=ResidualTraits(hidden_states=False),
    deviations=(
        "The initial biases are not the paper's: a sublayer first reads the mean of the streams, writes its output to "
        "all, and a stream keeps nearly its own.",
        "The output is the sum of the streams, as in hyper-connections; DeepSeek-V4 weighs them by a map of their own.",
        "Weight decay is for the maps alone; the paper names no exceptions from its own.",
        "Sinkhorn's iteration is in the logarithm, without the small number that the code of DeepSeek-V4 adds to sums.",
    ),
)
class ManifoldHyperConnections(SeveralStreams):
    """Xie et al. 2025 (DeepSeek-AI): hyper-connections whose matrix that mixes the streams is doubly stochastic."""

    class Config(SeveralStreams.Config):
        iterations: int = Field(default=20, ge=1, le=200)
        """Sinkhorn's iterations, each over columns and rows."""

    sublayer = ManifoldConnected
