"""Exponential moving average of the weights (Polyak and Juditsky 1992): each rank averages its own shards."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from xscale.parallel.shard.full_tensors import ShardedWeightWriter
from xscale.parallel.shard.sharded import ShardedParameter
from xscale_kernels.torch_private import foreach_lerp_

PREFIX = "ema."
"""Begins the name of an average in a checkpoint; the parameter's name follows."""


@dataclass
class ExponentialMovingAverage:
    """Averages of the trained parameters, in their master dtype and with their shards.

    Parameters that no gradient reaches, such as frozen ones or a router's balancing bias, have no average.
    """

    model: nn.Module
    parameters: Sequence[ShardedParameter]
    decay: float
    averages: list[Tensor] = field(init=False)
    """Average of each parameter: this rank's shard."""

    def __post_init__(self) -> None:
        self.averages = [parameter.local.clone() for parameter in self.parameters]

    @torch.no_grad()
    def reset(self) -> None:
        """Copy the weights into the averages."""
        for average, parameter in zip(self.averages, self.parameters, strict=True):
            average.copy_(parameter.local)

    @torch.no_grad()
    def update(self) -> None:
        """Set each average to decay * average + (1 - decay) * weight."""
        if self.averages:
            foreach_lerp_(
                self.averages, [parameter.local for parameter in self.parameters], 1 - self.decay
            )

    @contextmanager
    def replacing_weights(self) -> Iterator[None]:
        """Let the model compute with the averages in the body, and put the weights back after it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the averages as a checkpoint stores and fills them, by name and with their global shapes."""
        return {
            f"{PREFIX}{parameter.name}": parameter.from_local_like(average)
            for parameter, average in zip(self.parameters, self.averages, strict=True)
        }

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange weights and averages in place, one tensor at a time."""
        weights = ShardedWeightWriter(self.model)
        for average, parameter in zip(self.averages, self.parameters, strict=True):
            before = parameter.local.clone()
            weights.write_shard(parameter.parameter, average)
            average.copy_(before)
