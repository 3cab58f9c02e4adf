"""Vocabulary-parallel cross entropy (Shoeybi et al. 2019), the parts between the collectives, without the logits.

A rank holds rows first .. first + V_local of the output projection. Forward: each rank computes `vocab_statistics`; the
ranks' `lse` are combined by log sum exp, `picked` and `total` by a sum; `vocab_loss` is then the same everywhere.
Backward: `vocab_gradients` with the combined lse; hidden's gradient is to be summed over ranks, the weight's is whole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from xscale_kernels import refusals
from xscale_kernels.cross_entropy.terms import Terms
from xscale_kernels.linear_cross_entropy.op import default_chunk
from xscale_kernels.linear_cross_entropy.result import Gradients
from xscale_kernels.select import Implementation, choose
from xscale_kernels.vocab_cross_entropy.share import Share


class Statistics(NamedTuple):
    """What a rank knows of each token, in float32 at least; for ignored tokens without meaning."""

    lse: torch.Tensor
    """[N], log sum exp of the local logits."""
    picked: torch.Tensor
    """[N], the target's logit, 0 where the target is on another rank."""
    total: torch.Tensor
    """[N], the sum of the local logits with label smoothing, zeros without."""


def _triton(hidden: torch.Tensor, terms: Terms) -> str | None:
    reason = refusals.unless_triton(hidden)
    # The kernel divides the smoothing by the words it sees, which are not all.
    return reason or ("label smoothing is left to torch" if terms.label_smoothing else None)


_HERE = "xscale_kernels.vocab_cross_entropy"
IMPLEMENTATIONS = (
    Implementation("triton", f"{_HERE}.triton", _triton),
    Implementation("torch", f"{_HERE}.chunked", refusals.never),
    Implementation("reference", f"{_HERE}.reference", refusals.never),
)


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
    implementation: str | None = None,
) -> Statistics:
    """This rank's part of each token's loss.

    hidden: [N, D]. weight: [V_local, D] and bias [V_local], the words from `first` on. targets: [N] int64 over the
    whole vocabulary, or terms.ignore_index. chunk: tokens in one block of logits.

    Raises UnusableError when the named implementation refuses.
    """
    choice = choose("vocab_cross_entropy", IMPLEMENTATIONS, implementation, hidden, terms)
    chunk = chunk or default_chunk(weight.shape[0], hidden.device)
    share = Share(hidden, weight, bias, targets, first, terms, chunk)
    return Statistics(*choice.implementation.load().statistics(share))


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
    implementation: str | None = None,
) -> Gradients:
    """Gradients of sum(seed * loss) through this rank's words.

    lse: [N], combined over the ranks. seed: [N]. words: the size of the whole vocabulary. The rest as vocab_statistics.
    hidden's gradient is this rank's part of a sum; weight's and bias's are whole.
    """
    choice = choose("vocab_cross_entropy (gradients)", IMPLEMENTATIONS, implementation, hidden, terms)
    chunk = chunk or default_chunk(weight.shape[0], hidden.device)
    share = Share(hidden, weight, bias, targets, first, terms, chunk)
    found: Gradients = choice.implementation.load().gradients(share, lse, seed, words)
    return found
