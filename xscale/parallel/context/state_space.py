"""State space models and other recurrent mixers over a sequence sharded over cp: the ranks scan the states at the ends
of their shards.

S4: each rank convolves its chunk by FFT, and the states at the chunks' ends are scanned (Gu et al. 2022, eq. 3).

A rank starts from the state x before its chunk: x_r = Abar^P x_(r-1) + s_(r-1), with s the state that a chunk of P
tokens ends in from zeros. A recurrent mixer's shard takes the state S before it to A S + E
(`nn.attention.ops.recurrence`), with an A of its own, which goes to the other ranks with E. States are of fixed size,
so traffic does not grow with the sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xscale.mesh.differentiable_collectives import gather_in
from xscale.nn.attention.ops.recurrence import Recurrence, advance_state
from xscale.nn.mixer.s4 import convolve
from xscale.nn.tokens import Tokens
from xscale.parallel.context.sequence_sharding import TokenShard


def traffic(mixer: Any, cp: int, tp: int, length: int) -> float:
    """Estimate the elements a rank sends in the forward of one sequence: its state, to each other rank."""
    return float(mixer.state_elements / tp * (cp - 1))


@dataclass(frozen=True)
class StateSpaceScan:
    """Substitute for `S4.convolve` over a sequence sharded over cp in adjacent chunks."""

    mixer: Any
    inner: Callable[[Tensor, Tokens], Tensor]
    """Convolves a sequence that is not sharded."""

    def __call__(self, u: Tensor, tokens: Tokens) -> Tensor:
        """[B, P, D] -> [B, P, D]."""
        if not isinstance(tokens, TokenShard):
            return self.inner(u, tokens)
        sharding = tokens.sharding
        assert not sharding.balanced, "a state is passed on to the next rank"
        self.mixer.check_length(tokens.length)
        chunk = self.mixer.chunk(u.shape[1])
        ended = chunk.end_state(u).flatten(1)[:, None]  # [B, 1, D * N]
        every = gather_in(ended, sharding.count, sharding.group).view(
            len(u), sharding.count, u.shape[2], -1
        )
        # Every rank scans all states: what it does not use has a gradient of zeros, which the others wait for.
        before = [torch.zeros_like(every[:, 0])]
        for state in every.unbind(1)[:-1]:
            before.append(chunk.advance_state(before[-1]) + state)
        prior = torch.stack(before)[sharding.rank]
        out: Tensor = convolve(u, chunk.kernel()) + chunk.response(prior)
        return out


@dataclass(frozen=True)
class RecurrenceScan:
    """Substitute for `RecurrentMixer.scan` over a sequence sharded over cp in adjacent chunks."""

    inner: Callable[[Recurrence, Tokens], Tensor]
    """Computes the recurrence of a sequence that is not sharded."""

    def __call__(self, recurrence: Recurrence, tokens: Tokens) -> Tensor:
        """Compute outputs [B, H, P, K] of the recurrence of this rank's shard."""
        if not isinstance(tokens, TokenShard):
            return self.inner(recurrence, tokens)
        return recurrence.outputs_and_state(state_before_shard(recurrence, tokens))[0]


def state_before_shard(recurrence: Recurrence, tokens: TokenShard) -> Tensor:
    """Return the state [B, H, F, K] before the recurrence of this rank's shard, of its first token's document.

    Collective over cp: each rank sends how its shard takes a state on, `Recurrence.transition`.
    """
    sharding = tokens.sharding
    assert not sharding.balanced, "a state is passed on to the next rank"
    matrix, ended = recurrence.transition()
    size = matrix[0, 0].numel()
    sent = torch.cat((matrix.flatten(2), ended.flatten(2)), 2)  # [B, H, A + E]
    every = gather_in(sent.flatten(1)[:, None], sharding.count, sharding.group)
    every = every.view(len(ended), sharding.count, ended.shape[1], -1)  # [B, R, H, A + E]
    # Every rank scans all states: what it does not use has a gradient of zeros, which the others wait for.
    state = torch.zeros_like(ended)
    before = [state]
    for shard, received in enumerate(every.unbind(1)[:-1]):
        shard_matrix, shard_ended = received[..., :size].reshape(matrix.shape), received[..., size:]
        state = advance_state(shard_matrix, before[-1]) + shard_ended.reshape(ended.shape)
        before.append(state * _continues(tokens, shard + 1, state))
    return torch.stack(before)[sharding.rank]


def _continues(tokens: TokenShard, shard: int, like: Tensor) -> Tensor:
    """Return 1 for each sequence whose document continues from the shard before to this one, and 0 for the others:
    [B, 1, 1, 1]."""
    documents, size = tokens.full.documents, tokens.ids.shape[1]
    if documents is None:
        return like.new_ones(len(like), 1, 1, 1)
    first = min(shard * size, tokens.length - 1)
    return (documents[:, first] == documents[:, first - 1]).to(like.dtype)[:, None, None, None]
