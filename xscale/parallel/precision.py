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


def apply(model: nn.Module, compute: torch.dtype, master: torch.dtype) -> None:
    """Give every module its door; one that keeps its precision, such as a router, gets its parameters as they rest."""
    use, kept = door(compute), door(master)
    for module in model.modules():
        if isinstance(module, Module):
            module.door = kept if module.keeps_precision else use
