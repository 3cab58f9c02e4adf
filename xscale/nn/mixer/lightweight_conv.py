"""Wu et al. 2019, Pay Less Attention: lightweight and dynamic convolutions, depthwise with normalised shared kernels.

    x = (y W_v) * sigmoid(y W_g)                                                  (GLU)
    o_t,c = sum_{j=1}^{k} softmax(w_h)_j x_{t + j - ceil((k + 1) / 2), c}         (eq. 3, lightweight)
    w_h,t = x_t W^Q_h                                                             (section 4, dynamic)
    output = o W_o

The channels c of a head h share a kernel w_h [k]; a dynamic one is predicted from the token x_t alone. In a causal
model the window ends at t: o_t,c = sum_j softmax(w_h)_j x_{t + j - k, c}. Entries of the normalised kernels are dropped
in training (DropConnect). With a dilation d neighbours are d tokens apart (Tay et al. 2021).

Time and memory are linear in T: a block of tokens is one product of its kernels, laid out as a band, with its inputs.
On a CPU long sequences are computed in chunks that fit its cache.
"""

import itertools

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import FractionBelowOne, PositiveInt
from xscale.nn.attention.ops.dense import upcast
from xscale.nn.dims import Dims
from xscale.nn.init import Init
from xscale.nn.linear import Linear
from xscale.nn.mixer.local_mixer import LocalMixer
from xscale.nn.mixer.mixer import CAUSAL_OR_BIDIRECTIONAL, MIXERS
from xscale.nn.mixer.value_mixer import ValueMixer
from xscale.nn.neighbours import same_document
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens

CHUNK = 1 << 17
"""Numbers of x that a CPU convolves at a time, whose windows and gradients then stay in its cache."""
SHORTEST_BLOCK = 16
"""Tokens of the shortest block, so that its product is no long row of dot products."""


@MIXERS.register(
    "lightweight_conv",
    traits=CAUSAL_OR_BIDIRECTIONAL,
)
class LightweightConv(ValueMixer, LocalMixer):
    kernel: Parameter

    class Config(ValueMixer.Config):
        dynamic: bool = False
        """Whether each token predicts its kernels (DynamicConv); otherwise they are parameters (LightConv)."""
        kernel_sizes: tuple[PositiveInt, ...] = Field(default=(3, 7, 15, 31), min_length=1)
        """k, tokens that a kernel reads, by layer; the last one is that of all further layers."""
        dilations: tuple[PositiveInt, ...] = Field(default=(1,), min_length=1)
        """Distance between the tokens that a kernel reads, by layer; the last one is that of all further layers."""
        glu: bool = True
        """Whether a gated linear unit precedes the convolution, as in the paper; otherwise a linear map does."""
        dropout: FractionBelowOne = 0.0
        """Dropout probability of the normalised kernels' entries (DropConnect)."""

    seams = {"sum_over_heads": Role.SUM_OVER_HEADS}

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        inner = config.heads * self.head_width
        self.dropout = config.dropout
        self.kernel_size = by_layer(config.kernel_sizes, dims.layer)
        self.dilation = by_layer(config.dilations, dims.layer)
        after = 0 if dims.causal else (self.kernel_size - 1) // 2
        self.left, self.right = (
            (self.kernel_size - 1 - after) * self.dilation,
            after * self.dilation,
        )
        self.gate = (
            Linear.from_width(dims, inner, "heads", bias=config.bias) if config.glu else None
        )
        # Logits of all heads need all channels: tensor parallelism sums them, and each rank takes those of its heads.
        self.predict = (
            Linear(
                inner,
                config.heads * self.kernel_size,
                ("state", "heads"),
                dims.init,
                bias=config.bias,
            )
            if config.dynamic
            else None
        )
        if not config.dynamic:
            # Xavier, as the authors' code.
            std = (2 / (self.kernel_size * (1 + config.heads))) ** 0.5
            self.declare(
                "kernel", (config.heads, self.kernel_size), ("heads", "tokens"), Init(std=std)
            )

    def forward(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        v = self.v(x)
        if self.gate is not None:
            v = v * self.gate(x).sigmoid()
        kernels = self.kernels(v, tokens)  # [B or 1, T or 1, H, k]
        near, documents = self.with_neighbours(v, tokens)
        if documents is not None:
            window = same_document(documents, self.left, self.right)[..., :: self.dilation]
            kernels = kernels * window[:, :, None]  # [B, T, H, k]
        mixed = convolve(
            near.reshape(*near.shape[:2], -1, self.head_width), kernels.to(v.dtype), self.dilation
        )
        out: Tensor = self.o(mixed.flatten(2))
        return out

    def kernels(self, v: Tensor, tokens: Tokens) -> Tensor:
        """Normalised kernels of the local heads by v [B, T, H * K]: [B, T, H, k] if dynamic, otherwise [1, 1, H, k]."""
        drops = self.dropout if self.training and tokens.forward.rng_seed is not None else 0.0
        if self.predict is None:
            kernels = upcast(self.use(self.kernel)).softmax(-1)
            return self.random.dropout(kernels, drops, ("heads", "state"))[None, None]
        logits = self.sum_over_heads(self.predict(v))
        logits = logits.reshape(*logits.shape[:2], -1, self.kernel_size)  # [B, T, heads, k]
        logits = logits.narrow(2, self.first_head, v.shape[-1] // self.head_width)  # [B, T, H, k]
        return self.random.dropout(
            upcast(logits).softmax(-1), drops, ("batch", "tokens", "heads", "state"), tokens
        )

    def sum_over_heads(self, logits: Tensor) -> Tensor:
        """Sum the logits of all heads [B, T, heads * k] over all channels, from the local ones' terms. A seam."""
        return logits

    @property
    def summed_channels(self) -> int:
        return 0 if self.predict is None else len(self.predict.weight)

    @property
    def exchanged_width(self) -> int:
        return len(self.v.weight)

    def multiply_adds(self, queries: int, keys: int) -> float:
        return float(queries * min(keys, self.kernel_size) * len(self.v.weight))


def by_layer(values: tuple[int, ...], layer: int) -> int:
    """Return the value of a layer; the last one is that of all further layers."""
    return values[min(layer, len(values) - 1)]


def convolve(x: Tensor, kernels: Tensor, dilation: int = 1) -> Tensor:
    """Convolve x [B, (k - 1) * dilation + T, H, K] with kernels [B or 1, T or 1, H, k] -> [B, T, H, K].

    Token t is sum_j kernels[:, t, :, j] * x[:, t + j * dilation].
    """
    if dilation == 1:
        return _convolve(x, kernels)
    # Tokens that are a multiple of the dilation apart are a sequence of their own.
    length = x.shape[1] - (kernels.shape[-1] - 1) * dilation
    surplus = -length % dilation
    x = _every(F.pad(x, (0, 0, 0, 0, 0, surplus)), dilation)
    if kernels.shape[1] > 1:
        kernels = _every(F.pad(kernels, (0, 0, 0, 0, 0, surplus)), dilation)
    elif len(kernels) > 1:
        kernels = kernels.repeat_interleave(dilation, 0)
    out = _convolve(x, kernels)
    out = out.reshape(-1, dilation, *out.shape[1:]).movedim(1, 2).flatten(1, 2)
    return out.narrow(1, 0, length)


def _every(x: Tensor, step: int) -> Tensor:
    """[B, T, H, K] -> [B * step, T / step, H, K]: a row for tokens 0, step, 2 step ..., one from 1 on ..."""
    return x.reshape(len(x), -1, step, *x.shape[2:]).movedim(2, 1).flatten(0, 1)


def _convolve(x: Tensor, kernels: Tensor) -> Tensor:
    size = kernels.shape[-1]
    tokens = max(CHUNK // x[:, 0].numel(), size)
    if x.device.type != "cpu" or x.shape[1] < 2 * tokens or torch.compiler.is_compiling():
        return _convolve_blocks(x, kernels)
    chunks = list(torch.split(x, tokens, 1))
    if chunks[-1].shape[1] < size:
        chunks[-2:] = [torch.cat(chunks[-2:], 1)]
    outputs, start = [], 0
    for chunk, next_chunk in itertools.pairwise([*chunks, x[:, :0]]):
        inputs = torch.cat([chunk, next_chunk[:, : size - 1]], 1)
        length = inputs.shape[1] - size + 1
        chunk_kernels = kernels if kernels.shape[1] == 1 else kernels.narrow(1, start, length)
        outputs.append(_convolve_blocks(inputs, chunk_kernels))
        start += length
    return torch.cat(outputs, 1)


def _convolve_blocks(x: Tensor, kernels: Tensor) -> Tensor:
    size = kernels.shape[-1]
    length = x.shape[1] - size + 1
    block = min(max(size - 1, SHORTEST_BLOCK), length)
    surplus = -length % block
    windows = F.pad(x, (0, 0, 0, 0, 0, surplus)).unfold(
        1, block + size - 1, block
    )  # [B, n, H, K, block + k - 1]
    if kernels.shape[1] == 1:
        kernels = kernels.expand(-1, block, -1, -1)
    else:
        kernels = F.pad(kernels, (0, 0, 0, 0, 0, surplus))
    kernels = kernels.reshape(len(kernels), -1, block, *kernels.shape[2:])
    kernels = kernels.movedim(2, 3)  # [B or 1, n or 1, H, block, k]
    # Each row of a block one place further right than the row above: rows are written one place too long.
    band = F.pad(kernels, (0, block)).flatten(-2).narrow(-1, 0, block * (block + size - 1))
    band = band.reshape(*band.shape[:-1], block, block + size - 1)
    if band.shape[:2] == (1, 1):
        mixed = torch.einsum("hts,bnhks->bnthk", band[0, 0], windows)
    else:
        mixed = torch.einsum("bnhts,bnhks->bnthk", band.expand(len(x), -1, -1, -1, -1), windows)
    return mixed.flatten(1, 2).narrow(1, 0, length)
