"""Beltagy et al. 2020 (Longformer), section 3: a local pattern, and global tokens with projections of their own.

A global token attends to all tokens with the projections Q_g, K_g, V_g. Every other token attends to its local pattern
and to the global tokens with Q, K, V. Q_g, K_g and V_g begin as copies of Q, K and V.
"""

from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.attention.block_sparse import BlockSparse
from xscale.nn.attention.core import CoreSlot
from xscale.nn.attention.ops.dense import dense_attention
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import ACTS_INSIDE, CAUSAL_OR_BIDIRECTIONAL, MIXERS, RefusedPositions
from xscale.nn.pattern.global_blocks import GlobalBlocks
from xscale.nn.pattern.pattern import TokenIndex
from xscale.nn.pattern.union import UnionPattern
from xscale.nn.pattern.window import Band
from xscale.nn.tokens import Tokens


@MIXERS.register(
    "longformer",
    traits=replace(CAUSAL_OR_BIDIRECTIONAL, causal=False, decode=False),
    deviations=(
        "Global tokens have fixed indices; in the paper a question's tokens are global, however many there are.",
        "Q_g, K_g and V_g begin as copies at initialisation; in the paper as copies of the pre-trained Q, K and V.",
    ),
)
class LongformerAttention(Attention):
    class Config(Attention.Config):
        core: CoreSlot = BlockSparse.Config(pattern=Band.Config(left=256, right=256))
        """The core `block_sparse`, whose pattern is the local one; the global tokens are added to it."""
        global_token_indices: tuple[TokenIndex, ...] = Field(default=(0,), min_length=1)
        """Indices of the global tokens; those beyond the end of the sequence are ignored."""

    cores = ("block_sparse",)
    shards_sequence = False

    refused_positions = RefusedPositions(
        ACTS_INSIDE, "acts inside attention, and global tokens attend without one"
    )

    def __init__(self, config: Config, dims: Dims) -> None:
        assert isinstance(config.core, BlockSparse.Config)
        # The rows of the global tokens are replaced, so the pattern needs their columns only.
        columns = GlobalBlocks.Config(
            global_block_indices=(),
            global_token_indices=config.global_token_indices,
            horizontal_global=False,
        )
        pattern = UnionPattern.Config(patterns=(config.core.pattern, columns))
        core = config.core.model_copy(update={"pattern": pattern})
        super().__init__(config.model_copy(update={"core": core}), dims)
        self.global_token_indices = config.global_token_indices
        inner = config.heads * self.head_width
        self.global_q, self.global_k, self.global_v = (
            Linear(
                dims.width,
                inner,
                ("heads", "width"),
                replace(dims.init, copy_of=names),
                bias=config.bias,
            )
            for names in (("global_q", "q"), ("global_k", "k"), ("global_v", "v"))
        )

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(
            config.model_copy(update={"position": None}), replace(dims, position=None), path
        )
        problems += cls._check_position_acts(config, dims, path)
        plain = take("attention", key=f"{path}.kind")
        why = "is not defined for the projections of global tokens"
        problems += cls.check_projections(config, path, why, plain)
        if getattr(config.core, "sinks", False):
            what = "is not defined for the softmax of global tokens"
            problems.append(Problem(f"{path}.core.sinks", what, choices=take(False) + plain))
        if getattr(config.core, "soft_cap", None) is not None:
            what = "does not apply to the scores of global tokens"
            problems.append(Problem(f"{path}.core.soft_cap", what, choices=take(None) + plain))
        return problems

    def attend_input(
        self, x: Tensor, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> Tensor:
        """Attend to the local pattern and the global tokens; rows of global tokens attend to all with Q_g, K_g, V_g."""
        local = self.attend(q, k, v, mask)
        indices = [index for index in self.global_token_indices if index < x.shape[1]]
        if not indices:
            return local
        index = torch.tensor(indices, device=x.device)
        queries = self._heads(self.global_q(x[:, index]))  # [B, H, M, K]
        if self.query_factor is not None:
            queries = queries * self.query_factor
        hidden = None
        if mask.query_documents is not None:
            assert mask.key_documents is not None
            hidden = (mask.query_documents[:, index, None] != mask.key_documents[:, None])[
                :, None
            ]  # [B, 1, M, T]
        out = dense_attention(
            queries,
            self._heads(self.global_k(x)),
            self._heads(self.global_v(x)),
            hidden,
            lambda weights: self.core.drop_weights(weights, mask),
        )
        return local.index_copy(2, index, out.to(local.dtype))

    def multiply_adds(self, queries: int, keys: int) -> float:
        heads = self.query_channels // self.head_width
        count = sum(index < queries for index in self.global_token_indices)
        dense = 2.0 * heads * count * keys * self.head_width
        # Weights are counted once for each token, and Q_g multiplies global tokens only.
        skipped = (queries - count) * self.global_q.weight.numel()
        return super().multiply_adds(queries, keys) + dense - skipped
