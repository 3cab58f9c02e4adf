"""A learned vector on the probability simplex: at least 0 everywhere, with sum 1.

Projected gradient: the optimizer moves the vector freely, and after each step it becomes the nearest point of the
simplex (Duchi et al. 2008, figure 1).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from xscale.nn.init import Init
from xscale.nn.module import Module


class Simplex(Module):
    """The vector [N], which starts at 1/N everywhere."""

    weight: Parameter

    def __init__(self, size: int) -> None:
        super().__init__()
        self.declare("weight", (size,), ("state",), Init("constant", value=1 / size), decays=False)

    def forward(self) -> Tensor:
        """Return the vector [N]."""
        return self.use(self.weight)

    @torch.no_grad()
    def project(self, shard_like: Callable[[Tensor, Tensor], Tensor], gather_full: Callable[[Tensor], Tensor]) -> None:
        """Replace the vector by the nearest point of the simplex.

        `gather_full(parameter)` returns a parameter in full, and `shard_like(full, parameter)` shards it again.
        """
        self.weight.copy_(shard_like(nearest_on_simplex(gather_full(self.weight)), self.weight))


def nearest_on_simplex(x: Tensor) -> Tensor:
    """Return the point of the simplex with the least Euclidean distance to x [N]; x itself if it is on the simplex."""
    rounding = 4 * len(x) * torch.finfo(x.dtype).eps
    descending = x.sort(descending=True).values
    surplus = descending.cumsum(0) - 1
    counts = torch.arange(1, len(x) + 1, device=x.device, dtype=x.dtype)
    support = (descending * counts > surplus).sum().clamp(min=1)
    threshold = surplus[support - 1] / support
    is_inside = (x.min() >= 0) & ((x.sum() - 1).abs() <= rounding)
    return torch.where(is_inside, x, (x - threshold).clamp(min=0))
