"""Heads on a sequence that is sharded over cp: a token that a loss reads may be on another rank."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from xscale.mesh.differentiable_collectives import copy_in, sum_out
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.tokens import Tokens
from xscale.parallel.context.sequence_sharding import TokenShard, shard_tokens


@dataclass(frozen=True)
class SequenceOfShards:
    """Substitute for `full_sequence` of a boundary head: the tokens around a span may be on another rank."""

    inner: Callable[[Tensor, Tokens], tuple[Tensor, Tensor]]
    """That of an unsharded sequence."""

    def __call__(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Gather [B, P, D] to [B, T, D]; return it with the places of this rank's tokens [P]."""
        if not isinstance(tokens, TokenShard):
            return self.inner(x, tokens)
        sharding, length = tokens.sharding, tokens.length
        return sharding.gather(x, length), sharding.positions(length, x.device)[sharding.rank]


@dataclass(frozen=True)
class ChangedSequence:
    """Substitute for `of_full_sequence` of sequence pooling: a window may have tokens of two ranks, and the windows are
    sharded as the tokens were."""

    inner: Callable[[Any, Tokens, Any], tuple[Any, Tokens]]
    """That of an unsharded sequence."""

    def __call__(self, x: Tensor | None, tokens: Tokens, change: Any) -> tuple[Any, Tokens]:
        """Gather [B, P, D] to [B, T, D], of which `change` makes [B, T', D]; return this rank's shard of that."""
        if not isinstance(tokens, TokenShard):
            return self.inner(x, tokens, change)
        sharding = tokens.sharding
        full = None if x is None else sharding.gather(x, tokens.length)
        changed, about = self.inner(full, tokens.full, change)
        # The weights of losses are those of a shard.
        shard = replace(shard_tokens(about, sharding), forward=tokens.forward)
        return None if changed is None else sharding.shard(changed), shard


@dataclass(frozen=True)
class FirstStateOfShards:
    """Substitute for `first_state` of a sentence head: one rank has the token, and all get its state."""

    index: int
    """Index of the token in the sequence, after the global tokens."""
    inner: Callable[[Tensor, Tokens | None], Tensor]
    """That of an unsharded sequence."""

    def __call__(self, x: Tensor, tokens: Tokens | None) -> Tensor:
        """[B, P, D] -> [B, D], of which each rank has a part of the loss."""
        if not isinstance(tokens, TokenShard):
            return self.inner(x, tokens)
        sharding = tokens.sharding
        is_first = sharding.positions(tokens.length, x.device)[sharding.rank] == self.index  # [P]
        state = x.where(is_first[:, None], 0.0).sum(1)  # [B, D], 0 on the other ranks
        return copy_in(sum_out(state, sharding.group), sharding.group)


@dataclass(frozen=True)
class AheadOfShard:
    """Substitute for `ahead` of multi-token prediction: tokens of a shard are followed by those of other ranks.

    Every rank has the ids and the targets of the full sequence, so that nothing is sent.
    """

    inner: Callable[[Tokens, Tensor, int], tuple[Tensor, Tensor]]
    """That of an unsharded sequence."""

    def __call__(self, tokens: Tokens, targets: Tensor, places: int) -> tuple[Tensor, Tensor]:
        """Return ids and targets [B, P] of the tokens that stand `places` after those of the shard."""
        if not isinstance(tokens, TokenShard):
            return self.inner(tokens, targets, places)
        assert tokens.targets is not None, "a shard of a batch knows all its targets"
        ids, following = self.inner(tokens.full, tokens.targets, places)  # [B, T]
        return tokens.sharding.shard(ids), tokens.sharding.shard(following, fill=IGNORE_INDEX)


@dataclass(frozen=True)
class TargetsOfShard:
    """Substitute for `second_targets` of exits: every rank has the targets of the full sequence."""

    inner: Callable[[Tokens, Tensor], Tensor]
    """That of an unsharded sequence."""

    def __call__(self, tokens: Tokens, targets: Tensor) -> Tensor:
        """Return the targets [B, P] after those of the shard."""
        if not isinstance(tokens, TokenShard):
            return self.inner(tokens, targets)
        assert tokens.targets is not None, "a shard of a batch knows all its targets"
        return tokens.sharding.shard(self.inner(tokens.full, tokens.targets), fill=IGNORE_INDEX)
