"""Checks of a block's config: what its list of sublayers cannot be."""

from typing import Any

from xscale.core.choices import Choice
from xscale.core.errors import Problem
from xscale.core.requirements import kinds, take

NORMLESS = ("rezero", "no_norm", "none")
"""Placements without a norm."""
ADDING = ("pre", "sandwich", "res_post", "rezero", "no_norm")
"""Placements that add the output to the residual stream and leave the sum as it is."""
FFN_KINDS = ("dense", "gated")
"""Kinds that are advised in place of no ffn."""
ENDS_IN_NORM = ("post", "admin")
"""Placements that normalise the sum of residual and output."""


def check_parallel(config: Any, path: str, *, cross: bool) -> list[Problem]:
    """List why the sublayers cannot read one input."""
    problems: list[tuple[str, tuple[Choice, ...]]] = []
    if cross:
        problems.append(("cross attention is a third sublayer", ()))
    if config.placement in ENDS_IN_NORM:
        what = f"placement '{config.placement}' normalises the sum"
        problems.append((what, take(*ADDING, key=f"{path}.placement")))
    if "none" in (config.placement, config.ffn.kind):
        problems.append(("this block has no sum of the two", ()))
    if config.sublayers is not None:
        problems.append(("`sublayers` says an order", take(None, key=f"{path}.sublayers")))
    what = "'parallel' adds a mixer and an ffn to one input; {}"
    return [
        Problem(f"{path}.residual", what.format(reason), choices=take("sequential") + alternatives)
        for reason, alternatives in problems
    ]


def check_sublayer(sublayer: Any, config: Any, path: str, *, cross: bool) -> list[Problem]:
    """List what an entry of `sublayers` cannot be."""
    problems = []
    unused = "mixer" if sublayer.slot == "ffn" else "ffn"
    if getattr(sublayer, unused) is not None:
        what = f"is not used by part '{sublayer.part}'"
        problems.append(Problem(f"{path}.{unused}", what, choices=take(None) + take(unused, key=f"{path}.part")))
    if sublayer.part == "cross" and not cross:
        what = "'cross' reads the output of an encoder, and this stack has none"
        problems.append(
            Problem(f"{path}.part", what, "Or take the model encoder_decoder.", choices=take("mixer", "ffn"))
        )
    if config.config_of(sublayer).kind == "none":
        where = f"{path.rpartition('.sublayers.')[0]}.ffn" if sublayer.ffn is None else f"{path}.ffn"
        problems.append(
            Problem(f"{path}.part", "its ffn is none", "Or leave the entry out.", choices=kinds(FFN_KINDS, where))
        )
    if sublayer.factor == 0:
        what, fix = "0 leaves nothing of the sublayer's output", "Or leave the entry out of the list."
        problems.append(Problem(f"{path}.factor", what, fix, choices=take(1.0)))
    elif sublayer.factor != 1 and config.placement == "none":
        what = "multiplies what is added to the residual stream, and with placement 'none' nothing is"
        problems.append(
            Problem(
                f"{path}.factor",
                what,
                choices=take(1.0) + take("pre", key=f"{path.rpartition('.sublayers.')[0]}.placement"),
            )
        )
    return problems


def check_parallel_sublayer(config: Any, index: int, path: str) -> list[Problem]:
    """List why an entry of `sublayers` cannot read the input of the one before it."""
    if index == 0:
        return [Problem(f"{path}.parallel", "the first sublayer has none before it", choices=take(False))]
    if config.placement in (*ENDS_IN_NORM, "none"):
        what = f"placement '{config.placement}' leaves no sum that both sublayers could be added to"
        placements = take(*ADDING, key=f"{path.rpartition('.sublayers.')[0]}.placement")
        return [Problem(f"{path}.parallel", what, choices=take(False) + placements)]
    return []
