"""Jaszczur et al. 2021, section 3.1: a feed-forward layer of which a controller picks one hidden unit in each block.

    Controller(x) = one_hot(argmax(reshape(x C_1 C_2, (F / N, N))))
    y = (max(0, x W_1 + b_1) * Controller(x)) W_2 + b_2

In training the argmax is softened by Gumbel noise g (Jang et al. 2017): the mask is m = softmax((x C_1 C_2 + g) / tau)
of each block, or, for a share of the micro-batches, the one-hot argmax of m with the gradient of m (straight-through).
The products are dense there. In generation, where a forward has few tokens, only the rows of W_1 and the columns of W_2
that the controller picks are read: 1 / N of them for each token.
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xscale.core.config import Fraction, PositiveFloat, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import divisors, must_divide, take
from xscale.nn.attention.ops.dense import upcast
from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import FFNS, Ffn, FfnTraits
from xscale.nn.linear import Linear
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens

DRAWN_OF = 1 << 53
"""A micro-batch is hard if an integer below this falls under its share of it."""


@FFNS.register(
    "sparse",
    traits=FfnTraits(per_token=True, sparse=True),
    deviations=(
        "The soft mask is the Gumbel-softmax itself; the authors' code adds the noise, times 0.1, to the argmax alone.",
    ),
)
class SparseFfn(Ffn):
    seams = {"first_hidden": Role.FIRST_HIDDEN}

    class Config(Ffn.Config):
        hidden: PositiveInt | None = None
        """F, hidden units; null: four times the model's width."""
        block_size: int = Field(default=16, ge=2)
        """N, hidden units in a block, one of which a token uses (the paper: 64)."""
        controller_width: PositiveInt | None = None
        """Width between the controller's two maps C_1 and C_2; null: width / block_size, as the paper."""
        temperature: PositiveFloat = 1.0
        """tau of the Gumbel-softmax in training."""
        hard_fraction: Fraction = 0.3
        """Share of the micro-batches in training whose masks are one-hot, with straight-through gradients."""
        bias: bool = True
        """Whether W_1 and W_2 have the biases b_1 and b_2, as in the paper."""

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        self.first_hidden = 0
        """Index in the model of the first local hidden unit: set when they are sharded over ranks."""
        self.block_size, self.temperature = config.block_size, config.temperature
        self.hard_fraction = config.hard_fraction
        hidden = config.hidden or 4 * dims.width
        self.blocks = hidden // config.block_size
        """F / N, of all ranks."""
        controller = config.controller_width or max(1, dims.width // config.block_size)
        self.up = Linear.from_width(dims, hidden, "ffn", bias=config.bias)
        self.down = Linear.to_width(dims, hidden, "ffn", bias=config.bias)
        self.reduce = Linear.from_width(dims, controller, "state")
        self.control = Linear(controller, hidden, ("ffn", "state"), dims.init)
        # Generation reads single rows of it.
        self.up.read_by_rows = True

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        hidden, block = config.hidden or 4 * dims.width, config.block_size
        wider = take(-(-hidden // block) * block, key=f"{path}.hidden")
        return must_divide(path, "block_size", block, "the {} hidden units", hidden, *wider)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        logits = self.control(self.reduce(x)).unflatten(
            -1, (-1, self.block_size)
        )  # [B, T, F / N, N]
        if self.training and tokens.forward.rng_seed is not None:
            mask = self.soft_mask(logits, tokens)
        elif tokens.forward.cache is not None and x.shape[0] * x.shape[1] < self.block_size:
            return self.read_chosen(x, logits.argmax(-1))
        else:
            mask = F.one_hot(logits.argmax(-1), self.block_size)
        y: Tensor = self.down(F.relu(self.up(x)) * mask.flatten(-2).to(x.dtype))
        return y

    def tp_problems(self, tp: int, path: str) -> list[Problem]:
        if self.blocks % tp == 0:
            return []
        what = f"tp={tp} does not divide the {self.blocks} blocks of hidden units of ffn 'sparse'"
        return [Problem(path, what, choices=divisors(self.blocks))]

    @property
    def hidden_units(self) -> int:
        """F, of all ranks."""
        return self.blocks * self.block_size

    def soft_mask(self, logits: Tensor, tokens: Tokens) -> Tensor:
        """Gumbel-softmax over the units of each block, or its one-hot argmax: logits [B, T, F / N, N] -> the same."""
        flat = upcast(logits).flatten(-2)  # [B, T, F]
        noisy = (flat + self.random.gumbel(flat, ("batch", "tokens", "ffn"), tokens)).view(
            logits.shape
        )
        soft = (noisy / self.temperature).softmax(-1)
        # The difference first, which is exactly 0.
        hard = F.one_hot(soft.argmax(-1), soft.shape[-1]) + (soft - soft.detach())
        # Drawn on the device: the host need not wait for it.
        is_hard = self.random.integer(DRAWN_OF, soft.device) < round(self.hard_fraction * DRAWN_OF)
        return torch.where(is_hard, hard, soft)

    def read_chosen(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Compute y [B, T, D] of x [B, T, D] from the chosen units alone, of each block the one at `chosen`
        [B, T, F / N]: their rows of W_1 and columns of W_2."""
        first = torch.arange(
            0, chosen.shape[-1] * self.block_size, self.block_size, device=x.device
        )
        units = (first + chosen).flatten(0, 1)  # [B * T, F / N]
        rows, columns = self.up.use(self.up.weight), self.down.use(self.down.weight).mT  # [F, D]
        hidden = torch.einsum("nd,nud->nu", x.flatten(0, 1), rows[units])
        if self.up.bias is not None:
            hidden = hidden + self.up.use(self.up.bias)[units]
        y = torch.einsum("nu,nud->nd", F.relu(hidden), columns[units])
        if self.down.bias is not None:
            y = y + self.down.use(self.down.bias)
        return y.view(x.shape)
