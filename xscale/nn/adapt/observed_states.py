"""Wrappers that hand the states of a stack to `Tokens.states` as they arise, for the losses of distillation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.blocks.stack import Stack
from xscale.nn.compiling.eager import eager
from xscale.nn.forward import InnerStates
from xscale.nn.mixer.attention import Attention
from xscale.nn.module import Module
from xscale.nn.tokens import Tokens


def attentions_of(stack: Stack) -> dict[int, Attention]:
    """Return the one self-attention of each block; a block without one, or with several, is left out."""
    by_layer = {}
    for layer, block in stack.blocks.items():
        mixers = [
            module
            for module in block.modules()
            if isinstance(module, Attention) and not module.cross
        ]
        if len(mixers) == 1:
            by_layer[int(layer)] = mixers[0]
    return by_layer


@dataclass(frozen=True)
class ObservedBlocks:
    """Runs a block, and hands its input, if it is the first, and its output to `Tokens.states`."""

    run: Callable[..., Any]

    def __call__(self, block: Module, x: Any, tokens: Tokens, *inputs: Any) -> Any:
        """Return what the block returns: x [B, T, D], or also the scores that it hands on."""
        if tokens.forward.states is None:
            return self.run(block, x, tokens, *inputs)
        layer = int(block.path.rsplit(".", 1)[1])
        if layer == 0:
            x = tokens.forward.states.hidden(-1, x, tokens)
        if tokens.forward.states.skips(layer):
            # The scores that blocks hand on, or the sums of gates, are the last input.
            return x if len(inputs) < 3 else (x, inputs[-1])
        result = self.run(block, x, tokens, *inputs)
        if isinstance(result, tuple):
            return tokens.forward.states.hidden(layer, result[0], tokens), *result[1:]
        return (
            tokens.forward.states.hidden(layer, result, tokens)
            if isinstance(result, Tensor)
            else result
        )


@dataclass(frozen=True)
class ObservedOutput:
    """Hands the output of a stack to `Tokens.states`."""

    finish: Callable[..., Any]

    def __call__(self, x: Any, scores: Any, tokens: Tokens) -> Any:
        """Return the output [B, T, D] of the stack."""
        out = self.finish(x, scores, tokens)
        return out if tokens.forward.states is None else tokens.forward.states.output(out, tokens)


@dataclass(frozen=True)
class ObservedScores:
    """Hands queries and keys of an attention to `Tokens.states`."""

    layer: int
    attend: Callable[..., Tensor]

    def __call__(
        self, x: Tensor, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> Tensor:
        """Return the heads' outputs [B, H, T, K]."""
        o = self.attend(x, tokens, q, k, v, mask)
        return (
            o
            if tokens.forward.states is None
            else _hand_on(tokens.forward.states, self.layer, q, k, mask, o, tokens)
        )


@eager
def _hand_on(
    states: InnerStates,
    layer: int,
    q: Tensor,
    k: Tensor,
    mask: AttentionMask,
    o: Tensor,
    tokens: Tokens,
) -> Tensor:
    """Return what the states make of the heads' outputs o [B, H, T, K].

    Outside of the compiled graph: the states of a teacher are other tensors in each forward.
    """
    return states.attention(layer, q, k, mask, o, tokens)
