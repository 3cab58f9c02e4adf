"""Exchange of channels for convolutions over the full sequence: an all-to-all trades sequence shards for channels.

The state space models of S4 are independent of each other, so a rank computes those of its channels over the full
sequence, as attention computes its heads with Ulysses, and a second all-to-all trades back.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from xscale.nn.mixer.s4 import S4
from xscale.nn.module import substitute
from xscale.nn.tokens import Tokens
from xscale.parallel.context.sequence_sharding import SequenceSharding, TokenShard
from xscale.parallel.context.ulysses import heads_to_sequence, sequence_to_heads


def unsupported_reason(mixer: S4, cp: int, tp: int) -> str | None:
    """Return why the channels cannot be sharded over cp; None when they can."""
    channels = mixer.ssm.skip.shape[0]
    return None if channels % (cp * tp) == 0 else f"cp x tp = {cp * tp} does not divide its {channels} channels"


def traffic(mixer: S4, cp: int, tp: int, length: int) -> float:
    """Estimate the elements a rank sends in the forward of one sequence: inputs and outputs, except its own."""
    return 2 * mixer.ssm.skip.shape[0] / tp * (length / cp) * (cp - 1) / cp


@dataclass
class ChannelExchange:
    """Substitute for `S4.convolve` over a sequence sharded over cp."""

    mixer: S4
    inner: Callable[[Tensor, Tokens], Tensor]
    """Convolves a sequence that is not sharded."""
    running: SequenceSharding | None = field(default=None, init=False)
    """Set while the convolution runs on this rank's shard of the channels."""

    def __post_init__(self) -> None:
        substitute(self.mixer.ssm, "param_hook", self._shard_channels())

    def __call__(self, u: Tensor, tokens: Tokens) -> Tensor:
        """[B, P, D] -> [B, P, D]."""
        if not isinstance(tokens, TokenShard):
            return self.inner(u, tokens)
        (full,) = sequence_to_heads(tokens.sharding, (u.mT[..., None],), tokens.length)  # [B, D/R, T, 1]
        self.running = tokens.sharding
        try:
            y = self.inner(full[..., 0].mT, tokens.full)  # [B, T, D/R]
        finally:
            self.running = None
        return heads_to_sequence(tokens.sharding, y.mT[..., None])[..., 0].mT

    def _shard_channels(self) -> Callable[[Tensor], Tensor]:
        """Return a parameter hook that slices this rank's channels, the first axis of all parameters."""
        inner = self.mixer.ssm.param_hook

        def hook(parameter: Tensor) -> Tensor:
            local = parameter if inner is None else inner(parameter)
            if self.running is None:
                return local
            size = len(local) // self.running.count
            return local.narrow(0, self.running.rank * size, size)

        return hook
