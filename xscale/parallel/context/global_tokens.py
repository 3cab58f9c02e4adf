"""Global tokens before a sequence that is sharded over cp: the sequence with them is sharded anew after the embedding.

Each rank embeds the full sequence, of which it keeps its shard, so that the first ranks have the global tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from xscale.nn.tokens import Tokens
from xscale.parallel.context.sequence_sharding import TokenShard


@dataclass(frozen=True)
class EmbedGlobalTokens:
    """Substitute for an embedding that puts global tokens before the text."""

    inner: Callable[[Tokens], Tensor]
    """Embeds the full sequence."""

    def __call__(self, tokens: Tokens) -> Tensor:
        """A shard of the text [B, P] -> that of the sequence with the global tokens [B, P', D]."""
        if not isinstance(tokens, TokenShard):
            return self.inner(tokens)
        return tokens.sharding.shard(self.inner(replace(tokens.full, forward=tokens.forward)))
