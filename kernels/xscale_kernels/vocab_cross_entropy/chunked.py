"""The local parts of a vocabulary-parallel loss, a chunk of tokens at a time in torch."""

from __future__ import annotations

import torch

from xscale_kernels.cross_entropy.inplace import cap_, gradient_, refold_
from xscale_kernels.linear_cross_entropy.chunked import kept_tokens, placed, spans, sweep
from xscale_kernels.linear_cross_entropy.result import Gradients
from xscale_kernels.vocab_cross_entropy.share import Share, Three


def statistics(given: Share) -> Three:
    """As reference.statistics."""
    kept = kept_tokens(given.targets, given.terms)
    N, share = given.hidden.shape[0], given.of(kept)
    head, (safe, mine) = share.head(), share.local()
    lse, picked, total = (share.hidden.new_zeros(share.hidden.shape[0], dtype=head.wide) for _ in range(3))
    for span in spans(share.hidden.shape[0], share.chunk):
        logits = head.logits(share.hidden[span].to(head.compute)).to(head.wide)
        cap_(logits, share.terms)
        picked[span] = logits.gather(1, safe[span, None])[:, 0] * mine[span]
        if share.terms.label_smoothing:
            total[span] = logits.sum(1)
        top = logits.amax(1)
        lse[span] = logits.sub_(top[:, None]).exp_().sum(1).log_().add_(top)
    return placed(lse, kept, N), placed(picked, kept, N), placed(total, kept, N)


def gradients(given: Share, lse: torch.Tensor, seed: torch.Tensor, words: int) -> Gradients:
    """As reference.gradients."""
    kept = kept_tokens(given.targets, given.terms)
    N, share = given.hidden.shape[0], given.of(kept)
    if kept is not None:
        lse, seed = lse.index_select(0, kept), seed.index_select(0, kept)
    head, (safe, mine) = share.head(), share.local()
    seed = seed.to(head.wide) * share.counted

    def turn(logits: torch.Tensor, span: slice) -> torch.Tensor:
        block = logits.to(head.wide)
        folded = refold_(block, lse[span], share.terms)
        return gradient_(block, folded, safe[span], seed[span], share.terms, mine[span], words)

    drows = sweep(head, share.hidden, share.chunk, turn)
    return head.gradients(placed(drows, kept, N), share.weight, share.bias)
