"""Mixers that run on the full sequence, gathered on every rank of cp, of which a rank keeps its shard of the output.

This is for mixers and cores without a style of their own. Each rank computes the whole mixer, so cp saves neither time
nor memory in it, and does so in the rest of the block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from xscale.nn.mixer.mixer import Mixer
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens
from xscale.parallel.context.sequence_sharding import TokenShard
from xscale.parallel.roles import seams_in


@dataclass(frozen=True)
class GatheredSequence:
    """Substitute at a seam with the role SEQUENCE_MIXING."""

    inner: Callable[..., Tensor]
    """Runs the mixer on a full sequence."""

    def __call__(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None, source: Tokens | None, *, edge: Any
    ) -> Tensor:
        """[B, P, D] -> [B, P, D]; the other sequence, `memory`, is a shard too."""
        if not isinstance(tokens, TokenShard):
            return self.inner(x, tokens, memory, source, edge=edge)
        sharding = tokens.sharding
        if memory is not None:
            assert isinstance(source, TokenShard), "both sequences are sharded"
            memory, source = sharding.gather(memory, source.length), source.full
        full, weight = tokens.full, tokens.forward.aux_loss_weight
        if weight is not None:
            # Every rank has the auxiliary loss of the full sequence, and gradients are summed over ranks.
            full = full.with_forward(aux_loss_weight=weight / sharding.count)
        y = self.inner(sharding.gather(x, tokens.length), full, memory, source, edge=edge)
        return sharding.shard(y)


def gathered_sublayers(model: nn.Module, has_style: Callable[[Mixer], bool]) -> list[Any]:
    """List the sublayers whose mixer is, or is made of, a mixer without a style."""
    sublayers = [module for module, *_ in seams_in(model.modules(), Role.SEQUENCE_MIXING)]
    return [sublayer for sublayer in sublayers if not all(map(has_style, mixers_of(sublayer)))]


def mixers_of(sublayer: Any) -> list[Mixer]:
    """List a sublayer's mixer and those that it is made of."""
    return [module for module in sublayer.part.modules() if isinstance(module, Mixer)]


def traffic(sublayer: Any, cp: int, length: int) -> float:
    """Estimate the elements a rank sends in the forward of one sequence: its shard of the input, to all others."""
    return float(sublayer.width * (length / cp) * (cp - 1))
