"""The last step: each rank gives its part of every parameter storage and draws it by name."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from xscale.nn.init import draw, replace_parameters
from xscale.nn.module import parameter_inits
from xscale.parallel.rest import place_in_whole


def materialize(model: nn.Module, seed: int, device: torch.device, master: torch.dtype) -> None:
    """Fill a model on meta, cut or not, with the start that (seed, name) gives: the same whole on every layout."""
    inits = {name: init for name, _, init in parameter_inits(model)}

    def make(name: str, parameter: nn.Parameter) -> nn.Parameter:
        shape, offset = place_in_whole(parameter)
        rows = range(offset[0], offset[0] + shape[0])
        value = draw(inits[name], tuple(parameter.shape), seed, name, rows)
        for dim in range(1, len(shape)):
            value = value.narrow(dim, offset[dim], shape[dim])
        value = value.to(device, master, copy=True).contiguous()
        if isinstance(parameter, DTensor):
            value = DTensor.from_local(
                value,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        return nn.Parameter(value, requires_grad=parameter.requires_grad)

    with torch.no_grad():
        replace_parameters(model, make)
        # fully_shard keeps its own record of each parameter and renews it whenever the module is "moved".
        model._apply(lambda value: value)  # type: ignore[no-untyped-call]
