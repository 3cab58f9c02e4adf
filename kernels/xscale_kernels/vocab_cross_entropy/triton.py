"""The local parts of a vocabulary-parallel loss on a GPU: cuBLAS products around cross_entropy's kernel."""

from __future__ import annotations

import torch

from xscale_kernels.cross_entropy import triton as softmax
from xscale_kernels.cross_entropy.terms import Terms
from xscale_kernels.linear_cross_entropy.chunked import Head, spans, sweep
from xscale_kernels.linear_cross_entropy.result import Gradients
from xscale_kernels.vocab_cross_entropy.chunked import Three, local

ELSEWHERE = -1
"""A target that is no local word, but not ignored either."""


def statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    first: int,
    terms: Terms,
    chunk: int,
) -> Three:
    """As reference.statistics; lse is computed for ignored tokens too, since looking would wait."""
    head = Head(weight, bias, min(chunk, max(hidden.shape[0], 1)))
    safe, mine = local(targets, first, weight.shape[0], terms)
    here = safe.where(mine, terms.ignore_index)
    losses, lse = (hidden.new_empty(hidden.shape[0], dtype=head.wide) for _ in range(2))
    plain = Terms(terms.ignore_index, terms.softcap)
    for span in spans(hidden.shape[0], chunk):
        logits = head.logits(hidden[span].to(head.compute))
        softmax.launch(logits, here[span], losses[span], lse[span], None, None, plain, known=False)
    # The plain loss is lse less the target's logit.
    return lse, (lse - losses).where(mine, 0), torch.zeros_like(lse)


def gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    first: int,
    lse: torch.Tensor,
    seed: torch.Tensor,
    words: int,
    terms: Terms,
    chunk: int,
) -> Gradients:
    """As reference.gradients."""
    head = Head(weight, bias, min(chunk, max(hidden.shape[0], 1)))
    safe, mine = local(targets, first, weight.shape[0], terms)
    here = safe.where(mine, ELSEWHERE).where(targets != terms.ignore_index, terms.ignore_index)
    seed, lse = seed.to(head.wide).contiguous(), lse.to(head.wide).contiguous()

    def turn(logits: torch.Tensor, span: slice) -> torch.Tensor:
        softmax.launch(logits, here[span], lse[span], lse[span], seed[span], logits, terms, known=True)
        return logits

    drows = sweep(head, hidden, chunk, turn)
    return head.gradients(drows, weight, bias)
