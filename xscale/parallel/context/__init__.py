"""Context parallelism: sequences, and with them the residual stream, are sharded over the ranks of cp.

Per-token modules run on the shard. Attention gets the keys it needs by one of four styles, each a wrapper of the core;
a core's traits list the styles that it supports. A convolution over the sequence fetches its neighbours, and a state
space model or another recurrent mixer the states of the ranks before. With context.gather what has no style runs on the
gathered sequence.
"""

from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from xscale.mesh.collectives import all_gather, copy_in, sum_out
from xscale.mesh.mesh import Mesh
from xscale.nn.block import Sublayer
from xscale.nn.boundary_head import BoundaryHead
from xscale.nn.exits import Exits
from xscale.nn.ffn.ffn import Ffn
from xscale.nn.ffn.moe import Moe
from xscale.nn.gates import Gate, GateBudget
from xscale.nn.head import Head
from xscale.nn.length_head import LengthHead
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.local_mixer import LocalMixer, NeighbourReader
from xscale.nn.mixer.recurrent_mixer import RecurrentMixer
from xscale.nn.mixer.reused_attention import ReusedAttention
from xscale.nn.mixer.s4 import S4
from xscale.nn.model.embed import Embed
from xscale.nn.module import substitute
from xscale.nn.multi_token import MultiToken
from xscale.nn.pooler import SentenceHead
from xscale.nn.sentence_contrast import SentenceContrast
from xscale.parallel.config import ParallelConfig
from xscale.parallel.context.check import check
from xscale.parallel.context.gathered import GatheredSequence
from xscale.parallel.context.global_tokens import GlobalTokensOverContext, gather_sequence
from xscale.parallel.context.heads import AheadOfShard, FirstStateOfShards, SequenceOfShards, TargetsOfShard
from xscale.parallel.context.mask import ShardedMaskBuilder
from xscale.parallel.context.moe import GlobalRouting
from xscale.parallel.context.neighbours import NeighbourExchange
from xscale.parallel.context.sequence_sharding import SequenceSharding, TokenShard, shard_tokens
from xscale.parallel.context.state_space import RecurrenceScan, StateSpaceScan
from xscale.parallel.context.styles import (
    STYLES,
    estimate,
    modules_with_shard,
    sequence_sharding_of,
    style_of,
    styles_of_modules,
    sublayers_on_gathered,
)
from xscale.parallel.context.ulysses import UlyssesOfReusedScores
from xscale.parallel.layout_invariant_random import HeadsOfCore, TokensOverContext, draw_for_all_heads


def apply(model: nn.Module, mesh: Mesh, config: ParallelConfig) -> bool:
    """Substitute attention, random numbers and routing; afterwards the model takes shards made by `shard_tokens`.

    Return whether there was anything to do. `model` may be some stages of a pipeline.
    """
    if mesh.context is None:
        return False
    gathered = sublayers_on_gathered(model, config)
    for sublayer in gathered:
        substitute(sublayer, "mix", GatheredSequence(sublayer.mix))
    for module in modules_with_shard(model, gathered):
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
            substitute(module, "second_targets", TargetsOfShard(module.second_targets))
        if isinstance(module, GateBudget):
            substitute(module, "sum_over_sequence", partial(sum_out, group=mesh.context))
        if isinstance(module, LengthHead):
            substitute(module, "sum_over_sequence", TotalOverContext(mesh.context))
        if isinstance(module, MultiToken):
            substitute(module, "ahead", AheadOfShard(module.ahead))
        if isinstance(module, SentenceHead):
            substitute(module, "first_state", FirstStateOfShards(module.globals, module.first_state))
            substitute(module, "loss_fraction", module.loss_fraction / mesh.context.size())
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
    "styles_of_modules",
]
