"""Guo et al. 2019 (low-rank and locality constrained self-attention): narrow heads for the sequence, a band nearby.

    low-rank heads  o_h = softmax(Q_h K_h^T / sqrt(r)) V_h,  Q_h, K_h [T, r], so that their scores have rank r or less
    local heads     o_h = attention within a band,           Q_h, K_h [T, K]

All heads' outputs are concatenated before the output projection. As in `split_heads`, whose cores they have, heads of
both groups take turns, and the rows of the projections of queries and keys go turn by turn: a rank of tensor
parallelism has whole turns, and so heads of both groups.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.core.choices import Choice
from xscale.core.config import FractionBelowOne, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import at_most, take
from xscale.nn.attention.block_sparse import BlockSparse
from xscale.nn.attention.core import CoreSlot
from xscale.nn.attention.softmax import Softmax
from xscale.nn.attention.split_heads import SplitHeads
from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import CAUSAL_OR_BIDIRECTIONAL, MIXERS, Mixer, RefusedPositions
from xscale.nn.norm.norm import Norm
from xscale.nn.pattern.window import Band
from xscale.nn.position.position import PositionSlot

BAND = BlockSparse.Config(pattern=Band.Config(left=31, right=31), block=16)


@MIXERS.register(
    "narrow_and_local",
    traits=CAUSAL_OR_BIDIRECTIONAL,
)
class NarrowAndLocal(Attention):
    class Config(Mixer.Config):
        heads: PositiveInt = 8
        """H, heads of both groups together."""
        narrow_width: PositiveInt = 8
        """r, width of the queries and keys of a low-rank head, less than head_width; its values have head_width."""
        shares: tuple[PositiveInt, PositiveInt] = (1, 1)
        """Shares of the low-rank and of the local heads: (1, 3) makes a quarter of the heads low-rank."""
        local: CoreSlot = BAND
        """The core of the local heads."""
        head_width: PositiveInt | None = None
        """K, width of a local head's queries and keys, and of all values; null: width / heads."""
        bias: bool = False
        """Whether the projections have biases."""
        position: PositionSlot | None = None
        """Position encoding that adds a bias to the scores of all heads; null: the model's."""
        dropout: FractionBelowOne = 0.0
        """Dropout probability of the attention weights."""

        @property
        def core(self) -> SplitHeads.Config:
            """The cores of the two groups."""
            return SplitHeads.Config(cores=(Softmax.Config(), self.local), shares=self.shares)

        @property
        def shared_qk(self) -> bool:
            """Queries and keys have projections of their own, whatever the local core's paper has."""
            return False

    core: SplitHeads
    cores = None

    refused_positions = RefusedPositions(
        ("qk", "scores"), "acts on queries or keys of one width, and these heads have two"
    )

    def __init__(self, config: Config, dims: Dims) -> None:
        super(Attention, self).__init__()
        heads = config.heads
        self.head_width = config.head_width or dims.width // heads
        self.narrow_width = config.narrow_width
        self.cross = False
        self.causal = dims.causal
        self.dropout = config.dropout
        self.core = SplitHeads(config.core, dims, heads, self.head_width)
        self.core.widths = (self.narrow_width, self.head_width)
        self.core_separates_documents = self.core.traits.documents
        self.shared_qk, self.qk_norm_over, self.q_norm, self.k_norm = False, "head", None, None
        self.query_factor, self.position, self.uses_relative_bias = None, None, False
        inner = heads // self.core.head_period * self.turn_rows
        for name, rows in (("q", inner), ("k", inner), ("v", heads * self.head_width)):
            setattr(
                self,
                name,
                Linear.from_width(dims, rows, "heads", bias=config.bias),
            )
        outer = heads * self.head_width
        self.o = Linear.to_width(dims, outer, "heads", bias=config.bias)
        self.build_position(config.position or dims.position, dims, heads, self.head_width)

    @classmethod
    def example(cls) -> Config:
        return cls.Config(heads=4, narrow_width=3)

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        width = config.head_width or dims.width // config.heads
        if config.narrow_width >= width:
            what = (
                f"narrow_width={config.narrow_width} is not low: "
                f"the local heads have queries and keys of width {width}"
            )
            plain = take("attention", key=f"{path}.kind")
            if width > 1:
                problems.append(at_most(f"{path}.narrow_width", what, width - 1, *plain))
            else:
                wider = take(config.narrow_width + 1, key=f"{path}.head_width")
                problems.append(Problem(f"{path}.narrow_width", what, choices=wider + plain))
        return problems

    @classmethod
    def _check_core(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        position = config.position or dims.position
        if position is not None and cls.why_not_position(position) is not None:
            # It is refused by itself, whatever the cores can do.
            return []
        names = {f"{path}.core.cores.1": f"{path}.local", f"{path}.core.shares": f"{path}.shares"}

        def renamed(key: str) -> str:
            old = next((name for name in names if key.startswith(name)), "")
            return names.get(old, "") + key[len(old) :]

        return [
            replace(
                problem,
                path=renamed(problem.path),
                choices=tuple(
                    Choice(tuple((renamed(key), value) for key, value in choice.edits))
                    for choice in problem.choices
                ),
            )
            for problem in super()._check_core(config, dims, path)
        ]

    @property
    def turn_rows(self) -> int:
        """Rows of the projections of queries and keys for one turn of heads."""
        return sum(
            share * width for share, width in zip(self.core.shares, self.core.widths, strict=True)
        )

    @property
    def query_channels(self) -> int:
        return self.q.weight.shape[0] // self.turn_rows * self.core.head_period * self.head_width

    @property
    def key_channels(self) -> int:
        return self.query_channels

    def _normalised(self, norm: Norm | None, x: Tensor) -> Tensor:
        """Queries or keys [B, T, N] -> [B, H, T, K]; those of low-rank heads end in zeros, which no core reads."""
        groups, first = [], 0
        turns = x.reshape(*x.shape[:-1], -1, self.turn_rows)  # [B, T, turns, rows]
        for share, width in zip(self.core.shares, self.core.widths, strict=True):
            group = turns.narrow(-1, first, share * width).reshape(*turns.shape[:3], share, width)
            groups.append(F.pad(group, (0, self.head_width - width)))  # [B, T, turns, share, K]
            first += share * width
        return torch.cat(groups, 3).flatten(2, 3).transpose(1, 2)  # [B, H, T, K]
