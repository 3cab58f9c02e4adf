"""The style by which each module of a model sees the other shards of the sequence."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, cast

from torch import nn

import xscale.parallel.context.halo as halo
import xscale.parallel.context.neighbours as neighbours
import xscale.parallel.context.ring.ring as ring
import xscale.parallel.context.scan as scan
import xscale.parallel.context.state_space as state_space
import xscale.parallel.context.ulysses as ulysses
from xscale.mesh.mesh import Mesh
from xscale.nn.mixer.mixer import Mixer
from xscale.nn.model.embed import global_tokens_of
from xscale.nn.model.model import Model
from xscale.nn.module import seams_of
from xscale.nn.roles import Role
from xscale.parallel.config import ParallelConfig
from xscale.parallel.context.attention import ShardedAttention
from xscale.parallel.context.gathered import gathered_sublayers
from xscale.parallel.context.gathered import traffic as gathered_traffic
from xscale.parallel.context.halo import Halo
from xscale.parallel.context.ring.ring import Ring
from xscale.parallel.context.scan import Scan
from xscale.parallel.context.sequence_sharding import SequenceSharding
from xscale.parallel.context.ulysses import Ulysses
from xscale.parallel.roles import seams_in

STYLES: dict[str, tuple[ModuleType, Callable[[Any], Any]]] = {
    "scan": (scan, Scan),
    "ulysses": (ulysses, Ulysses),
    "ring": (ring, Ring),
    "halo": (halo, Halo),
}
"""In the order in which `auto` tries them."""
OTHER_STYLES: dict[Role, tuple[str, ModuleType]] = {
    Role.REUSED_ATTENTION: ("ulysses", ulysses),
    Role.SCAN: ("scan", state_space),
    Role.CONVOLUTION: ("scan", state_space),
    Role.NEIGHBOURS: ("neighbours", neighbours),
}
"""Role of what reads other tokens beside attention -> its style, and the module that knows its traffic."""


def sublayers_on_gathered(model: nn.Module, config: ParallelConfig) -> list[Any]:
    """List the sublayers whose mixer runs on the gathered sequence."""

    def has_style(mixer: Mixer) -> bool:
        if Role.REUSED_ATTENTION in seams_of(mixer).values():
            has_ulysses = config.context.style in ("auto", "ulysses")
            return (
                has_ulysses
                and ulysses.unsupported_reason(mixer, config.mesh.cp, config.mesh.tp) is None
            )
        if Role.ATTENTION in seams_of(mixer).values() and mixer.shards_sequence:
            return isinstance(style_of(cast(ShardedAttention, mixer), config), str)
        return mixer.shards_sequence

    return gathered_sublayers(model, has_style) if config.context.gather else []


def modules_with_shard(model: nn.Module, gathered: list[Any]) -> list[nn.Module]:
    """List the modules that work on a shard of the sequence."""
    inside = {module for sublayer in gathered for module in sublayer.part.modules()}
    return [module for module in model.modules() if module not in inside]


def style_of(attention: ShardedAttention, config: ParallelConfig) -> str | dict[str, str | None]:
    """Return the style of an attention; if none works, the reason of each (None: works, but is not configured)."""
    wanted = config.context.style
    reasons: dict[str, str | None] = {style: _refuses(style, attention, config) for style in STYLES}
    if wanted == "auto":
        return next((style for style, reason in reasons.items() if reason is None), reasons)
    return wanted if reasons[wanted] is None else reasons


def _refuses(style: str, attention: ShardedAttention, config: ParallelConfig) -> str | None:
    traits = attention.core.traits
    if style not in traits.context:
        allows = ", ".join(traits.context) or "none"
        return f"the core supports {allows}"
    reason: str | None = STYLES[style][0].unsupported_reason(
        attention, config.mesh.cp, config.mesh.tp
    )
    return reason


def estimate(model: nn.Module, config: ParallelConfig, length: int) -> dict[str, float]:
    """Estimate the elements a rank sends over cp in the forward of one sequence, by style."""
    sent: dict[str, float] = {}
    for style, module, traffic in _styled_modules(model, config):
        sent[style] = sent.get(style, 0.0) + traffic(module, config.mesh.cp, config.mesh.tp, length)
    return sent


def styles_of_modules(model: nn.Module, config: ParallelConfig) -> dict[str, list[str]]:
    """Return the paths of the modules that see other shards of the sequence, by style: `gather` has the sublayers whose
    mixer runs on the gathered sequence."""
    paths, styles = {module: path for path, module in model.named_modules()}, dict[str, list[str]]()
    for style, module, _ in _styled_modules(model, config):
        styles.setdefault(style, []).append(paths[module].removesuffix(".part"))
    return styles


def _styled_modules(
    model: nn.Module, config: ParallelConfig
) -> Iterator[tuple[str, nn.Module, Callable[[Any, int, int, int], float]]]:
    """Yield the style of each module that sees other shards, the module, and what it sends by cp, tp and length."""
    if config.mesh.cp == 1:
        return
    gathered = sublayers_on_gathered(model, config)
    for sublayer in gathered:
        yield (
            "gather",
            sublayer,
            lambda sublayer, cp, tp, length: gathered_traffic(sublayer, cp, length),
        )
    for module, _, role in seams_in(
        modules_with_shard(model, gathered), Role.ATTENTION, *OTHER_STYLES
    ):
        if role is Role.ATTENTION:
            style = style_of(module, config)
            assert isinstance(style, str), "`check` comes first"
            yield style, module, STYLES[style][0].traffic
        else:
            yield OTHER_STYLES[role][0], module, OTHER_STYLES[role][1].traffic


def sequence_sharding_of(
    model: nn.Module, mesh: Mesh, config: ParallelConfig
) -> SequenceSharding | None:
    """Return how all ranks shard the sequences of the full model; None without context parallelism.

    Attention takes the sharding from the tokens, so it is decided once: the stages of a pipeline may differ in styles.
    """
    assert isinstance(model, Model), "the stages of one rank do not know the styles of the others"
    if mesh.context is None:
        return None
    sharded = modules_with_shard(model, sublayers_on_gathered(model, config))
    styles = {style_of(module, config) for module, *_ in seams_in(sharded, Role.ATTENTION)}
    # The other styles, local mixers and state space models need adjacent chunks on a rank.
    adjacent = any(True for _ in seams_in(sharded, Role.SCAN, Role.CONVOLUTION, Role.NEIGHBOURS))
    balanced = "ring" in styles and styles <= {"ring", "ulysses"} and not adjacent
    return SequenceSharding(mesh.context, balanced, global_tokens_of(model))
