"""Allocate and initialise a model that was built on meta, on one device."""

from collections.abc import Callable

import torch
from torch import nn

from xscale.nn.init import draw
from xscale.nn.module import parameter_inits


def replace_parameters(model: nn.Module, make: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Replace every parameter by `make(full name, parameter)`; tied parameters stay tied."""
    replaced: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in replaced:
                replaced[id(parameter)] = make(f"{path}.{name}" if path else name, parameter)
            setattr(module, name, replaced[id(parameter)])


def materialize(
    model: nn.Module, seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> None:
    """Allocate and initialise every parameter of a model built on meta, on one device."""
    inits = {name: init for name, _, init in parameter_inits(model)}

    def make(name: str, parameter: nn.Parameter) -> nn.Parameter:
        value = draw(inits[name], tuple(parameter.shape), seed, name)
        return nn.Parameter(value.to(device, dtype), requires_grad=parameter.requires_grad)

    replace_parameters(model, make)
