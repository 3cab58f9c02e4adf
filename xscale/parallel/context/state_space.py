"""S4 over a sequence sharded over cp: each rank convolves its chunk by FFT, and the states at the chunks' ends are
scanned (Gu et al. 2022, eq. 3).

A rank starts from the state x before its chunk: x_r = Abar^P x_(r-1) + s_(r-1), with s the state that a chunk of P
tokens ends in from zeros. States are of fixed size, so traffic does not grow with the sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from xscale.mesh.collectives import gather_in
from xscale.nn.mixer.s4 import S4, Chunk, convolve
from xscale.nn.tokens import Tokens
from xscale.parallel.context.sequence_sharding import TokenShard


def traffic(mixer: S4, cp: int, tp: int, length: int) -> float:
    """Estimate the elements a rank sends in the forward of one sequence: its state, to each other rank."""
    channels, pairs = mixer.ssm.log_decay.shape
    return channels / tp * 2 * pairs * (cp - 1)


@dataclass(frozen=True)
class StateSpaceScan:
    """Substitute for `S4.convolve` over a sequence sharded over cp in adjacent chunks."""

    mixer: S4
    inner: Callable[[Tensor, Tokens], Tensor]
    """Convolves a sequence that is not sharded."""

    def __call__(self, u: Tensor, tokens: Tokens) -> Tensor:
        """[B, P, D] -> [B, P, D]."""
        if not isinstance(tokens, TokenShard):
            return self.inner(u, tokens)
        sharding = tokens.sharding
        assert not sharding.balanced, "a state is passed on to the next rank"
        self.mixer.check_length(tokens.length)
        chunk = Chunk(self.mixer.ssm, u.shape[1])
        ended = chunk.end_state(u).flatten(1)[:, None]  # [B, 1, D * N]
        every = gather_in(ended, sharding.count, sharding.group).view(len(u), sharding.count, u.shape[2], -1)
        # Every rank scans all states: what it does not use has a gradient of zeros, which the others wait for.
        before = [torch.zeros_like(every[:, 0])]
        for state in every.unbind(1)[:-1]:
            before.append(chunk.advance_state(before[-1]) + state)
        prior = torch.stack(before)[sharding.rank]
        return convolve(u, chunk.kernel()) + chunk.response(prior)
