"""Precision: parameters rest in master precision and pass the door in compute precision."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xscale.nn.module import Module


def door(compute: torch.dtype) -> Callable[[Tensor], Tensor]:
    """From a parameter at rest to one in use: this rank's part, in compute precision."""

    def use(parameter: Tensor) -> Tensor:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return local if local.dtype == compute else local.to(compute)

    return use


def apply(model: nn.Module, compute: torch.dtype) -> None:
    """Give every module its door."""
    use = door(compute)
    for module in model.modules():
        if isinstance(module, Module):
            module.door = use
