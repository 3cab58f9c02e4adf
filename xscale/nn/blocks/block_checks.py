"""Checks of a block's config: what its list of sublayers cannot be."""

from typing import Any

from xscale.core.errors import Problem
from xscale.nn.residual.residual_stream import RESIDUALS


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
    elif sublayer.factor != 1 and RESIDUALS.of(config.residual).part.replaces:
        what = f"multiplies what is added to the residual stream, and with residual '{config.residual.kind}' nothing is"
        problems.append(Problem(f"{path}.factor", what, "Take 1, or another residual."))
    return problems


def check_parallel_sublayer(config: Any, index: int, path: str) -> list[Problem]:
    """List why an entry of `sublayers` cannot read the input of the one before it."""
    if index == 0:
        return [Problem(f"{path}.parallel", "the first sublayer has none before it", "Take false.")]
    stream = RESIDUALS.of(config.residual).part
    if stream.replaces or stream.placement(config.residual).total is not None:
        what = f"residual '{config.residual.kind}' leaves no sum that both sublayers could be added to"
        fix = "Take false, or residual pre, sandwich, res_post, rezero or no_norm."
        return [Problem(f"{path}.parallel", what, fix)]
    return []
