"""Checks of a block's config: what its list of sublayers cannot be."""

from typing import Any

from xscale.core.errors import Problem

NORMLESS = ("rezero", "no_norm", "none")
"""Placements without a norm."""
ENDS_IN_NORM = ("post", "admin")
"""Placements that normalise the sum of residual and output."""


def check_parallel(config: Any, path: str, *, cross: bool) -> list[Problem]:
    """List why the sublayers cannot read one input."""
    problems = []
    if cross:
        problems.append(("cross attention is a third sublayer", "Take sequential."))
    if config.placement in ENDS_IN_NORM:
        what = f"placement '{config.placement}' normalises the sum"
        problems.append((what, f"Take sequential, or a placement other than {config.placement}."))
    if "none" in (config.placement, config.ffn.kind):
        problems.append(("this block has no sum of the two", "Take sequential."))
    if config.sublayers is not None:
        problems.append(("`sublayers` says an order", "Take sequential, or leave `sublayers` out."))
    what = "'parallel' adds a mixer and an ffn to one input; {}"
    return [Problem(f"{path}.residual", what.format(reason), fix) for reason, fix in problems]


def check_sublayer(sublayer: Any, config: Any, path: str, *, cross: bool) -> list[Problem]:
    """List what an entry of `sublayers` cannot be."""
    problems = []
    unused = "mixer" if sublayer.slot == "ffn" else "ffn"
    if getattr(sublayer, unused) is not None:
        what = f"is not used by part '{sublayer.part}'"
        problems.append(Problem(f"{path}.{unused}", what, f"Leave it out, or take part={unused}."))
    if sublayer.part == "cross" and not cross:
        what = "'cross' reads the output of an encoder, and this stack has none"
        problems.append(Problem(f"{path}.part", what, "Take mixer or ffn, or the model encoder_decoder."))
    if config.config_of(sublayer).kind == "none":
        problems.append(Problem(f"{path}.part", "its ffn is none", "Leave the entry out, or choose an ffn."))
    if sublayer.factor == 0:
        fix = "Leave the entry out of the list, or take a factor above 0."
        problems.append(Problem(f"{path}.factor", "0 leaves nothing of the sublayer's output", fix))
    elif sublayer.factor != 1 and config.placement == "none":
        what = "multiplies what is added to the residual stream, and with placement 'none' nothing is"
        problems.append(Problem(f"{path}.factor", what, "Take 1, or another placement."))
    return problems


def check_parallel_sublayer(config: Any, index: int, path: str) -> list[Problem]:
    """List why an entry of `sublayers` cannot read the input of the one before it."""
    if index == 0:
        return [Problem(f"{path}.parallel", "the first sublayer has none before it", "Take false.")]
    if config.placement in (*ENDS_IN_NORM, "none"):
        what = f"placement '{config.placement}' leaves no sum that both sublayers could be added to"
        return [
            Problem(f"{path}.parallel", what, "Take false, or placement pre, sandwich, res_post, rezero or no_norm.")
        ]
    return []
