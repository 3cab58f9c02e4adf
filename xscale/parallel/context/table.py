"""Table `CONTEXT`: what context parallelism does at a seam, by its role.

Each rank has a shard of every sequence, so what is a function of one token needs nothing; what reads other tokens is
given them, or the sum that it makes of them; and random numbers are those of this rank's tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from xscale.nn.module import substitute
from xscale.nn.roles import Role
from xscale.parallel.batch_statistics import SumOverGroup
from xscale.parallel.config import ParallelConfig
from xscale.parallel.context.global_tokens import EmbedGlobalTokens
from xscale.parallel.context.heads import (
    AheadOfShard,
    ChangedSequence,
    FirstStateOfShards,
    SequenceOfShards,
    TargetsOfShard,
)
from xscale.parallel.context.mask import ShardedMaskBuilder
from xscale.parallel.context.moe import GlobalRouting
from xscale.parallel.context.neighbours import NeighbourExchange
from xscale.parallel.context.sequence_sharding import TokensOverContext
from xscale.parallel.context.state_space import RecurrenceScan, StateSpaceScan
from xscale.parallel.context.styles import STYLES, style_of
from xscale.parallel.context.ulysses import UlyssesOfReusedScores
from xscale.parallel.layout_invariant_random import draw_for_all_heads
from xscale.parallel.roles import RoleTable


@dataclass(frozen=True)
class ContextRanks:
    """Ranks and settings that the entries of the table are given."""

    group: dist.ProcessGroup
    """The ranks of cp."""
    config: ParallelConfig


def _attention(attention: Any, seam: str, ranks: ContextRanks) -> None:
    """Runs the core in one of four styles: Ulysses, a ring, a halo, or a scan of its state."""
    style = style_of(attention, ranks.config)
    assert isinstance(style, str), "`check` comes first"
    substitute(attention, seam, STYLES[style][1](attention.core))
    if style == "ulysses":
        draw_for_all_heads(attention)


def _reused_attention(mixer: Any, seam: str, ranks: ContextRanks) -> None:
    """Trades shards of the sequence for heads, where the scores of the layer before are."""
    substitute(mixer, seam, UlyssesOfReusedScores(mixer, getattr(mixer, seam)))
    draw_for_all_heads(mixer)


def _embedding(embed: Any, seam: str, ranks: ContextRanks) -> None:
    """Embeds the full sequence if there are global tokens before it, and keeps this rank's shard."""
    if embed.globals:
        substitute(embed, seam, EmbedGlobalTokens(getattr(embed, seam)))


def _global_tokens(head: nn.Module, seam: str, ranks: ContextRanks) -> None:
    """Nothing is predicted at a global token: see `SequenceSharding.shard_predicted`."""
    substitute(head, seam, 0)


def _first_token(head: Any, seam: str, ranks: ContextRanks) -> None:
    """One rank has the token, and all get its state."""
    substitute(head, seam, FirstStateOfShards(head.globals, getattr(head, seam)))


def _loss_fraction(module: nn.Module, seam: str, ranks: ContextRanks) -> None:
    """Each rank computes the full loss, and the gradients of the shards are summed."""
    substitute(module, seam, getattr(module, seam) / ranks.group.size())


def _sum_over_tokens(module: nn.Module, seam: str, ranks: ContextRanks) -> None:
    """All-reduces the sums; each rank has a part of the loss, so the gradient is all-reduced too."""
    substitute(module, seam, SumOverGroup(ranks.group))


def _wrap(wrapper: Any, *, with_module: bool = False) -> Any:
    """Return an entry that substitutes `wrapper(what is there)`, or with its module first."""

    def wrap(module: nn.Module, seam: str, ranks: ContextRanks) -> None:
        inner = getattr(module, seam)
        substitute(module, seam, wrapper(module, inner) if with_module else wrapper(inner))

    wrap.__doc__ = wrapper.__doc__
    return wrap


CONTEXT: RoleTable = {
    Role.DRAWS: _wrap(TokensOverContext),
    Role.DRAWS_BETWEEN_REGIONS: _wrap(TokensOverContext),
    Role.EMBEDDING: _embedding,
    Role.GLOBAL_TOKENS: _global_tokens,
    Role.ATTENTION: _attention,
    Role.ATTENTION_MASK: _wrap(ShardedMaskBuilder, with_module=True),
    Role.REUSED_ATTENTION: _reused_attention,
    Role.SCAN: _wrap(RecurrenceScan),
    Role.CONVOLUTION: _wrap(StateSpaceScan, with_module=True),
    Role.NEIGHBOURS: _wrap(NeighbourExchange, with_module=True),
    Role.FULL_SEQUENCE: _wrap(SequenceOfShards),
    Role.CHANGED_SEQUENCE: _wrap(ChangedSequence),
    Role.FIRST_TOKEN: _first_token,
    Role.LOSS_FRACTION: _loss_fraction,
    Role.SUM_OVER_TOKENS: _sum_over_tokens,
    Role.TOKENS_AHEAD: _wrap(AheadOfShard),
    Role.TARGETS_AHEAD: _wrap(TargetsOfShard),
    Role.ROUTING: _wrap(GlobalRouting),
}
"""Role -> what is done at a seam with it, called as (module, seam, `ContextRanks`)."""
