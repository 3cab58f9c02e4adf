"""State that moves after each optimizer step without a gradient: biases, centroids, statistics, projected vectors.

It is stored as parameters, so that it is initialised, sharded and saved like others. `WeightWriter` is how code other
than the optimizer writes parameters.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class WeightWriter:
    """Reads and writes the parameters of a model that is not sharded.

    `xscale.parallel.shard.full_tensors.ShardedWeightWriter` does so for a sharded one. Code that changes a parameter in
    another way may change a gathered copy of it, which is thrown away.
    """

    def read(self, parameter: Tensor) -> Tensor:
        """Return the parameter in full, without a gradient. Collective where it is sharded."""
        return parameter.detach()

    def write(self, parameter: Tensor, full: Tensor) -> None:
        """Replace the parameter by `full`, of its full shape, cast to its dtype."""
        self.update(parameter, lambda _, value: value, full)

    @torch.no_grad()
    def update(self, parameter: Tensor, function: Callable[..., Tensor], *full: Tensor) -> None:
        """Replace the parameter by `function(parameter, *full)`, which is elementwise.

        The tensors in `full` have its full shape; `function` gets them in its dtype, on its device and in its layout.
        """
        values = [
            self.shard_like(value.to(parameter.device, parameter.dtype), parameter)
            for value in full
        ]
        parameter.copy_(function(parameter.detach(), *values))

    def shard_like(self, full: Tensor, parameter: Tensor) -> Tensor:
        """Return a full tensor in the layout of the parameter."""
        return full


class PostStepState:
    """A module, or a piece of one, with state that moves after each optimizer step."""

    def update_state(self, means: dict[str, Tensor], weights: WeightWriter) -> None:
        """Move the state by `means`, the statistics of the whole step over all ranks, the same on every rank.

        `weights` writes the parameters that hold it.
        """


@torch.no_grad()
def update_non_gradient_state(
    model: nn.Module, means: dict[str, Tensor], weights: WeightWriter | None = None
) -> None:
    """Call `update_state` of all modules that have some, after an optimizer step.

    `means` are the statistics of the whole optimizer step over all ranks, the same on every rank. `weights` writes
    parameters; None: the model is not sharded.
    """
    weights = WeightWriter() if weights is None else weights
    for module in model.modules():
        if isinstance(module, PostStepState):
            module.update_state(means, weights)
