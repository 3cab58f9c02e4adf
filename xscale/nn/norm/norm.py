"""Normalisation layers by statistics of one token, x -> x: `layer`, `rms`, `ada` and `scale`."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import NonNegativeFloat, PositiveFloat, Slot
from xscale.core.registry import Family
from xscale.nn.init import ONES, ZEROS, Init
from xscale.nn.module import Part
from xscale.nn.post_step import PostStepState
from xscale.nn.tokens import Tokens
from xscale_kernels.layernorm.op import layernorm
from xscale_kernels.rmsnorm.op import rmsnorm


@dataclass(frozen=True)
class NormTraits:
    """Properties that a norm declares and the conformance suite checks."""

    per_token: bool
    """Each token is normalised independently, so sequence parallelism may shard the sequence."""
    centred: bool
    """The output has mean 0 over the width before gain and bias."""
    exact_gradient: bool = True
    """The backward pass is the derivative of the forward pass."""
    batch_statistics: bool = False
    """Running statistics move with the tokens of each optimizer step, and evaluation uses them."""


class Norm(Part, PostStepState):
    """[..., D] -> [..., D]; built as `Norm(config, width)`."""

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        """Normalise x; `tokens` are those of x [B, T, D], for norms with statistics of a batch."""
        raise NotImplementedError


NORMS = Family("norm", NormTraits, Norm)
NormSlot = Annotated[Norm.Config, Slot(NORMS)]
"""A config key that holds any norm."""


@NORMS.register("layer", traits=NormTraits(per_token=True, centred=True))
class Layer(Norm):
    """Ba et al. 2016: layer normalisation over the width."""

    weight: Parameter

    class Config(Norm.Config):
        eps: NonNegativeFloat = 1e-5
        """Added to the variance."""
        bias: bool = True
        """Whether a bias follows the gain."""

    def __init__(self, config: Config, width: int) -> None:
        super().__init__()
        self.eps = config.eps
        self.declare("weight", (width,), ("width",), ONES, decays=False)
        self.bias: Tensor | None
        if config.bias:
            self.declare("bias", (width,), ("width",), ZEROS, decays=False)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        bias = None if self.bias is None else self.use(self.bias)
        return layernorm(
            x,
            self.use(self.weight),
            bias,
            self.eps,
            implementation=self.kernel_choices.get("layernorm"),
        )


@NORMS.register("rms", traits=NormTraits(per_token=True, centred=False))
class Rms(Norm):
    """Zhang and Sennrich 2019: division by the root mean square over the width, no centring."""

    weight: Parameter

    class Config(Norm.Config):
        eps: NonNegativeFloat = 1e-6
        """Added to the mean square."""

    def __init__(self, config: Config, width: int) -> None:
        super().__init__()
        self.eps = config.eps
        self.declare("weight", (width,), ("width",), ONES, decays=False)

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        return rmsnorm(
            x, self.use(self.weight), self.eps, implementation=self.kernel_choices.get("rmsnorm")
        )


@NORMS.register("ada", traits=NormTraits(per_token=True, centred=False, exact_gradient=False))
class Ada(Norm):
    """Xu et al. 2019, AdaNorm: z = C (1 - k y) y with y = (x - mean) / deviation over the width; no parameters.

    The factor C (1 - k y) is a constant in the backward pass, as in the paper.
    """

    class Config(Norm.Config):
        eps: NonNegativeFloat = 1e-5
        """Added to the variance."""
        scale: PositiveFloat = 1.0
        """The paper's C."""
        slope: NonNegativeFloat = 0.1
        """The paper's k: how much less a value above the mean is scaled than one below."""

    def __init__(self, config: Config, width: int) -> None:
        super().__init__()
        self.eps = config.eps
        self.scale = config.scale
        self.slope = config.slope

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = precise - precise.mean(-1, keepdim=True)
        y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)
        return ((self.scale * (1 - self.slope * y)).detach() * y).to(x.dtype)


@NORMS.register("scale", traits=NormTraits(per_token=True, centred=False))
class Scale(Norm):
    """Nguyen and Salazar 2019, ScaleNorm: g x / ||x||, one learned g that starts at the square root of the width.

    The paper takes it with `model.fix_norm`, which divides the embeddings by their lengths too.
    """

    weight: Parameter

    class Config(Norm.Config):
        eps: PositiveFloat = 1e-5
        """Least length that x is divided by."""

    def __init__(self, config: Config, width: int) -> None:
        super().__init__()
        self.eps = config.eps
        self.declare("weight", (1,), ("state",), Init("constant", value=width**0.5), decays=False)

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        length: Tensor = torch.linalg.vector_norm(precise, dim=-1, keepdim=True).clamp(min=self.eps)
        return (self.use(self.weight).to(precise.dtype) * (precise / length)).to(x.dtype)
