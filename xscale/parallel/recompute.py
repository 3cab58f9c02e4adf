"""Recompute (Chen et al. 2016): every k-th block forgets its activations and computes them again in backward."""

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from xscale.core.errors import Problem
from xscale.nn.block import Block
from xscale.nn.stack import Stack
from xscale.parallel.config import RecomputeConfig


def check(config: RecomputeConfig, path: str) -> list[Problem]:
    """Problems of the setting."""
    if config.every < 0:
        return [Problem(f"{path}.every", f"a period is counted from 0, not {config.every}", "0 keeps all activations.")]
    return []


def apply(model: nn.Module, config: RecomputeConfig) -> None:
    """Substitute how the stacks run those blocks."""
    if config.every == 0:
        return
    for stack in model.modules():
        if isinstance(stack, Stack):
            stack.run = _runner(config.every)


def _runner(every: int) -> Any:
    def run(block: Block, *inputs: Any) -> Tensor:
        layer = int(block.path.rsplit(".", 1)[-1])
        if layer % every or not block.training:
            out: Tensor = block(*inputs)
            return out
        again: Tensor = checkpoint(block, *inputs, use_reentrant=False)
        return again

    return run
