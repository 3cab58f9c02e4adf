"""Bapna et al. 2018: transparent attention, in which each decoder block attends to its own mix of all encoder layers.

    H~_j = sum_i s_ij H_i,  s_j = softmax(W_j),  i = 0 ... N,  j = 1 ... M

H_0 [B, S, D] are the encoder's embeddings and H_i the hidden states after its block i; W [M, N + 1] is learned.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from xscale.nn.depth.depth_pass import DepthPass, DepthState, SentTensor, StackUse
from xscale.nn.dims import Dims
from xscale.nn.init import ZEROS
from xscale.nn.random import reseed
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


class ReturnedStates(DepthPass):
    """Returns the hidden states before and after all blocks, [depth + 1, B, T, D], in place of the last ones."""

    key = "returned_states"
    reads_hidden_states = ""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.is_last = True
        """Whether the last block is here, and not in a later stage of a pipeline."""

    @classmethod
    def build(
        cls, config: Any, dims: Dims, use: StackUse, blocks: Mapping[str, nn.Module]
    ) -> "ReturnedStates | None":
        return cls(dims.depth) if use.returns_states else None

    def sends(
        self, before: Sequence[nn.Module], after: Sequence[nn.Module]
    ) -> dict[str, SentTensor]:
        return {self.key: SentTensor(states=len(before))}

    def states_of_output(self) -> int | None:
        return self.depth + 1

    def start(self, state: DepthState) -> None:
        """Begin with the states before the first block; in a pipeline stage with those of the stages before too."""
        earlier = state.edges.get(self.key)
        state.edges = {name: edge for name, edge in state.edges.items() if name != self.key}
        state.kept[self.key] = [*(() if earlier is None else earlier), state.x]

    def after_block(self, state: DepthState) -> None:
        state.kept[self.key].append(state.x)

    def finish(self, state: DepthState) -> None:
        states = state.kept[self.key]
        if self.is_last:
            state.x = torch.stack(states)  # [depth + 1, B, T, D]
        else:
            state.edges = {**state.edges, self.key: torch.stack(states[:-1])}

    def keep_blocks(self, layers: Sequence[str]) -> None:
        self.is_last = str(self.depth - 1) in layers


class LayerMix(DepthPass):
    """A mix of the encoder's layers for each block of a decoder."""

    key = "mix"
    reads_hidden_states = ""
    used_by_all_blocks = True
    seams = {"param_hook": Role.PARAMETERS_BETWEEN_REGIONS}
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

    def forward(self, states: Tensor, tokens: Tokens) -> Tensor:
        """States [N + 1, B, S, D] -> the memory of each block [M, B, S, D]; `tokens` are those of the decoder."""
        weights = self.use(self.weight).softmax(-1)
        if self.training and tokens.forward.rng_seed is not None and self.dropout:
            reseed(tokens.forward.rng_seed, self.path)
            weights = self.random.dropout(weights, self.dropout, ("state", "state"))
        return torch.einsum("mn,nbsd->mbsd", weights.to(states.dtype), states)
