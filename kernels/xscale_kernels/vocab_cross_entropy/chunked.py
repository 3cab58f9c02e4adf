"""The local parts of a vocabulary-parallel loss, a chunk of tokens at a time in torch."""

from __future__ import annotations

import torch

from xscale_kernels.cross_entropy.inplace import cap_, gradient_, refold_
from xscale_kernels.linear_cross_entropy.chunked import Gradients, kept_tokens, placed, spans, sweep
from xscale_kernels.vocab_cross_entropy.shard import ShardStatistics, VocabShard


def statistics(inputs: VocabShard) -> ShardStatistics:
    """Chunked implementation of `reference_statistics`."""
    kept = kept_tokens(inputs.targets, inputs.terms)
    N, shard = inputs.hidden.shape[0], inputs.select(kept)
    projection, (safe, is_local) = shard.projection(), shard.local()
    lse, picked, total = (
        shard.hidden.new_zeros(shard.hidden.shape[0], dtype=projection.wide) for _ in range(3)
    )
    for span in spans(shard.hidden.shape[0], shard.chunk):
        logits = projection.logits(shard.hidden[span].to(projection.compute)).to(projection.wide)
        cap_(logits, shard.terms)
        picked[span] = logits.gather(1, safe[span, None])[:, 0] * is_local[span]
        if shard.terms.label_smoothing:
            total[span] = logits.sum(1)
        top = logits.amax(1)
        lse[span] = logits.sub_(top[:, None]).exp_().sum(1).log_().add_(top)
    return placed(lse, kept, N), placed(picked, kept, N), placed(total, kept, N)


def gradients(
    inputs: VocabShard, lse: torch.Tensor, seed: torch.Tensor, vocabulary: int
) -> Gradients:
    """Chunked implementation of `reference_gradients`."""
    kept = kept_tokens(inputs.targets, inputs.terms)
    N, shard = inputs.hidden.shape[0], inputs.select(kept)
    if kept is not None:
        lse, seed = lse.index_select(0, kept), seed.index_select(0, kept)
    projection, (safe, is_local) = shard.projection(), shard.local()
    seed = seed.to(projection.wide) * shard.counted

    def turn(logits: torch.Tensor, span: slice) -> torch.Tensor:
        block = logits.to(projection.wide)
        folded = refold_(block, lse[span], shard.terms)
        return gradient_(
            block, folded, safe[span], seed[span], shard.terms, is_local[span], vocabulary
        )

    drows = sweep(projection, shard.hidden, shard.chunk, turn)
    return projection.gradients(placed(drows, kept, N), shard.weight, shard.bias)
