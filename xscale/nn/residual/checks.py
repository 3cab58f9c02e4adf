"""Checks of a stack whose residual stream is not the hidden states alone: what would read or change these."""

from typing import Any

from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.residual.residual_stream import RESIDUALS

READERS = {
    "block.position": (
        None,
        "a block's position is added to one",
        "The position of the model is added before the first block.",
    ),
    "block.gates": (
        None,
        "the gates, and the gates' sum, which blocks hand on, are of the hidden states",
        "",
    ),
    "step_signal": (False, "the signal of a step is added to one", ""),
    "exits": (None, "an exit reads one", ""),
    "halting": (None, "a token that halts has one output", ""),
    "pooling": (None, "windows of one are pooled between blocks", ""),
    "mask_decoder": (None, "the decoder's queries are of one", ""),
}
"""Key below `stack` -> its value without what reads the hidden states between blocks, why it needs one tensor, and what
stands in for it."""


def check_stream(stack: Any, path: str, *, cross: bool) -> list[Problem]:
    """List what of a `StackConfig`, at `path`, its stream cannot be with; `cross`: it reads an encoder's output."""
    config = stack.block.residual
    entry = RESIDUALS.of(config)
    problems: list[Problem] = entry.part.check_stack(stack, path, cross=cross)
    if entry.traits.hidden_states:
        return problems
    usual = take(entry.part.instead(config), key=f"{path}.block.residual")
    for key, (absent, why, fix) in READERS.items():
        value = stack
        for name in key.split("."):
            value = getattr(value, name)
        if value != absent:
            what = f"{entry.part.form}, and {why}"
            problems.append(Problem(f"{path}.{key}", what, fix, choices=take(absent) + usual))
    return problems
