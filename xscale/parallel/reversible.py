"""Reversible blocks without saved inputs (Gomez et al. 2017): forward frees each, backward computes it from outputs.

A sublayer adds f(second) to `first`. Its forward saves neither the activations within f nor `first`, of which the two
streams after the last block are a function. Backward recomputes f(second) for its gradients, once, and the same values
give first = y - f(second), which is what the sublayer before read.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.blocks.block import Block
from xscale.nn.module import substitute
from xscale.nn.roles import Role
from xscale.parallel.config import ParallelConfig
from xscale.parallel.pipeline.schedule import SCHEDULES, schedule_of
from xscale.parallel.recompute.activation_checkpointing import with_state_of_forward
from xscale.parallel.roles import seams_in


def reversible_blocks(model: nn.Module) -> list[Block]:
    """Return the blocks whose input is a function of their output: they add to residual streams at a seam."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    return [
        block
        for block in blocks
        if any(True for _ in seams_in(block.sublayers().values(), Role.RESIDUAL_SUM))
    ]


def check(model: nn.Module, config: ParallelConfig, path: str) -> list[Problem]:
    """Return what cannot be together with inputs that are reconstructed; `path` is that of section `parallel`."""
    if not reversible_blocks(model) or not config.recompute.reversible:
        return []
    where, problems = f"{path}.recompute", []
    keeps = take(False, key=f"{where}.reversible")
    if config.recompute.every:
        what = "reversible blocks recompute their sublayers already"
        problems.append(Problem(f"{where}.every", what, choices=take(0) + keeps))
    if config.recompute.regather_sequence_parallel_input:
        what = "reversible blocks save no gathered activations"
        key = f"{where}.regather_sequence_parallel_input"
        problems.append(Problem(key, what, choices=take(False) + keeps))
    freed = "the inputs of reversible blocks are freed and written again, which"
    if config.compile:
        what = f"{freed} torch.compile does not see"
        problems.append(Problem(f"{path}.compile", what, choices=take(False) + keeps))
    if config.cuda_graphs:
        what = f"{freed} a graph does not see"
        problems.append(Problem(f"{path}.cuda_graphs", what, choices=take(False) + keeps))
    schedule = schedule_of(config.pipeline)
    if config.mesh.pp > 1 and schedule.splits_backward:
        able = [other.name for other in SCHEDULES.values() if not other.splits_backward]
        what = f"'{schedule.name}' splits the backward, and both parts would reconstruct the inputs"
        problems.append(Problem(f"{path}.pipeline.schedule", what, choices=take(*able) + keeps))
    return problems


def apply(model: nn.Module) -> int:
    """Substitute how reversible blocks add to a residual stream; return how many there are."""
    for sublayer, seam, _ in seams_in(model.modules(), Role.RESIDUAL_SUM):
        substitute(sublayer, seam, partial(add_and_free, sublayer))
    return len(reversible_blocks(model))


def add_and_free(sublayer: Any, first: Tensor, second: Tensor, *inputs: Any) -> Tensor:
    """first + f(second), all [B, T, D]; frees the memory of `first`, which backward writes before it is read."""
    if not (sublayer.training and torch.is_grad_enabled() and second.requires_grad):
        added: Tensor = sublayer.branch(second, *inputs)
        return first + added
    freed = FreedTensor(first)

    def run(second: Tensor, *inputs: Any) -> Tensor:
        y: Tensor = sublayer.branch(second, *inputs)
        freed.restore(y)
        return y

    arguments = (second, *inputs)
    # The recomputation must run to its end: its result restores the input.
    with set_checkpoint_early_stop(False):
        y: Tensor = checkpoint(
            with_state_of_forward(run, arguments), *arguments, use_reentrant=False
        )
    output = first + y
    freed.free(output)
    return output


class FreedTensor:
    """A tensor without memory until backward, which computes it from what was added to it."""

    def __init__(self, x: Tensor) -> None:
        # `data` has no version counter in common with x: autograd need not know that the same values are written again.
        self.x = x.data
        self.bytes = x.untyped_storage().nbytes()
        assert self.bytes == x.numel() * x.element_size(), "the memory has other tensors too"
        self.output: Tensor | None = None

    def free(self, output: Tensor) -> None:
        """Free the memory; `output` is the sum, which has its own."""
        self.output = output.data
        self.x.untyped_storage().resize_(0)

    @torch.no_grad()
    def restore(self, added: Tensor) -> None:
        """Write output - `added` to the memory, if it was freed."""
        if self.output is not None:
            self.x.untyped_storage().resize_(self.bytes)
            torch.sub(self.output, added, out=self.x)
