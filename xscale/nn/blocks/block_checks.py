"""Checks of a block's config: what its list of sublayers cannot be."""

from typing import Any

from xscale.core.errors import Problem
from xscale.core.requirements import kinds, take
from xscale.nn.residual.residual_stream import RESIDUALS

ADDING = ("pre", "sandwich", "res_post", "rezero", "no_norm")
"""Residual streams that add the output and leave the sum as it is."""
FFN_KINDS = ("dense", "gated")
"""Kinds that are advised in place of no ffn."""


def check_sublayer(sublayer: Any, config: Any, path: str, *, cross: bool) -> list[Problem]:
    """List what an entry of `sublayers` cannot be."""
    problems = []
    unused = "mixer" if sublayer.slot == "ffn" else "ffn"
    if getattr(sublayer, unused) is not None:
        what = f"is not used by part '{sublayer.part}'"
        problems.append(
            Problem(f"{path}.{unused}", what, choices=take(None) + take(unused, key=f"{path}.part"))
        )
    if sublayer.part == "cross" and not cross:
        what = "'cross' reads the output of an encoder, and this stack has none"
        problems.append(
            Problem(
                f"{path}.part",
                what,
                "Or take the model encoder_decoder.",
                choices=take("mixer", "ffn"),
            )
        )
    if config.config_of(sublayer).kind == "none":
        where = (
            f"{path.rpartition('.sublayers.')[0]}.ffn" if sublayer.ffn is None else f"{path}.ffn"
        )
        problems.append(
            Problem(
                f"{path}.part",
                "its ffn is none",
                "Or leave the entry out.",
                choices=kinds(FFN_KINDS, where),
            )
        )
    if sublayer.factor == 0:
        what, fix = (
            "0 leaves nothing of the sublayer's output",
            "Or leave the entry out of the list.",
        )
        problems.append(Problem(f"{path}.factor", what, fix, choices=take(1.0)))
    elif sublayer.factor != 1 and RESIDUALS.of(config.residual).part.replaces:
        what = f"multiplies what is added to the residual stream, and with residual '{config.residual.kind}' nothing is"
        choices = take(1.0) + kinds(["pre"], f"{path.rpartition('.sublayers.')[0]}.residual")
        problems.append(Problem(f"{path}.factor", what, choices=choices))
    return problems


def check_parallel_sublayer(config: Any, index: int, path: str) -> list[Problem]:
    """List why an entry of `sublayers` cannot read the input of the one before it."""
    if index == 0:
        return [
            Problem(
                f"{path}.parallel", "the first sublayer has none before it", choices=take(False)
            )
        ]
    stream = RESIDUALS.of(config.residual).part
    if stream.replaces or stream.placement(config.residual).total is not None:
        what = (
            f"residual '{config.residual.kind}' leaves no sum that both sublayers could be added to"
        )
        choices = take(False) + kinds(ADDING, f"{path.rpartition('.sublayers.')[0]}.residual")
        return [Problem(f"{path}.parallel", what, choices=choices)]
    return []
