"""Blocks that torch.compile compiles, each in full."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from xscale.mesh import torch_private
from xscale.nn.blocks.block import Block
from xscale.nn.tokens import Tokens

GRAPHS_OF_A_BLOCK = 4
"""Graphs that a block may need: of training and of evaluation, with and without the values that blocks share."""


@dataclass(frozen=True)
class TrainedInputs:
    """The kinds of inputs that the blocks of a model were trained on, for which they are compiled in evaluation too.

    A graph is of one shape. Generation, tasks and an evaluation's last batch have shapes that come once or a few times,
    and compiling takes longer than computing them.
    """

    kinds: set[tuple[Any, ...]] = field(default_factory=set)

    def runs_compiled(
        self, block: nn.Module, x: Any, tokens: Tokens, memory: Tensor | None
    ) -> bool:
        """Return whether `block` runs compiled on these inputs; those of training are remembered.

        x is the residual stream: one tensor, or several.
        """
        if tokens.forward.cache is not None:
            return False
        stream = x if isinstance(x, tuple) else (x,)
        shapes = tuple(None if tensor is None else tensor.shape for tensor in (*stream, memory))
        kind = (*shapes, tokens.documents is None, tokens.padding is None, tokens.prefix is None)
        if block.training:
            self.kinds.add(kind)
        return kind in self.kinds


def compile_blocks(model: nn.Module) -> None:
    """Compile each block with torch.compile, in place: names stay, and equal blocks share the compiled code.

    Random numbers are drawn as without compilation, because dropout must not depend on a rank's graph. Blocks that
    differ have graphs of their own: torch would compile the first eight, and compute the others as without, with a
    warning in its log. Outside of training a block is compiled for `TrainedInputs` only.
    """
    blocks = blocks_of(model)
    limit = torch_private.dynamo_config.recompile_limit
    torch_private.dynamo_config.recompile_limit = max(limit, GRAPHS_OF_A_BLOCK * len(blocks))
    trained = TrainedInputs()
    for block in blocks:
        block.compile(dynamic=False, options={"fallback_random": True})
        torch_private.wrap_compiled_call(block, _compiled_where_trained(block, trained))


def _compiled_where_trained(
    block: Block, trained: TrainedInputs
) -> torch_private.CompiledCallWrapper:
    def wrap(compiled: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            x: Any, tokens: Tokens, memory: Tensor | None = None, *more: Any, **named: Any
        ) -> Any:
            run = compiled if trained.runs_compiled(block, x, tokens, memory) else plain
            return run(x, tokens, memory, *more, **named)

        return call

    return wrap


def blocks_of(model: nn.Module) -> list[Block]:
    """Return the blocks of all stacks of the model."""
    return [module for module in model.modules() if isinstance(module, Block)]
