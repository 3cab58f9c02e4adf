"""Context parallelism: sequences, and with them the residual stream, are sharded over the ranks of cp.

Per-token modules run on the shard. Attention gets the keys it needs by one of four styles, each a wrapper of the core;
a core's traits list the styles that it supports. A convolution over the sequence fetches its neighbours, and a state
space model or another recurrent mixer the states of the ranks before. With context.gather what has no style runs on the
gathered sequence.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from xscale.core.errors import Problem
from xscale.mesh.collectives import all_gather, copy_in, sum_out
from xscale.mesh.mesh import Mesh
from xscale.nn.attention.core import CORES, ContextStyle
from xscale.nn.block import Sublayer
from xscale.nn.boundary_head import BoundaryHead
from xscale.nn.exits import Exits
from xscale.nn.ffn.ffn import FFNS, Ffn
from xscale.nn.ffn.moe import Moe
from xscale.nn.gates import Gate, GateBudget
from xscale.nn.head import Head
from xscale.nn.length_head import LengthHead
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.local_mixer import LocalMixer, NeighbourReader
from xscale.nn.mixer.mixer import MIXERS, Mixer
from xscale.nn.mixer.recurrent_mixer import RecurrentMixer
from xscale.nn.mixer.reused_attention import ReusedAttention
from xscale.nn.mixer.s4 import S4
from xscale.nn.model.disentangled import Disentangled
from xscale.nn.model.embed import Embed, global_tokens_of
from xscale.nn.model.model import Model
from xscale.nn.module import Part, substitute
from xscale.nn.multi_token import MultiToken
from xscale.nn.norm import NORMS
from xscale.nn.pooler import SentenceHead
from xscale.nn.recurrent_depth import Halting
from xscale.nn.sentence_contrast import SentenceContrast
from xscale.nn.sequence_pooling import SequencePooling
from xscale.parallel.config import ParallelConfig
from xscale.parallel.context import halo, neighbours, ring, scan, state_space, ulysses
from xscale.parallel.context.gathered import GatheredSequence, SequenceOfShards, gathered_sublayers, mixers_of
from xscale.parallel.context.gathered import traffic as gathered_traffic
from xscale.parallel.context.global_tokens import GlobalTokensOverContext, gather_sequence
from xscale.parallel.context.halo import Halo
from xscale.parallel.context.mask import ShardedMaskBuilder
from xscale.parallel.context.moe import GlobalRouting
from xscale.parallel.context.neighbours import NeighbourExchange
from xscale.parallel.context.ring import Ring
from xscale.parallel.context.scan import Scan
from xscale.parallel.context.sequence_sharding import SequenceSharding, TokenShard, shard_tokens
from xscale.parallel.context.state_space import RecurrenceScan, StateSpaceScan
from xscale.parallel.context.ulysses import Ulysses, UlyssesOfReusedScores
from xscale.parallel.layout_invariant_random import HeadsOfCore, TokensOverContext, draw_for_all_heads
from xscale.parallel.tensor.sequence import norms_between_regions

STYLES: dict[ContextStyle, tuple[ModuleType, Callable[[Any], Any]]] = {
    "scan": (scan, Scan),
    "ulysses": (ulysses, Ulysses),
    "ring": (ring, Ring),
    "halo": (halo, Halo),
}
"""In the order in which `auto` tries them."""


def check(model: nn.Module, config: ParallelConfig, path: str) -> list[Problem]:
    """Return what of a model cannot run on a sharded sequence, each with what would work."""
    cp = config.mesh.cp
    if cp == 1:
        return []
    where = f"{path}.mesh.cp"
    problems = []
    if isinstance(model, Disentangled):
        problems += _check_observed(model, config, path)
    if count := global_tokens_of(model):
        problems += _check_global_tokens(model, count, where)
    gathered = _gathered_sublayers(model, config)
    if gathered and config.tensor.sequence and config.mesh.tp > 1:
        what = "mixers on the gathered sequence read all of it, and between blocks tp has shards of a shard"
        fix = f"Take false, or {path}.context.gather=false with mixers that have a style."
        problems.append(Problem(f"{path}.tensor.sequence", what, fix))
    problems += _check_handed_on_scores(model, gathered, where)
    has_shard = _modules_with_shard(model, gathered)
    for module in has_shard:
        if isinstance(module, SequencePooling):
            what = "a window may have tokens of two ranks, and shorter sequences would be sharded anew"
            problems.append(Problem(where, what, "Take cp=1, or stack.pooling=null."))
        if isinstance(module, Halting):
            what = "the ponder cost is a mean over all tokens, and a rank's shard of them may end in padding"
            problems.append(Problem(where, what, "Take cp=1, or stack.halting=null."))
        if isinstance(module, Exits) and module.config.second_target:
            what = "the target of the token after the next may be on another rank"
            problems.append(Problem(where, what, "Take cp=1, or stack.exits.second_target=0."))
        if isinstance(module, MultiToken):
            problems.append(Problem(where, "tokens ahead may be on another rank", "Take cp=1, or model.mtp=null."))
        if isinstance(module, Exits) and module.config.self_sampling is not None and module.config.policy is not None:
            what = "tokens leave in training by those of a window, which other ranks may have"
            problem = Problem(where, what, "Take cp=1, or stack.exits.self_sampling=null.")
            problems += [problem] * bool(module.config.policy.window)
        if isinstance(module, Attention) and module.shards_sequence:
            problems += _check_attention(module, config, path)
        elif isinstance(module, ReusedAttention):
            problems += _check_reused_scores(module, config, path)
        elif isinstance(module, Mixer) and not module.shards_sequence:
            what = f"mixer '{_kind(module)}' mixes the full sequence, and each rank would have a shard of it"
            can = ", ".join(entry.name for entry in MIXERS if entry.part.shards_sequence)
            fix = f"Take cp=1, {path}.context.gather=true, or one of these mixers: {can}."
            problems.append(Problem(where, what, fix))
        if isinstance(module, Sublayer) and not isinstance(module.part, Mixer):
            problems += _check_ffn(module.part, where)
    for norm in norms_between_regions(model):
        traits = NORMS.get(_kind(norm)).traits
        if not (traits.per_token or traits.batch_statistics):
            can = ", ".join(NORMS.able(per_token=True))
            what = f"norm '{_kind(norm)}' mixes tokens, and each rank would have a shard of the sequence"
            problems.append(Problem(where, what, f"Take cp=1, or one of these norms: {can}."))
    return list({str(problem): problem for problem in problems}.values())


def _gathered_sublayers(model: nn.Module, config: ParallelConfig) -> list[Sublayer]:
    """List the sublayers whose mixer runs on the gathered sequence."""

    def has_style(mixer: Mixer) -> bool:
        if isinstance(mixer, ReusedAttention):
            return not _check_reused_scores(mixer, config, "")
        if isinstance(mixer, Attention) and mixer.shards_sequence:
            return isinstance(style_of(mixer, config), str)
        return mixer.shards_sequence

    return gathered_sublayers(model, has_style) if config.context.gather else []


def _modules_with_shard(model: nn.Module, gathered: list[Sublayer]) -> list[nn.Module]:
    """List the modules that work on a shard of the sequence."""
    inside = {module for sublayer in gathered for module in sublayer.part.modules()}
    return [module for module in model.modules() if module not in inside]


def _check_handed_on_scores(model: nn.Module, gathered: list[Sublayer], where: str) -> list[Problem]:
    """List why gathered mixers cannot hand their scores, of all heads, to mixers with a shard of the heads."""
    inside = {mixer for sublayer in gathered for mixer in mixers_of(sublayer)}
    mixers = [module for module in model.modules() if isinstance(module, Mixer) and module.hands_on_scores]
    if not inside.intersection(mixers) or inside.issuperset(mixers):
        return []
    what = "attention scores pass between mixers on the gathered sequence and mixers with a shard of the heads"
    return [Problem(where, what, "Take cp=1, or one core in all blocks.")]


def _check_attention(attention: Attention, config: ParallelConfig, path: str) -> list[Problem]:
    reasons_by_style = style_of(attention, config)
    if isinstance(reasons_by_style, str):
        return []
    kind, cp = _kind(attention.core), config.mesh.cp
    configured = config.context.style
    reported = reasons_by_style if configured == "auto" else {configured: reasons_by_style[configured]}
    what = f"a sequence cannot be sharded over cp={cp} for core '{kind}': " + "; ".join(
        f"{style}: {reason}" for style, reason in reported.items()
    )
    works = [style for style, reason in reasons_by_style.items() if reason is None]
    can = ", ".join(entry.name for entry in CORES if entry.traits.context)
    options = [f"{path}.context.style={' or '.join(works)}"] if works else []
    degrees = _working_degrees(attention, config)
    options += [f"{path}.mesh.cp={' or '.join(map(str, degrees))}"] if degrees else []
    fix = f"Take {', or '.join(options)}." if options else f"Take cp=1, {path}.context.gather=true, or one of: {can}."
    if attention.dropout and not works:
        fix += (
            " Without dropout of attention weights (mixer.dropout=0) more styles work; the blocks' dropout always does."
        )
    return [Problem(f"{path}.context.style", what, fix)]


def _check_global_tokens(model: nn.Module, count: int, where: str) -> list[Problem]:
    """List the heads that find tokens of the text by their index, which the global tokens before it change."""
    for part, key in ((BoundaryHead, "boundary_head"), (SentenceHead, "sentence_head")):
        if any(isinstance(module, part) for module in model.modules()):
            what = f"model.{key} finds the tokens of a shard by their index, which {count} global tokens change"
            return [Problem(where, what, f"Take cp=1, model.{key}=null, or model.global_tokens=0.")]
    return []


def _check_observed(model: Disentangled, config: ParallelConfig, path: str) -> list[Problem]:
    """Check that the decoder's self-attention, in which each token observes others of its own choice, has all keys."""
    for module in model.decoder.modules():
        if isinstance(module, Attention) and not module.cross and style_of(module, config) == "ring":
            what = "each token observes others of its own choice, whose scores are computed by ulysses alone"
            fix = f"Take {path}.context.style=ulysses, with heads that cp x tp divides, or cp=1."
            return [Problem(f"{path}.context.style", what, fix)]
    return []


def _check_reused_scores(mixer: ReusedAttention, config: ParallelConfig, path: str) -> list[Problem]:
    cp, tp = config.mesh.cp, config.mesh.tp
    problems = []
    if config.context.style not in ("auto", "ulysses"):
        what = f"mixer '{_kind(mixer)}' has scores with a shard of the heads, which only ulysses makes"
        problems.append(Problem(f"{path}.context.style", what, "Take auto or ulysses."))
    if reason := ulysses.unsupported_reason(mixer, cp, tp):
        degrees = [cp for cp in range(1, mixer.heads + 1) if ulysses.unsupported_reason(mixer, cp, tp) is None]
        what = f"a sequence cannot be sharded over cp={cp} for mixer '{_kind(mixer)}': {reason}"
        problems.append(Problem(f"{path}.mesh.cp", what, f"Take cp={' or '.join(map(str, degrees or [1]))}."))
    return problems


def _working_degrees(attention: Attention, config: ParallelConfig) -> list[int]:
    """Return the degrees of cp, up to the configured one and the next above it, that the heads allow."""
    cp = config.mesh.cp
    working = [
        degree
        for degree in range(2, attention.query_channels // attention.head_width + 1)
        if isinstance(style_of(attention, _with_cp(config, degree)), str)
    ]
    below, above = [degree for degree in working if degree < cp], [degree for degree in working if degree > cp]
    return below + above[:1]


def _with_cp(config: ParallelConfig, cp: int) -> ParallelConfig:
    """Return the config with another degree of context parallelism."""
    return config.model_copy(update={"mesh": config.mesh.model_copy(update={"cp": cp})})


def style_of(attention: Attention, config: ParallelConfig) -> ContextStyle | dict[ContextStyle, str | None]:
    """Return the style of an attention; if none works, the reason of each (None: works, but is not configured)."""
    wanted = config.context.style
    reasons: dict[ContextStyle, str | None] = {style: _refuses(style, attention, config) for style in STYLES}
    if wanted == "auto":
        return next((style for style, reason in reasons.items() if reason is None), reasons)
    return wanted if reasons[wanted] is None else reasons


def _refuses(style: ContextStyle, attention: Attention, config: ParallelConfig) -> str | None:
    traits = attention.core.traits
    if style not in traits.context:
        allows = ", ".join(traits.context) or "none"
        return f"the core supports {allows}"
    reason: str | None = STYLES[style][0].unsupported_reason(attention, config.mesh.cp, config.mesh.tp)
    return reason


def _check_ffn(part: nn.Module, where: str) -> list[Problem]:
    assert isinstance(part, Part)
    problems = []
    if isinstance(part, Moe):
        return []
    traits = FFNS.get(_kind(part)).traits
    if not (traits.per_token or traits.token_shift):
        can = ", ".join([*FFNS.able(per_token=True), *FFNS.able(token_shift=True)])
        what = f"ffn '{_kind(part)}' mixes tokens, and each rank would have a shard of the sequence"
        problems.append(Problem(where, what, f"Take cp=1, moe, or one of these: {can}."))
    return problems


def _kind(part: Part) -> str:
    assert part.Config.kind is not None
    return part.Config.kind


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
    gathered = _gathered_sublayers(model, config)
    for sublayer in gathered:
        yield "gather", sublayer, lambda sublayer, cp, tp, length: gathered_traffic(sublayer, cp, length)
    for module in _modules_with_shard(model, gathered):
        if isinstance(module, Attention):
            style = style_of(module, config)
            assert isinstance(style, str), "`check` comes first"
            yield style, module, STYLES[style][0].traffic
        elif isinstance(module, ReusedAttention):
            yield "ulysses", module, ulysses.traffic
        elif isinstance(module, S4 | RecurrentMixer):
            yield "scan", module, state_space.traffic
        elif isinstance(module, NeighbourReader):
            yield "neighbours", module, neighbours.traffic


def sequence_sharding_of(model: nn.Module, mesh: Mesh, config: ParallelConfig) -> SequenceSharding | None:
    """Return how all ranks shard the sequences of the full model; None without context parallelism.

    Attention takes the sharding from the tokens, so it is decided once: the stages of a pipeline may differ in styles.
    """
    assert isinstance(model, Model), "the stages of one rank do not know the styles of the others"
    if mesh.context is None:
        return None
    sharded = _modules_with_shard(model, _gathered_sublayers(model, config))
    styles = {style_of(module, config) for module in sharded if isinstance(module, Attention)}
    # The other styles, local mixers and state space models need adjacent chunks on a rank.
    adjacent = any(isinstance(module, NeighbourReader | RecurrentMixer | S4) for module in sharded)
    balanced = "ring" in styles and styles <= {"ring", "ulysses"} and not adjacent
    return SequenceSharding(mesh.context, balanced, global_tokens_of(model))


def apply(model: nn.Module, mesh: Mesh, config: ParallelConfig) -> bool:
    """Substitute attention, random numbers and routing; afterwards the model takes shards made by `shard_tokens`.

    Return whether there was anything to do. `model` may be some stages of a pipeline.
    """
    if mesh.context is None:
        return False
    gathered = _gathered_sublayers(model, config)
    for sublayer in gathered:
        substitute(sublayer, "mix", GatheredSequence(sublayer.mix))
    for module in _modules_with_shard(model, gathered):
        if isinstance(module, Attention):
            style = style_of(module, config)
            assert isinstance(style, str), "`check` comes first"
            substitute(module, "attend", STYLES[style][1](module.core))
            if style == "ulysses":
                draw_for_all_heads(module)
            substitute(module, "make_mask", ShardedMaskBuilder(module, module.make_mask))
        if isinstance(module, ReusedAttention):
            substitute(module, "attend", UlyssesOfReusedScores(module, module.attend))
            substitute(module, "random", HeadsOfCore(module.random, module, module.heads))
        if isinstance(module, S4):
            substitute(module, "convolve", StateSpaceScan(module, module.convolve))
        if isinstance(module, RecurrentMixer):
            substitute(module, "scan", RecurrenceScan(module.scan))
        if isinstance(module, NeighbourReader):
            substitute(module, "with_neighbours", NeighbourExchange(module, module.with_neighbours))
        if isinstance(module, Sublayer | Ffn | Embed | LocalMixer | Gate):
            substitute(module, "random", TokensOverContext(module.random))
        if isinstance(module, Embed) and module.globals:
            GlobalTokensOverContext().add_hooks(module)
        if isinstance(module, Head):
            # Nothing is predicted at a global token: see `SequenceSharding.shard_predicted`.
            module.globals = 0
        if isinstance(module, SentenceContrast):
            substitute(module, "gather_sequence", gather_sequence)
        if isinstance(module, BoundaryHead):
            substitute(module, "full_sequence", SequenceOfShards(module.full_sequence))
        if isinstance(module, Moe):
            substitute(module, "dispatch_plan", GlobalRouting(module.dispatch_plan))
        if isinstance(module, Exits):
            substitute(module, "sum_over_sequence", SumOverContext(mesh.context))
        if isinstance(module, GateBudget):
            substitute(module, "sum_over_sequence", partial(sum_out, group=mesh.context))
        if isinstance(module, LengthHead):
            substitute(module, "sum_over_sequence", TotalOverContext(mesh.context))
        if isinstance(module, SentenceHead):
            substitute(module, "sum_over_sequence", SumOverContext(mesh.context))
            # The first rank has the first tokens; the others compute the same collectives and lose nothing.
            substitute(module, "loss_fraction", module.loss_fraction * (mesh.context.rank() == 0))
    return True


@dataclass(frozen=True)
class SumOverContext:
    """Sums what each rank of cp found in its shard of the sequences, without gradients."""

    group: dist.ProcessGroup

    def __call__(self, nats: Tensor) -> Tensor:
        """A scalar -> its sum over the ranks."""
        return all_gather(nats[None], 0, self.group).sum()


@dataclass(frozen=True)
class TotalOverContext:
    """Sums what each rank of cp has of its shard of the sequences; each rank has a part of the loss of the sum."""

    group: dist.ProcessGroup

    def __call__(self, x: Tensor) -> Tensor:
        """[B, D] -> their sum over the ranks."""
        return copy_in(sum_out(x, self.group), self.group)


__all__ = [
    "STYLES",
    "SequenceSharding",
    "TokenShard",
    "apply",
    "check",
    "estimate",
    "sequence_sharding_of",
    "shard_tokens",
    "style_of",
]
