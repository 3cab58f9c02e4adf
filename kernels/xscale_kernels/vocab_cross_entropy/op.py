"""Vocabulary-parallel cross entropy (Shoeybi et al. 2019), the parts between the collectives, without the logits.

A rank holds rows first .. first + V_local of the output projection. Forward: each rank computes `vocab_statistics`; the
ranks' `lse` are combined by log sum exp, `picked` and `total` by a sum; `vocab_loss` is then the same everywhere.
Backward: `vocab_gradients` with the combined lse; hidden's gradient is to be summed over ranks, the weight's is whole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from xscale_kernels.cross_entropy.inplace import Folded, cap_, gradient_, refold_
from xscale_kernels.cross_entropy.terms import Terms
from xscale_kernels.linear_cross_entropy.chunked import Head, kept_tokens, placed, spans
from xscale_kernels.linear_cross_entropy.op import default_chunk
from xscale_kernels.linear_cross_entropy.result import Gradients


class Statistics(NamedTuple):
    """What a rank knows of each token, in float32 at least; zeros for ignored tokens on CPU, undefined on CUDA."""

    lse: torch.Tensor
    """[N], log sum exp of the local logits."""
    picked: torch.Tensor
    """[N], the target's logit, 0 where the target is on another rank."""
    total: torch.Tensor
    """[N], the sum of the local logits with label smoothing, zeros without."""


def _local(targets: torch.Tensor, first: int, size: int, terms: Terms) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets counted from `first` and clipped into range, and which of them are here."""
    shifted = targets - first
    mine = (shifted >= 0) & (shifted < size) & (targets != terms.ignore_index)
    return shifted.where(mine, 0), mine


@torch.no_grad()
def vocab_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    first: int,
    *,
    bias: torch.Tensor | None = None,
    terms: Terms = Terms(),  # noqa: B008 (frozen)
    chunk: int | None = None,
) -> Statistics:
    """This rank's part of each token's loss.

    hidden: [N, D]. weight: [V_local, D] and bias [V_local], the words from `first` on. targets: [N] int64 over the
    whole vocabulary, or terms.ignore_index. chunk: tokens in one block of logits.
    """
    N, V = hidden.shape[0], weight.shape[0]
    kept = kept_tokens(targets, terms)
    if kept is not None:
        hidden, targets = hidden.index_select(0, kept), targets.index_select(0, kept)
    chunk = min(chunk or default_chunk(V, hidden.device), max(hidden.shape[0], 1))
    head = Head(weight, bias, chunk)
    safe, mine = _local(targets, first, V, terms)
    lse, picked, total = (hidden.new_zeros(hidden.shape[0], dtype=head.wide) for _ in range(3))
    for span in spans(hidden.shape[0], chunk):
        logits = head.logits(hidden[span].to(head.compute))
        cap_(logits, terms)
        picked[span] = logits.gather(1, safe[span, None])[:, 0] * mine[span]
        if terms.label_smoothing:
            total[span] = logits.sum(1)
        top = logits.amax(1)
        lse[span] = logits.sub_(top[:, None]).exp_().sum(1).log_().add_(top)
    return Statistics(*(placed(each, kept, N) for each in (lse, picked, total)))


def vocab_loss(combined: Statistics, targets: torch.Tensor, words: int, terms: Terms = Terms()) -> torch.Tensor:  # noqa: B008
    """Each token's loss [N] from the combined statistics. words: the size of the whole vocabulary."""
    lse, picked, total = combined
    loss = lse - (1 - terms.label_smoothing) * picked + terms.z_loss * lse.square()
    if terms.label_smoothing:
        loss = loss - terms.label_smoothing / words * total
    return loss.where(targets != terms.ignore_index, 0.0)


@torch.no_grad()
def vocab_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    first: int,
    lse: torch.Tensor,
    seed: torch.Tensor,
    words: int,
    *,
    bias: torch.Tensor | None = None,
    terms: Terms = Terms(),  # noqa: B008 (frozen)
    chunk: int | None = None,
) -> Gradients:
    """Gradients of sum(seed * loss) through this rank's words.

    lse: [N], combined over the ranks. seed: [N]. words: the size of the whole vocabulary. The rest as vocab_statistics.
    hidden's gradient is this rank's part of a sum; weight's and bias's are whole.
    """
    N, V = hidden.shape[0], weight.shape[0]
    kept = kept_tokens(targets, terms)
    if kept is not None:
        hidden, targets, lse, seed = (each.index_select(0, kept) for each in (hidden, targets, lse, seed))
    chunk = min(chunk or default_chunk(V, hidden.device), max(hidden.shape[0], 1))
    head = Head(weight, bias, chunk)
    safe, mine = _local(targets, first, V, terms)
    seed = seed.to(head.wide) * (targets != terms.ignore_index)
    drows = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    for span in spans(hidden.shape[0], chunk):
        rows = hidden[span].to(head.compute)
        logits = head.logits(rows)
        folded: Folded = refold_(logits, lse[span], terms)
        gradient_(logits, folded, safe[span], seed[span], terms, mine[span], words)
        head.back(logits, rows, drows[span])
    return head.gradients(placed(drows, kept, N), weight, bias)
