"""So et al. 2019, Evolved Transformer: two branches of convolutions, their sum, a norm and a separable convolution.

    encoder:  h = relu(x W + b) + pad(relu(conv_3(x))),         y = pad(sepconv_9(LN(h)))
    decoder:  h = relu(sepconv_11(x)) + pad(sepconv_7(x)),      y = sepconv_7(LN(h))

The encoder's branches have 4D and D/2 channels and its separable convolution D/2; the decoder's have 2D, D/2 and D.
`pad` fills the missing channels with zeros. sepconv_k is a convolution of each channel by itself over k tokens, and a
linear map. The windows of a causal model end at the token, others are centred.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import FractionBelowOne
from xscale.core.errors import Problem
from xscale.core.requirements import kinds, take
from xscale.nn.dims import Dims
from xscale.nn.init import Init
from xscale.nn.linear import Linear
from xscale.nn.mixer.local_mixer import LocalMixer
from xscale.nn.mixer.mixer import CAUSAL_OR_BIDIRECTIONAL, MIXERS, Mixer
from xscale.nn.module import Module
from xscale.nn.norm.norm import NORMS, Layer, Norm, NormSlot
from xscale.nn.tokens import Tokens


class Depthwise(Module):
    """A convolution of each channel by itself."""

    kernel: Parameter

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.declare("kernel", (channels, size), ("state", "tokens"), Init(std=size**-0.5))

    def forward(self, windows: "Windows") -> Tensor:
        """Neighbours of T tokens -> [B, T, C]."""
        kernel = self.use(self.kernel)
        if windows.documents is None:
            return F.conv1d(windows.x.mT, kernel[:, None], groups=len(kernel)).mT
        out = torch.zeros_like(windows.centre())
        for index, tap in enumerate(windows.taps()):
            out = out + tap * kernel[:, index]
        return out


class Windows:
    """Windows of `size` tokens around each of T tokens, cut out of a wider neighbourhood."""

    def __init__(
        self,
        near: Tensor,
        documents: Tensor | None,
        around: tuple[int, int],
        window: tuple[int, int],
    ) -> None:
        """Cut from `near` [B, left + T + right, C], where (left, right) = `around`; `window` are those of a window."""
        first, length = around[0] - window[0], near.shape[1] - sum(around)
        self.length = length
        self.left = window[0]
        self.size = sum(window) + 1
        self.x = near.narrow(1, first, length + sum(window))
        self.documents = (
            None if documents is None else documents.narrow(1, first, length + sum(window))
        )

    def centre(self) -> Tensor:
        """The tokens in the middle, [B, T, C]."""
        return self.x.narrow(1, self.left, self.length)

    def taps(self) -> list[Tensor]:
        """Each place of the window, [B, T, C]; zeros where its token is of another document."""
        taps = [self.x.narrow(1, j, self.length) for j in range(self.size)]
        if self.documents is None:
            return taps
        ids = [self.documents.narrow(1, j, self.length) for j in range(self.size)]
        return [tap * (of == ids[self.left])[..., None] for tap, of in zip(taps, ids, strict=True)]


def sides(size: int, causal: bool) -> tuple[int, int]:
    """Tokens before and after the one that a window of `size` belongs to."""
    after = 0 if causal else (size - 1) // 2
    return size - 1 - after, after


class Convolution(LocalMixer):
    """Base of the two steps, each of which fetches its neighbours once."""

    def __init__(self, channels: int, sizes: tuple[int, ...], causal: bool) -> None:
        super().__init__()
        self.channels, self.causal = channels, causal
        self.left, self.right = (
            max(side) for side in zip(*(sides(size, causal) for size in sizes), strict=True)
        )

    def windows(self, x: Tensor, tokens: Tokens, *sizes: int) -> list[Windows]:
        """Return the windows of those sizes around x [B, T, C]."""
        near, documents = self.with_neighbours(x, tokens)
        around = (self.left, self.right)
        return [Windows(near, documents, around, sides(size, self.causal)) for size in sizes]

    @property
    def exchanged_width(self) -> int:
        return self.channels


class Branches(Convolution):
    """Both branches and their sum."""

    def __init__(self, config: "EvolvedBranches.Config", dims: Dims) -> None:
        width, encoder = dims.width, config.form == "encoder"
        sizes = (1, 3) if encoder else (11, 7)
        super().__init__(width, sizes, dims.causal)
        self.sizes, self.dropout = sizes, config.dropout
        self.left_depthwise = None if encoder else Depthwise(width, sizes[0])
        self.right_depthwise = None if encoder else Depthwise(width, sizes[1])
        channels, taps = width * (4 if encoder else 2), sizes[1] if encoder else 1
        self.left_map = Linear(width, channels, ("state", "width"), dims.init, bias=config.bias)
        self.right_map = Linear(
            taps * width, width // 2, ("state", "width"), dims.init, bias=config.bias
        )

    def forward(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        """[B, T, D] -> [B, T, 4D] or [B, T, 2D]."""
        left, right = self.windows(x, tokens, *self.sizes)
        if self.left_depthwise is None or self.right_depthwise is None:
            left_output = self._drop(self.left_map(left.centre()).relu(), tokens)
            right_output = self.right_map(torch.cat(right.taps(), -1)).relu()
        else:
            left_output = self._drop(self.left_map(self.left_depthwise(left)).relu(), tokens)
            right_output = self.right_map(self.right_depthwise(right))
        return left_output + widened(self._drop(right_output, tokens), left_output.shape[-1])

    def _drop(self, x: Tensor, tokens: Tokens) -> Tensor:
        drops = self.dropout if self.training and tokens.forward.rng_seed is not None else 0.0
        return self.random.dropout(x, drops, ("batch", "tokens", "width"), tokens)

    def multiply_adds(self, queries: int, keys: int) -> float:
        return (
            0.0 if self.left_depthwise is None else float(queries * sum(self.sizes) * self.channels)
        )


class Separable(Convolution):
    """The separable convolution behind the branches."""

    def __init__(self, config: "EvolvedBranches.Config", dims: Dims) -> None:
        encoder = config.form == "encoder"
        channels, size = dims.width * (4 if encoder else 2), 9 if encoder else 7
        super().__init__(channels, (size,), dims.causal)
        self.size = size
        outputs = dims.width // 2 if encoder else dims.width
        self.depthwise = Depthwise(channels, size)
        self.map = Linear(
            channels, outputs, ("width", "state"), dims.residual_init, bias=config.bias
        )

    def forward(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        """[B, T, 4D] -> [B, T, D/2], or [B, T, 2D] -> [B, T, D]."""
        (windows,) = self.windows(x, tokens, self.size)
        out: Tensor = self.map(self.depthwise(windows))
        return out

    def multiply_adds(self, queries: int, keys: int) -> float:
        return float(queries * self.size * self.channels)


def widened(x: Tensor, width: int) -> Tensor:
    """Append channels of zeros to x [B, T, C]: [B, T, width]."""
    return F.pad(x, (0, width - x.shape[-1]))


@MIXERS.register(
    "evolved_branches",
    traits=CAUSAL_OR_BIDIRECTIONAL,
    deviations=(
        "Kernels of single channels start with variance 1/k; the paper does not say how they start.",
    ),
)
class EvolvedBranches(Mixer):
    class Config(Mixer.Config):
        form: Literal["encoder", "decoder"] = "decoder"
        """Whose branches: those of the paper's encoder or decoder; either can be causal."""
        norm: NormSlot = Layer.Config()
        """The norm of the branches' sum."""
        bias: bool = True
        """Whether the linear maps and the convolution over all channels have biases."""
        dropout: FractionBelowOne = 0.0
        """Dropout probability of each branch's output."""

    uses_position = False
    shards_sequence = True

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        self.width = dims.width
        self.branches = Branches(config, dims)
        self.norm: Norm = NORMS.build(config.norm, self.branches.left_map.weight.shape[0])
        self.separable = Separable(config, dims)

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        if dims.width % 2:
            what = f"a branch has half of the channels, and width={dims.width} is odd"
            problems.append(Problem("model.width", what, choices=take(dims.width + 1)))
        if not NORMS.of(config.norm).traits.per_token:
            what = f"norm '{config.norm.kind}' mixes tokens, between two convolutions that see near ones alone"
            choices = kinds(NORMS.able(per_token=True, batch_statistics=False), f"{path}.norm")
            problems.append(Problem(f"{path}.norm", what, choices=choices))
        return problems

    def forward(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        return widened(self.separable(self.norm(self.branches(x, tokens)), tokens), self.width)
