"""Bapna et al. 2018: transparent attention, in which each decoder block attends to its own mix of all encoder layers.

    H~_j = sum_i s_ij H_i,  s_j = softmax(W_j),  i = 0 ... N,  j = 1 ... M

H_0 [B, S, D] are the encoder's embeddings and H_i the hidden states after its block i; W [M, N + 1] is learned.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from xscale.core.requirements import KeyNeed
from xscale.nn.init import ZEROS
from xscale.nn.module import Module
from xscale.nn.random import reseed
from xscale.nn.roles import Role, Seams
from xscale.nn.tokens import Tokens


class LayerMix(Module):
    """A mix of the encoder's layers for each block of a decoder."""

    seams: ClassVar[Seams] = {"param_hook": Role.PARAMETERS_BETWEEN_REGIONS}
    weight: Parameter

    def __init__(self, states: int, blocks: int, dropout: float) -> None:
        """`states` is N + 1 and `blocks` M; `dropout` is that of the weights s."""
        super().__init__()
        self.dropout = dropout
        # All layers weigh the same at first.
        self.declare("weight", (blocks, states), ("state", "state"), ZEROS, decays=False)

    def needs(self) -> list[KeyNeed]:
        sent = "the decoder reads the outputs of all encoder blocks, and stages pass on that of the last one"
        return [KeyNeed("parallel.mesh.pp", (1,), sent, (("model.transparent", False),))]

    def forward(self, states: Tensor, tokens: Tokens) -> Tensor:
        """States [N + 1, B, S, D] -> the memory of each block [M, B, S, D]; `tokens` are those of the decoder."""
        weights = self.use(self.weight).softmax(-1)
        if self.training and tokens.forward.rng_seed is not None and self.dropout:
            reseed(tokens.forward.rng_seed, self.path)
            weights = self.random.dropout(weights, self.dropout, ("state", "state"))
        return torch.einsum("mn,nbsd->mbsd", weights.to(states.dtype), states)
