"""LoRA (Hu et al. 2021): a linear map is frozen, and a product of two narrow trained matrices is added to it.

    h = W x + (alpha / r) B A x,  A [r, inputs], B [outputs, r]

A is drawn, as W is, and B is zero, so that a model starts as it is without them (section 4.1).
"""

from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.nn import Parameter

from xscale.core.config import Config, FractionBelowOne, PositiveFloat, PositiveInt
from xscale.nn.axes import Axis
from xscale.nn.head.class_head import ClassHead
from xscale.nn.init import ZEROS, Init
from xscale.nn.linear import Linear
from xscale.nn.module import Module, name_modules

MARK = ".lora."
"""Part of the names of its parameters."""


class LoraConfig(Config):
    """LoRA. The model's other parameters are frozen, except a head of classes."""

    rank: PositiveInt = 8
    """r, the inner size of the two matrices."""
    alpha: PositiveFloat = 16.0
    """The product is multiplied by alpha / rank."""
    dropout: FractionBelowOne = 0.0
    """Dropout probability of the input of the two matrices in training, as in the authors' code."""
    match: tuple[str, ...] = Field(default=("*.q", "*.v"), min_length=1)
    """Patterns of the paths of linear maps that it is added to, such as `*.q`: * any characters, ? one."""


class Lora(Module):
    """The product of the two matrices of one linear map. Under tp the matrix on the side that is sharded in the linear
    map is sharded, and the other replicated."""

    a: Parameter
    b: Parameter

    def __init__(self, base: Linear, config: LoraConfig) -> None:
        super().__init__()
        outputs, inputs = base.weight.shape
        of_outputs, of_inputs = base.axes["weight"]
        self.scale = config.alpha / config.rank
        self.dropout = config.dropout
        self.inputs = of_inputs
        self.declare("a", (config.rank, inputs), ("state", of_inputs), Init(std=inputs**-0.5))
        self.declare("b", (outputs, config.rank), (of_outputs, "state"), ZEROS)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        if self.training and self.dropout:
            dims: tuple[Axis, ...] = (
                ("batch", "tokens", self.inputs) if x.ndim == 3 else ("tokens", self.inputs)
            )
            x = self.random.dropout(x, self.dropout, dims)
        return self.scale * F.linear(F.linear(x, self.use(self.a)), self.use(self.b))

    def product(self) -> Tensor:
        """Return the matrix [outputs, inputs] that is added to the linear map, in float32 at least."""
        dtype = torch.promote_types(self.a.dtype, torch.float32)
        return self.scale * (self.b.to(dtype) @ self.a.to(dtype))


def lora_paths(model: nn.Module, pattern: str) -> list[str]:
    """Return the paths of the linear maps that a pattern matches."""
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, Linear) and fnmatchcase(path, pattern)
    ]


def add_lora(model: nn.Module, config: LoraConfig) -> None:
    """Add LoRA to a model on meta and freeze its other parameters, except those of heads of classes."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for path in dict.fromkeys(
        path for pattern in config.match for path in lora_paths(model, pattern)
    ):
        linear = model.get_submodule(path)
        assert isinstance(linear, Linear)
        linear.lora = Lora(linear, config)
    for head in [module for module in model.modules() if isinstance(module, ClassHead)]:
        head.requires_grad_(True)
    name_modules(model)


@torch.no_grad()
def merge_lora(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights by name of a model on one device without LoRA: W + (alpha / r) B A."""
    weights = {
        name: value.detach().clone() for name, value in model.named_parameters() if MARK not in name
    }
    for path, module in model.named_modules():
        if isinstance(module, Linear) and isinstance(module.lora, Lora):
            weight = weights[f"{path}.weight"]
            product = module.lora.product()
            weights[f"{path}.weight"] = (weight.to(product.dtype) + product).to(weight.dtype)
    return weights
