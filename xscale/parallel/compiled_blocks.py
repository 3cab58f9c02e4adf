"""Blocks that torch.compile compiles, each in full."""

from torch import nn

from xscale.mesh import torch_private
from xscale.nn.blocks.block import Block

GRAPHS_OF_A_BLOCK = 4
"""Graphs that a block may need: of training and of evaluation, with and without the values that blocks share."""


def compile_blocks(model: nn.Module) -> None:
    """Compile each block with torch.compile, in place: names stay, and equal blocks share the compiled code.

    Random numbers are drawn as without compilation, because dropout must not depend on a rank's graph. Blocks that
    differ have graphs of their own: torch would compile the first eight, and compute the others as without, with a
    warning in its log.
    """
    blocks = blocks_of(model)
    limit = torch_private.dynamo_config.recompile_limit
    torch_private.dynamo_config.recompile_limit = max(limit, GRAPHS_OF_A_BLOCK * len(blocks))
    for block in blocks:
        block.compile(dynamic=False, options={"fallback_random": True})


def blocks_of(model: nn.Module) -> list[Block]:
    """Return the blocks of all stacks of the model."""
    return [module for module in model.modules() if isinstance(module, Block)]
