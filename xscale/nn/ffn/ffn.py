"""Position-wise layers, x -> x, which have most of a model's parameters: `dense`, `gated`, `glu` and `none`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from xscale.core.config import NonNegativeFloat, PositiveFloat, PositiveInt, Slot
from xscale.core.registry import Family
from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.module import Part
from xscale.nn.tokens import Tokens
from xscale_kernels.gated_activation.op import gated_activation


@dataclass(frozen=True)
class FfnTraits:
    """Properties that a feed-forward part declares and the conformance suite checks."""

    per_token: bool
    """A token's output depends on that token alone."""
    sparse: bool
    """A token uses only some of the parameters."""
    reads_neighbours: bool = False
    """A token's output depends on it and on a fixed number of tokens around it in its document, in generation too, and
    on a sequence that is sharded over ranks."""


class Ffn(Part):
    """[B, T, D] -> [B, T, D]; built as `Ffn(config, dims)`."""

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        raise NotImplementedError

    def active_fractions(self) -> dict[str, float]:
        """Fraction of each sparsely used parameter that a token activates (top_k / experts), by name in this module."""
        return {}


def active_fractions(model: nn.Module) -> dict[str, float]:
    """Mean fraction that one token activates of each sparsely used parameter, by full name."""
    return {
        f"{path}.{name}" if path else name: fraction
        for path, module in model.named_modules()
        if isinstance(module, Ffn)
        for name, fraction in module.active_fractions().items()
    }


Activation = Literal["relu", "gelu", "gelu_tanh", "swish", "sigmoid", "identity"]


def activation(name: Activation) -> Callable[[Tensor], Tensor]:
    """The element-wise function of that name."""
    functions: dict[Activation, Callable[[Tensor], Tensor]] = {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "swish": F.silu,
        "sigmoid": F.sigmoid,
        "identity": lambda x: x,
    }
    return functions[name]


FFNS = Family("ffn", FfnTraits, Ffn)
FfnSlot = Annotated[Ffn.Config, Slot(FFNS)]
"""A config key that holds any ffn."""


@FFNS.register("dense", traits=FfnTraits(per_token=True, sparse=False))
class Dense(Ffn):
    """Vaswani et al. 2017, section 3.3: two linear maps around a nonlinearity."""

    class Config(Ffn.Config):
        hidden: PositiveInt | None = None
        """F, the width between the two maps; null: four times the model's width."""
        activation: Activation = "gelu"
        """relu (Vaswani et al. 2017), gelu (Hendrycks and Gimpel 2016), swish (Ramachandran et al. 2018) ..."""
        bias: bool = False
        """Whether the maps have biases."""

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        hidden = config.hidden or 4 * dims.width
        self.activation = activation(config.activation)
        self.up = Linear.from_width(dims, hidden, "ffn", bias=config.bias)
        self.down = Linear.to_width(dims, hidden, "ffn", bias=config.bias)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        down: Tensor = self.down(self.activation(self.up(x)))
        return down


@FFNS.register("none", traits=FfnTraits(per_token=True, sparse=False))
class NoFfn(Ffn):
    """No position-wise layer: a block leaves this sublayer out (Guo et al. 2019, Star-Transformer)."""

    def __init__(self, config: Ffn.Config, dims: Dims) -> None:
        super().__init__()

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        return x


Gate = Literal["glu", "bilinear", "reglu", "geglu", "geglu_tanh", "quick_geglu", "swiglu"]
GATES: tuple[Gate, ...] = get_args(Gate)


def gated_hidden(hidden: int | None, width: int) -> int:
    """F; null: 8/3 of the width rounded up to 64, so that three matrices have as many weights as two of 4 D."""
    return hidden or -(-8 * width // (3 * 64)) * 64


@dataclass(frozen=True)
class GateLimits:
    """The clamp and the offset of a gated layer's hidden parts before its activation (OpenAI 2025, gpt-oss)."""

    clamp_value: float | None = None
    linear_offset: float = 0.0

    @property
    def changes(self) -> bool:
        """Whether `apply` changes anything."""
        return self.clamp_value is not None or self.linear_offset != 0.0

    def apply(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gate [..., F] clamped from above, and the value [..., F] clamped on both sides plus the offset."""
        if self.clamp_value is not None:
            gate, up = (
                gate.clamp(max=self.clamp_value),
                up.clamp(-self.clamp_value, self.clamp_value),
            )
        return gate, up + self.linear_offset if self.linear_offset else up


@FFNS.register("gated", traits=FfnTraits(per_token=True, sparse=False))
class Gated(Ffn):
    """Shazeer 2020: GLU and its variants, a linear map gated element-wise by another."""

    class Config(Ffn.Config):
        hidden: PositiveInt | None = None
        """F, the width of gate and value; null: 8/3 of the model's width rounded up to 64."""
        gate: Gate = "swiglu"
        """glu (Dauphin et al. 2017), bilinear, reglu, geglu, geglu_tanh (GELU by its tanh approximation), quick_geglu
        (GELU as x sigmoid(1.702 x)), swiglu."""
        bias: bool = False
        """Whether the maps have biases."""
        clamp_value: PositiveFloat | None = None
        """Clamps what enters the gate's activation to at most this, and what is gated to its negative and to itself
        (OpenAI 2025, gpt-oss: 7); null: no clamp."""
        linear_offset: NonNegativeFloat = 0.0
        """Added to what is gated, after the clamp (gpt-oss: 1, so that the layer is act(gate) * (up + 1))."""

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        hidden = gated_hidden(config.hidden, dims.width)
        self.kind = config.gate
        self.limits = GateLimits(config.clamp_value, config.linear_offset)
        self.gate = Linear.from_width(dims, hidden, "ffn", bias=config.bias)
        self.up = Linear.from_width(dims, hidden, "ffn", bias=config.bias)
        self.down = Linear.to_width(dims, hidden, "ffn", bias=config.bias)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        kernel = self.kernel_choices.get("gated_activation")
        gate, up = self.limits.apply(self.gate(x), self.up(x))
        down: Tensor = self.down(gated_activation(gate, up, self.kind, implementation=kernel))
        return down


@FFNS.register("glu", traits=FfnTraits(per_token=True, sparse=False))
class GluLayer(Ffn):
    """Dauphin et al. 2017: the gated linear unit by itself, without a hidden layer: (x W + b) * sigmoid(x V + c)."""

    class Config(Ffn.Config):
        bias: bool = False
        """Whether the two maps have biases."""

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        # What is gated is added to the residual stream.
        self.up = Linear(
            dims.width, dims.width, ("width", "width"), dims.residual_init, bias=config.bias
        )
        self.gate = Linear(dims.width, dims.width, ("width", "width"), dims.init, bias=config.bias)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        gated: Tensor = self.up(x) * self.gate(x).sigmoid()
        return gated
