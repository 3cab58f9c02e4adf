"""A learned vector on the probability simplex: at least 0 everywhere, with sum 1.

Projected gradient: the optimizer moves the vector freely, and after each step it becomes the nearest point of the
simplex (Duchi et al. 2008, figure 1).
"""

import torch
from torch import Tensor
from torch.nn import Parameter

from xscale.core.requirements import KeyNeed
from xscale.nn.init import Init
from xscale.nn.module import Module
from xscale.nn.post_step import PostStepState, WeightWriter


class Simplex(Module, PostStepState):
    """The vector [N], which starts at 1/N everywhere."""

    weight: Parameter

    def __init__(self, size: int) -> None:
        super().__init__()
        self.declare("weight", (size,), ("state",), Init("constant", value=1 / size), decays=False)

    def needs(self) -> list[KeyNeed]:
        why = f"{self.path}.weight is projected onto the simplex after each step, and DeepSpeed keeps its own copy"
        return [
            KeyNeed(
                "parallel.zero.engine",
                ("torch",),
                why,
                (("model.stack.block.mixer.kind", "attention"),),
            )
        ]

    def forward(self) -> Tensor:
        """Return the vector [N]."""
        return self.use(self.weight)

    @torch.no_grad()
    def update_state(self, means: dict[str, Tensor], weights: WeightWriter) -> None:
        """Replace the vector by the nearest point of the simplex."""
        weights.write(self.weight, nearest_on_simplex(weights.read(self.weight)))


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
