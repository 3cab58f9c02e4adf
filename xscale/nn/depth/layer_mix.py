"""Bapna et al. 2018: transparent attention, in which each decoder block attends to its own mix of all encoder layers.

    H~_j = sum_i s_ij H_i,  s_j = softmax(W_j),  i = 0 ... N,  j = 1 ... M

H_0 [B, S, D] are the encoder's embeddings and H_i the hidden states after its block i; W [M, N + 1] is learned.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from xscale.core.requirements import KeyNeed
from xscale.nn.depth.depth_pass import DepthPass, DepthState, StackUse
from xscale.nn.dims import Dims
from xscale.nn.init import ZEROS
from xscale.nn.random import reseed
from xscale.nn.roles import Role, Seams
from xscale.nn.tokens import Tokens


class ReturnedStates(DepthPass):
    """Returns the hidden states before and after all blocks, [depth + 1, B, T, D], in place of the last ones."""

    key = "returned_states"

    @classmethod
    def build(cls, config: Any, dims: Dims, use: StackUse, blocks: Mapping[str, nn.Module]) -> "ReturnedStates | None":
        return cls() if use.returns_states else None

    def start(self, state: DepthState) -> None:
        state.kept[self.key] = [state.x]

    def after_block(self, state: DepthState) -> None:
        state.kept[self.key].append(state.x)

    def finish(self, state: DepthState) -> None:
        state.x = torch.stack(state.kept[self.key])  # [depth + 1, B, T, D]


class LayerMix(DepthPass):
    """A mix of the encoder's layers for each block of a decoder."""

    key = "mix"
    seams: ClassVar[Seams] = {"param_hook": Role.PARAMETERS_BETWEEN_REGIONS}
    weight: Parameter

    def __init__(self, states: int, blocks: int, dropout: float) -> None:
        """`states` is N + 1 and `blocks` M; `dropout` is that of the weights s."""
        super().__init__()
        self.dropout = dropout
        # All layers weigh the same at first.
        self.declare("weight", (blocks, states), ("state", "state"), ZEROS, decays=False)

    @classmethod
    def build(cls, config: Any, dims: Dims, use: StackUse, blocks: Mapping[str, nn.Module]) -> Any:
        """Return the mix that the model has made, which knows both stacks."""
        return use.mix

    def start(self, state: DepthState) -> None:
        if state.memory is not None:
            state.kept[self.key] = self(state.memory, state.tokens)

    def before_block(self, state: DepthState) -> None:
        if self.key in state.kept:
            state.memory = state.kept[self.key][state.layer]

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
