"""The local parts of a vocabulary-parallel loss, a chunk of tokens at a time in torch."""

from __future__ import annotations

import torch

from xscale_kernels.cross_entropy.inplace import cap_, gradient_, refold_
from xscale_kernels.cross_entropy.terms import Terms
from xscale_kernels.linear_cross_entropy.chunked import Head, kept_tokens, placed, spans, sweep
from xscale_kernels.linear_cross_entropy.result import Gradients

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def local(targets: torch.Tensor, first: int, size: int, terms: Terms) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets counted from `first` and clipped into range, and which of them are here."""
    shifted = targets - first
    mine = (shifted >= 0) & (shifted < size) & (targets != terms.ignore_index)
    return shifted.where(mine, 0), mine


def statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    first: int,
    terms: Terms,
    chunk: int,
) -> Three:
    """As reference.statistics."""
    N, V = hidden.shape[0], weight.shape[0]
    kept = kept_tokens(targets, terms)
    if kept is not None:
        hidden, targets = hidden.index_select(0, kept), targets.index_select(0, kept)
    chunk = min(chunk, max(hidden.shape[0], 1))
    head = Head(weight, bias, chunk)
    safe, mine = local(targets, first, V, terms)
    lse, picked, total = (hidden.new_zeros(hidden.shape[0], dtype=head.wide) for _ in range(3))
    for span in spans(hidden.shape[0], chunk):
        logits = head.logits(hidden[span].to(head.compute)).to(head.wide)
        cap_(logits, terms)
        picked[span] = logits.gather(1, safe[span, None])[:, 0] * mine[span]
        if terms.label_smoothing:
            total[span] = logits.sum(1)
        top = logits.amax(1)
        lse[span] = logits.sub_(top[:, None]).exp_().sum(1).log_().add_(top)
    return placed(lse, kept, N), placed(picked, kept, N), placed(total, kept, N)


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
    N, V = hidden.shape[0], weight.shape[0]
    kept = kept_tokens(targets, terms)
    if kept is not None:
        hidden, targets, lse, seed = (each.index_select(0, kept) for each in (hidden, targets, lse, seed))
    chunk = min(chunk, max(hidden.shape[0], 1))
    head = Head(weight, bias, chunk)
    safe, mine = local(targets, first, V, terms)
    seed = seed.to(head.wide) * (targets != terms.ignore_index)

    def turn(logits: torch.Tensor, span: slice) -> torch.Tensor:
        block = logits.to(head.wide)
        return gradient_(block, refold_(block, lse[span], terms), safe[span], seed[span], terms, mine[span], words)

    drows = sweep(head, hidden, chunk, turn)
    return head.gradients(placed(drows, kept, N), weight, bias)
