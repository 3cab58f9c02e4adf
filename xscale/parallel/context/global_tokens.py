"""Global tokens before a sequence that is sharded over cp: the sequence with them is sharded anew after the embedding.

Each rank embeds the full sequence, of which it keeps its shard, so that the first ranks have the global tokens.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from xscale.nn.model.embed import Embed
from xscale.nn.tokens import Tokens
from xscale.parallel.context.sequence_sharding import SequenceSharding, TokenShard


class GlobalTokensOverContext:
    """Hooks of an embedding that puts global tokens before the text."""

    def __init__(self) -> None:
        self._sharding: SequenceSharding | None = None
        """Set during a forward of a shard."""

    def add_hooks(self, embed: Embed) -> None:
        """Let the embedding take a shard of the text [B, P], and return that of the sequence [B, P', D] with them."""
        embed.register_forward_pre_hook(self._enter)
        embed.register_forward_hook(self._leave)

    def _enter(self, _: Any, inputs: tuple[Tokens, ...]) -> tuple[Tokens]:
        (tokens,) = inputs
        if not isinstance(tokens, TokenShard):
            return (tokens,)
        self._sharding = tokens.sharding
        return (replace(tokens.full, forward=tokens.forward),)

    def _leave(self, _: Any, __: tuple[Any, ...], x: Tensor) -> Tensor:
        sharding, self._sharding = self._sharding, None
        return x if sharding is None else sharding.shard(x)


def gather_sequence(x: Tensor, tokens: Tokens) -> Tensor:
    """Gather hidden states [B, P, D] of a shard to [B, T, D], for a loss that each rank has a part of."""
    return tokens.sharding.gather(x, tokens.length) if isinstance(tokens, TokenShard) else x
