"""Checks of a stack whose residual stream is not the hidden states alone: what would read or change these."""

from collections.abc import Iterable
from typing import Any

from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.residual.residual_stream import RESIDUALS

POSITION = "block.position"
"""Key below `stack` of the position that each block adds to its input."""


def hidden_state_readers(passes: Iterable[Any]) -> dict[str, str]:
    """Return the keys below `stack` of what needs one tensor for a stream, with a clause that says why.

    `passes` are the classes of all passes over the depth.
    """
    reasons = {
        part.config_key or part.key: part.reads_hidden_states
        for part in passes
        if part.reads_hidden_states
    }
    return {POSITION: "a block's position is added to one", **reasons}


def check_stream(stack: Any, path: str, passes: Iterable[Any], *, cross: bool) -> list[Problem]:
    """List what of a `StackConfig`, at `path`, its stream cannot be with; `cross`: it reads an encoder's output."""
    config = stack.block.residual
    entry = RESIDUALS.of(config)
    problems: list[Problem] = entry.part.check_stack(stack, path, cross=cross)
    if entry.traits.hidden_states:
        return problems
    usual = take(entry.part.instead(config), key=f"{path}.block.residual")
    for key, why in hidden_state_readers(passes).items():
        *sections, name = key.split(".")
        section = stack
        for part in sections:
            section = getattr(section, part)
        absent = type(section).model_fields[name].default
        if getattr(section, name) != absent:
            what = f"{entry.part.form}, and {why}"
            before = "The position of the model is added before the first block."
            fix = before if key == POSITION else ""
            problems.append(Problem(f"{path}.{key}", what, fix, choices=take(absent) + usual))
    return problems
