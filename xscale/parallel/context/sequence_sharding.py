"""Sharding of a sequence over the ranks of cp, the shard of tokens that one of them has, and its draws."""

from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from xscale.mesh.collectives import pad_to_multiple
from xscale.mesh.differentiable_collectives import gather_in
from xscale.nn.signals import TARGETS, TOKENS
from xscale.nn.tokens import Tokens
from xscale.parallel.layout_invariant_random import ShardedRandomNumbers


@dataclass(frozen=True)
class SequenceSharding:
    """A sequence in twice as many chunks as there are ranks; each rank has two of them.

    Chunks are of equal length; a sequence that they do not divide is padded at its end.
    """

    group: dist.ProcessGroup
    balanced: bool = False
    """Zig-zag: rank r has the r-th chunk from the start and from the end, which balances causal attention; otherwise
    each rank has two adjacent chunks."""
    global_tokens: int = 0
    """Tokens that the model puts before the text, with which the sequence is sharded between embedding and head."""

    @property
    def count(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def chunk_length(self, length: int) -> int:
        """Return the number of tokens of a chunk."""
        return -(-length // (2 * self.count))

    def rank_chunks(self, rank: int) -> tuple[int, int]:
        """Return the two chunks of a rank, by their number in the sequence."""
        return (rank, 2 * self.count - 1 - rank) if self.balanced else (2 * rank, 2 * rank + 1)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the position [R, P] in the sequence of each token of each rank; `length` and above is padding."""
        chunks = torch.tensor(
            [self.rank_chunks(rank) for rank in range(self.count)], device=device
        )  # [R, 2]
        size = self.chunk_length(length)
        return (chunks[..., None] * size + torch.arange(size, device=device)).flatten(1)

    def gather_order(self, length: int, device: torch.device) -> Tensor:
        """Return the index [T] of each token of the sequence in the concatenation of the ranks' shards."""
        return self.positions(length, device).flatten().argsort()[:length]

    def shard(self, full: Tensor, fill: int = 0) -> Tensor:
        """Slice this rank's shard [B, P, ...] from a replicated [B, T, ...], padded with `fill`. Differentiable."""
        positions = self.positions(full.shape[1], full.device)[self.rank]
        local = pad_to_multiple(full, 1, 2 * self.count).index_select(1, positions)
        if fill:
            is_padding = (positions >= full.shape[1]).view(-1, *(1,) * (full.ndim - 2))
            local = local.masked_fill(is_padding, fill)
        return local

    def local_length(self, length: int) -> int:
        """Return the number of tokens of a rank's shard, with padding."""
        return 2 * self.chunk_length(length)

    def shard_predicted(self, full: Tensor, fill: int = 0) -> Tensor:
        """Slice from a replicated [B, T, ...] what is predicted at this rank's tokens between embedding and head; it is
        `fill` at global tokens and padding."""
        before = full.new_full((len(full), self.global_tokens, *full.shape[2:]), fill)
        return self.shard(torch.cat((before, full), 1) if self.global_tokens else full, fill)

    def gather(self, x: Tensor, length: int) -> Tensor:
        """All-gather shards [B, P, D] to [B, T, D]; backward reduce-scatters the gradient."""
        return gather_in(x, x.shape[1] * self.count, self.group).index_select(
            1, self.gather_order(length, x.device)
        )


@dataclass(frozen=True, kw_only=True)
class TokenShard(Tokens):
    """A rank's shard of a micro-batch's tokens. Every rank has ids, positions and documents of the full sequence."""

    full: Tokens
    sharding: SequenceSharding
    targets: Tensor | None = None
    """[B, T] targets of the full sequence, for what predicts tokens further ahead; None: not told."""

    @property
    def length(self) -> int:
        """T of the full sequence."""
        return self.full.ids.shape[1]

    def real(self) -> Tensor:
        """Whether each token [B, P] is one of the full sequence."""
        is_real = (self._places() < self.length).expand_as(self.ids)
        padding = self.any_padding()
        return is_real if padding is None else is_real & ~padding

    def text_of_shard(self) -> Tensor:
        places = self._places()
        return ((places >= self.global_tokens) & (places < self.length)).expand_as(self.ids)

    def _places(self) -> Tensor:
        """Index [P] of each token in the full sequence."""
        return self.sharding.positions(self.length, self.ids.device)[self.sharding.rank]

    def documents_of_sequence(self) -> Tensor | None:
        """Documents [B, T] of the full sequence."""
        return self.full.documents

    def with_global_tokens(self, count: int) -> "TokenShard":
        """Return this rank's shard of the sequence with `count` global tokens before it."""
        if not count:
            return self
        full = self.full.with_global_tokens(count)
        resharded = shard_tokens(full, self.sharding, self.targets)
        # The weights of losses, and what was set since the text was sharded, are this shard's.
        return replace(
            resharded, forward=self.forward, carried={**self.carried, **resharded.carried}
        )

    def fraction(self) -> float:
        """1 / the ranks of cp."""
        return 1 / self.sharding.count

    def count(self) -> float:
        """Tokens of the full sequences times `fraction`."""
        return self.full.count() * self.fraction()


def shard_tokens(
    tokens: Tokens, sharding: SequenceSharding, targets: Tensor | None = None
) -> TokenShard:
    """Slice this rank's shard of the tokens, whose `targets` are [B, T]."""
    local = _cut(tokens, sharding)
    # Values that blocks share are of a shard or of the full sequence.
    names = [attribute.name for attribute in fields(local) if attribute.name != "shared_values"]
    values = {name: getattr(local, name) for name in names}
    return TokenShard(**values, full=tokens, sharding=sharding, targets=targets)


def _cut(tokens: Tokens, sharding: SequenceSharding) -> Tokens:
    """Return the tokens with this rank's shard of each field along the sequence."""
    before = tokens.global_tokens
    # A shard has global tokens up to the head, where places of the text would no longer tell where it begins.
    shard_text = sharding.shard_predicted if before else sharding.shard
    local = tokens.map_fields(
        lambda value, about: sharding.shard(value, about.fill) if TOKENS in about.names else value
    )
    local = local.map_fields(lambda value, about: value + before if about.counts_tokens else value)
    return local.map_fields(
        lambda value, about: shard_text(value, about.fill) if TARGETS in about.names else value
    )


class TokensOverContext(ShardedRandomNumbers):
    """Draws over a sequence that is sharded over cp."""

    axis = "tokens"

    def global_size(self, local: int, tokens: Tokens | None) -> int:
        return tokens.length if isinstance(tokens, TokenShard) else local

    def full_tokens(self, tokens: Tokens | None) -> Tokens | None:
        return tokens.full if isinstance(tokens, TokenShard) else tokens

    def shard(self, full: Tensor, dim: int, local: int, tokens: Tokens | None) -> Tensor:
        assert isinstance(tokens, TokenShard)
        assert dim == 1, "a sequence is the second dim of [B, T, ...]"
        return tokens.sharding.shard(full)
