"""The local parts of a vocabulary-parallel loss on a GPU: cuBLAS products around cross_entropy's kernel."""

from __future__ import annotations

import torch

from xscale_kernels.cross_entropy import triton as softmax
from xscale_kernels.cross_entropy.op import LossTerms
from xscale_kernels.linear_cross_entropy.chunked import Gradients, spans, sweep
from xscale_kernels.vocab_cross_entropy.shard import ShardStatistics, VocabShard

ON_OTHER_RANK = -1
"""Target index of a token whose target is on another rank: matches no local column, and is not ignored."""


def statistics(shard: VocabShard) -> ShardStatistics:
    """Triton `reference_statistics`, with the lse of ignored tokens too, since skipping them would synchronise."""
    hidden, ignored = shard.hidden, shard.terms.ignore_index
    projection, (safe, is_local) = shard.projection(), shard.local()
    local_targets = safe.where(is_local, ignored)
    losses, lse = (hidden.new_empty(hidden.shape[0], dtype=projection.wide) for _ in range(2))
    plain = LossTerms(ignored, shard.terms.softcap)
    for span in spans(hidden.shape[0], shard.chunk):
        logits = projection.logits(hidden[span].to(projection.compute))
        softmax.launch(
            logits, local_targets[span], losses[span], lse[span], None, None, plain, known=False
        )
    # The plain loss is lse less the target's logit.
    return lse, (lse - losses).where(is_local, 0), torch.zeros_like(lse)


def gradients(
    shard: VocabShard, lse: torch.Tensor, seed: torch.Tensor, vocabulary: int
) -> Gradients:
    """Triton implementation of `reference_gradients`."""
    projection, (safe, is_local) = shard.projection(), shard.local()
    local_targets = safe.where(is_local, ON_OTHER_RANK).where(
        shard.counted, shard.terms.ignore_index
    )
    seed, lse = seed.to(projection.wide).contiguous(), lse.to(projection.wide).contiguous()

    def turn(logits: torch.Tensor, span: slice) -> torch.Tensor:
        softmax.launch(
            logits,
            local_targets[span],
            lse[span],
            lse[span],
            seed[span],
            logits,
            shard.terms,
            known=True,
        )
        return logits

    return projection.gradients(
        sweep(projection, shard.hidden, shard.chunk, turn), shard.weight, shard.bias
    )
