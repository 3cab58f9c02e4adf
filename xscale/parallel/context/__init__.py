"""Context parallelism: sequences, and with them the residual stream, are sharded over the ranks of cp.

Per-token modules run on the shard. Attention gets the keys it needs by one of four styles, each a wrapper of the core;
a core's traits list the styles that it supports. A convolution over the sequence fetches its neighbours, and a state
space model or another recurrent mixer the states of the ranks before. With context.gather what has no style runs on the
gathered sequence.
"""

from torch import nn

from xscale.mesh.mesh import Mesh
from xscale.nn.module import substitute
from xscale.nn.roles import Role
from xscale.parallel.config import ParallelConfig
from xscale.parallel.context.check import check
from xscale.parallel.context.gathered import GatheredSequence
from xscale.parallel.context.sequence_sharding import SequenceSharding, TokenShard, shard_tokens
from xscale.parallel.context.styles import (
    STYLES,
    estimate,
    modules_with_shard,
    sequence_sharding_of,
    style_of,
    styles_of_modules,
    sublayers_on_gathered,
)
from xscale.parallel.context.table import CONTEXT, ContextRanks
from xscale.parallel.roles import apply_table, seams_in


def apply(model: nn.Module, mesh: Mesh, config: ParallelConfig) -> bool:
    """Do at each seam what the table says of its role; afterwards the model takes shards made by `shard_tokens`.

    Return whether there was anything to do. `model` may be some stages of a pipeline.
    """
    if mesh.context is None:
        return False
    gathered = sublayers_on_gathered(model, config)
    for sublayer, seam, _ in seams_in(gathered, Role.SEQUENCE_MIXING):
        substitute(sublayer, seam, GatheredSequence(getattr(sublayer, seam)))
    apply_table(CONTEXT, modules_with_shard(model, gathered), ContextRanks(mesh.context, config))
    return True


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
