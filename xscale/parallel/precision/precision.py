"""Mixed precision: parameters are stored in master dtype and used in compute dtype, cast by the parameter hook."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xscale.nn.module import Module, substitute


def param_hook(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a hook from a stored parameter to this rank's local shard in `dtype`."""

    def use(parameter: Tensor) -> Tensor:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return local if local.dtype == dtype else local.to(dtype)

    return use


def apply(model: nn.Module, compute: torch.dtype, master: torch.dtype) -> None:
    """Substitute every module's parameter hook; modules that keep their precision, such as routers, use `master`."""
    compute_hook, master_hook = param_hook(compute), param_hook(master)
    for module in model.modules():
        if isinstance(module, Module):
            substitute(
                module, "param_hook", master_hook if module.keeps_precision else compute_hook
            )


def set_float32_matmul(precision: str) -> None:
    """Set how float32 matrices are multiplied, for the whole process: highest, high or medium, as torch names them."""
    torch.set_float32_matmul_precision(precision)


def cast_parameters(model: nn.Module, compute: torch.dtype, master: torch.dtype) -> None:
    """Store parameters in the dtype that they are used in, so that inference casts them once and not at each use.

    DTensors keep theirs.
    """
    for module in model.modules():
        keeps = isinstance(module, Module) and module.keeps_precision
        for parameter in module.parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(master if keeps else compute)
