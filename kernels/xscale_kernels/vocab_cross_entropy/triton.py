"""The local parts of a vocabulary-parallel loss on a GPU: cuBLAS products around cross_entropy's kernel."""

from __future__ import annotations

import torch

from xscale_kernels.cross_entropy import triton as softmax
from xscale_kernels.cross_entropy.terms import Terms
from xscale_kernels.linear_cross_entropy.chunked import spans, sweep
from xscale_kernels.linear_cross_entropy.result import Gradients
from xscale_kernels.vocab_cross_entropy.share import Share, Three

ELSEWHERE = -1
"""A target that is no local word, but not ignored either."""


def statistics(share: Share) -> Three:
    """As reference.statistics; lse is computed for ignored tokens too, since looking would wait."""
    hidden, ignored = share.hidden, share.terms.ignore_index
    head, (safe, mine) = share.head(), share.local()
    here = safe.where(mine, ignored)
    losses, lse = (hidden.new_empty(hidden.shape[0], dtype=head.wide) for _ in range(2))
    plain = Terms(ignored, share.terms.softcap)
    for span in spans(hidden.shape[0], share.chunk):
        logits = head.logits(hidden[span].to(head.compute))
        softmax.launch(logits, here[span], losses[span], lse[span], None, None, plain, known=False)
    # The plain loss is lse less the target's logit.
    return lse, (lse - losses).where(mine, 0), torch.zeros_like(lse)


def gradients(share: Share, lse: torch.Tensor, seed: torch.Tensor, words: int) -> Gradients:
    """As reference.gradients."""
    head, (safe, mine) = share.head(), share.local()
    here = safe.where(mine, ELSEWHERE).where(share.counted, share.terms.ignore_index)
    seed, lse = seed.to(head.wide).contiguous(), lse.to(head.wide).contiguous()

    def turn(logits: torch.Tensor, span: slice) -> torch.Tensor:
        softmax.launch(logits, here[span], lse[span], lse[span], seed[span], logits, share.terms, known=True)
        return logits

    return head.gradients(sweep(head, share.hidden, share.chunk, turn), share.weight, share.bias)
