"""Checks of what in a model cannot run on a sequence sharded over cp, each with what would work."""

from typing import Any, cast

from torch import nn

import xscale.parallel.context.ulysses as ulysses
from xscale.core.choices import Choice
from xscale.core.errors import Problem
from xscale.core.requirements import in_parts, instead, take
from xscale.nn.attention.core import CORES
from xscale.nn.ffn.ffn import FFNS
from xscale.nn.mixer.mixer import MIXERS, Mixer
from xscale.nn.module import seams_of
from xscale.nn.norm.norm import NORMS
from xscale.nn.roles import Role
from xscale.parallel.config import ParallelConfig
from xscale.parallel.context.attention import ShardedAttention
from xscale.parallel.context.gathered import mixers_of
from xscale.parallel.context.styles import modules_with_shard, style_of, sublayers_on_gathered
from xscale.parallel.roles import norms_between_regions, seams_in


def check(model: nn.Module, config: ParallelConfig, path: str) -> list[Problem]:
    """Return what of a model cannot run on a sharded sequence, each with what would work."""
    cp = config.mesh.cp
    if cp == 1:
        return []
    where = f"{path}.mesh.cp"
    problems = []
    gathered = sublayers_on_gathered(model, config)
    if gathered and config.tensor.sequence and config.mesh.tp > 1:
        what = "mixers on the gathered sequence read all of it, and between blocks tp has shards of a shard"
        choices = take(False) + take(False, key=f"{path}.context.gather")
        problems.append(Problem(f"{path}.tensor.sequence", what, choices=choices))
    problems += _check_handed_on_scores(model, gathered, where)
    for module in modules_with_shard(model, gathered):
        roles = set(seams_of(module).values())
        if not isinstance(module, Mixer):
            problems += _check_ffns(module, where)
        elif not module.shards_sequence:
            what = f"mixer '{_kind(module)}' mixes the full sequence, and each rank would have a shard of it"
            able = [entry.name for entry in MIXERS if entry.part.shards_sequence]
            choices = _gathered(path) + instead("mixer", _kind(module), able)
            problems.append(Problem(where, what, choices=choices))
        elif Role.ATTENTION in roles:
            problems += _check_attention(cast(ShardedAttention, module), config, path)
        elif Role.REUSED_ATTENTION in roles:
            problems += _check_reused_scores(module, config, path)
    for norm in norms_between_regions(model):
        traits = NORMS.get(_kind(norm)).traits
        if not (traits.per_token or traits.batch_statistics):
            what = f"norm '{_kind(norm)}' mixes tokens, and each rank would have a shard of the sequence"
            choices = take(1) + instead("norm", _kind(norm), NORMS.able(per_token=True))
            problems.append(Problem(where, what, choices=choices))
    return list({str(problem): problem for problem in problems}.values())


def _check_handed_on_scores(model: nn.Module, gathered: list[Any], where: str) -> list[Problem]:
    """List why gathered mixers cannot hand their scores, of all heads, to mixers with a shard of the heads."""
    inside = {mixer for sublayer in gathered for mixer in mixers_of(sublayer)}
    mixers = [
        module for module in model.modules() if isinstance(module, Mixer) and module.hands_on_scores
    ]
    if not inside.intersection(mixers) or inside.issuperset(mixers):
        return []
    what = "attention scores pass between mixers on the gathered sequence and mixers with a shard of the heads"
    return [Problem(where, what, "Or take one core in all blocks.", choices=take(1))]


def _check_attention(
    attention: ShardedAttention, config: ParallelConfig, path: str
) -> list[Problem]:
    reasons_by_style = style_of(attention, config)
    if isinstance(reasons_by_style, str):
        return []
    kind, cp = _kind(attention.core), config.mesh.cp
    configured = config.context.style
    reported = (
        reasons_by_style if configured == "auto" else {configured: reasons_by_style[configured]}
    )
    what = f"a sequence cannot be sharded over cp={cp} for core '{kind}': " + "; ".join(
        f"{style}: {reason}" for style, reason in reported.items()
    )
    works = [style for style, reason in reasons_by_style.items() if reason is None]
    degrees = _working_degrees(attention, config)
    choices = take(*works) + take(*degrees, key=f"{path}.mesh.cp")
    if not choices:
        able = [entry.name for entry in CORES if entry.traits.context]
        choices = take(1, key=f"{path}.mesh.cp") + _gathered(path)[1:] + instead("core", kind, able)
    fix = ""
    if attention.dropout and not works:
        fix = "The blocks' dropout works with all styles."
        choices += in_parts("mixer", _kind(attention), "dropout", 0.0)
    return [Problem(f"{path}.context.style", what, fix, choices=choices)]


def _gathered(path: str) -> tuple[Choice, ...]:
    """Return the choices of one rank for a sequence, at the key of cp, and of all of it on each rank."""
    return take(1) + take(True, key=f"{path}.context.gather")


def _check_reused_scores(mixer: Any, config: ParallelConfig, path: str) -> list[Problem]:
    cp, tp = config.mesh.cp, config.mesh.tp
    problems = []
    if config.context.style not in ("auto", "ulysses"):
        what = (
            f"mixer '{_kind(mixer)}' has scores with a shard of the heads, which only ulysses makes"
        )
        problems.append(Problem(f"{path}.context.style", what, choices=take("auto", "ulysses")))
    if reason := ulysses.unsupported_reason(mixer, cp, tp):
        degrees = [
            cp
            for cp in range(1, mixer.heads + 1)
            if ulysses.unsupported_reason(mixer, cp, tp) is None
        ]
        what = f"a sequence cannot be sharded over cp={cp} for mixer '{_kind(mixer)}': {reason}"
        problems.append(Problem(f"{path}.mesh.cp", what, choices=take(*(degrees or [1]))))
    return problems


def _working_degrees(attention: ShardedAttention, config: ParallelConfig) -> list[int]:
    """Return the degrees of cp, up to the configured one and the next above it, that the heads allow."""
    cp = config.mesh.cp
    working = [
        degree
        for degree in range(2, attention.query_channels // attention.head_width + 1)
        if isinstance(style_of(attention, _with_cp(config, degree)), str)
    ]
    below, above = (
        [degree for degree in working if degree < cp],
        [degree for degree in working if degree > cp],
    )
    return below + above[:1]


def _with_cp(config: ParallelConfig, cp: int) -> ParallelConfig:
    """Return the config with another degree of context parallelism."""
    return config.model_copy(update={"mesh": config.mesh.model_copy(update={"cp": cp})})


def _check_ffns(module: nn.Module, where: str) -> list[Problem]:
    """List why the module's regions without a mixer cannot have a shard of the sequence. Routing gathers its input."""
    problems = []
    for _, seam, _ in seams_in([module], Role.REGION):
        part = getattr(module, seam)
        if isinstance(part, Mixer) or Role.ROUTING in seams_of(part).values():
            continue
        traits = FFNS.get(_kind(part)).traits
        if not (traits.per_token or traits.reads_neighbours):
            what = f"ffn '{_kind(part)}' mixes tokens, and each rank would have a shard of the sequence"
            able = [*FFNS.able(per_token=True), *FFNS.able(reads_neighbours=True), "moe"]
            problems.append(
                Problem(where, what, choices=take(1) + instead("ffn", _kind(part), able))
            )
    return problems


def _kind(part: Any) -> str:
    return str(part.Config.kind)
