"""Zhang and Sennrich 2019: division by the root mean square over the width, no centring."""

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.nn.init import ONES
from xscale.nn.norm import NORMS, Norm, NormTraits


@NORMS.register("rms", traits=NormTraits(per_token=True, centred=False))
class Rms(Norm):
    weight: Parameter

    class Config(Norm.Config):
        eps: float = 1e-6
        """Added to the mean square."""

    def __init__(self, config: Config, width: int) -> None:
        super().__init__()
        self.eps = config.eps
        self.declare("weight", (width,), ("width",), ONES)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.use(self.weight), self.eps)
