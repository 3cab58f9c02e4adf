"""Ahmed et al. 2017 (Weighted Transformer), section 3: each head is a branch with a feed-forward layer of its own.

    y = sum_i alpha_i FFN_i(kappa_i head_i W_i^O),  sum_i kappa_i = sum_i alpha_i = 1,  kappa_i, alpha_i >= 0

FFN_i(x) = max(0, x W_1,i + b_1,i) W_2,i + b_2,i. The block has no further feed-forward part (`ffn: none`). After each
optimizer step kappa and alpha are projected onto the simplex.
"""

from dataclasses import replace

from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import Activation, activation
from xscale.nn.init import ZEROS, Init
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import CAUSAL_OR_BIDIRECTIONAL, MIXERS
from xscale.nn.module import Module
from xscale.nn.simplex import Simplex


class HeadOutputs(Module):
    """The output projections W_i^O, one of each head."""

    weight: Parameter

    def __init__(self, inner: int, width: int, init: Init) -> None:
        super().__init__()
        self.declare("weight", (width, inner), ("width", "heads"), init, linear_map=True)

    def forward(self, o: Tensor) -> Tensor:
        """Heads [B, H, T, K] -> branches [H, B * T, D]."""
        heads = o.transpose(0, 1).flatten(1, 2)  # [H, B * T, K]
        weight = self.use(self.weight)
        return heads @ weight.view(len(weight), len(heads), -1).permute(1, 2, 0)


class BranchFfns(Module):
    """A feed-forward layer for each branch, all in batched matmuls."""

    up: Parameter
    down: Parameter

    def __init__(self, config: "BranchedAttention.Config", dims: Dims) -> None:
        super().__init__()
        branches, hidden = config.heads, config.hidden or max(1, 4 * dims.width // config.heads)
        self.activation = activation(config.activation)
        self.declare(
            "up",
            (branches, hidden, dims.width),
            ("heads", "state", "width"),
            dims.init,
            linear_map=True,
        )
        down = (branches, dims.width, hidden)
        self.declare("down", down, ("heads", "width", "state"), dims.residual_init, linear_map=True)
        self.up_bias: Tensor | None
        self.down_bias: Tensor | None
        if config.ffn_bias:
            self.declare("up_bias", (branches, hidden), ("heads", "state"), ZEROS, decays=False)
            self.declare(
                "down_bias", (branches, dims.width), ("heads", "width"), ZEROS, decays=False
            )
        else:
            self.register_parameter("up_bias", None)
            self.register_parameter("down_bias", None)

    def forward(self, x: Tensor, alpha: Tensor) -> Tensor:
        """Return the sum over the branches x [H, N, D], weighted by alpha [H]: [N, D]."""
        hidden = x @ self.use(self.up).mT  # [H, N, F]
        if self.up_bias is not None:
            hidden = hidden + self.use(self.up_bias)[:, None]
        # The sum over branches is one product with all their hidden units, which alpha scales.
        hidden = alpha[:, None, None] * self.activation(hidden)
        y = hidden.transpose(0, 1).flatten(1) @ self.use(self.down).mT.flatten(0, 1)  # [N, D]
        return y if self.down_bias is None else y + alpha @ self.use(self.down_bias)


@MIXERS.register(
    "branched_attention",
    traits=replace(CAUSAL_OR_BIDIRECTIONAL, cross=True),
    deviations=(
        "kappa and alpha have the schedule of the other parameters up to a factor (`optimizer.groups`), which can also "
        "freeze them in the last steps, as the paper does; the paper's have a warm-up of their own.",
    ),
)
class BranchedAttention(Attention):
    class Config(Attention.Config):
        hidden: PositiveInt | None = None
        """F, hidden units of each branch; null: 4 width / heads, so that all have together as many as a usual ffn."""
        activation: Activation = "relu"
        """The nonlinearity of the branches' feed-forward layers."""
        ffn_bias: bool = True
        """Whether the branches' feed-forward layers have biases."""

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        # It has Linear's parameter, and branches in its output in place of their sum.
        self.o = HeadOutputs(config.heads * self.head_width, dims.width, dims.init)  # type: ignore[assignment]
        self.kappa, self.alpha = Simplex(config.heads), Simplex(config.heads)
        self.branches = BranchFfns(config, dims)

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        if config.output_bias:
            what = "a head's output enters its branch without a bias"
            choices = take(False, None) + take("attention", key=f"{path}.kind")
            problems.append(Problem(f"{path}.output_bias", what, choices=choices))
        return problems

    def project_output(self, o: Tensor) -> Tensor:
        (batch, local, length, _), first = o.shape, self.core.first_head
        kappa, alpha = (
            weights().narrow(0, first, local).to(o.dtype) for weights in (self.kappa, self.alpha)
        )
        x = self.o(kappa[:, None, None] * o)  # [H, B * T, D]
        y: Tensor = self.branches(x, alpha)
        return y.view(batch, length, -1)
