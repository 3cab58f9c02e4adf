"""Vocabulary-parallel cross entropy (Shoeybi et al. 2019): what each rank computes between collectives.

A rank holds rows first .. first + V_local of the output projection. Forward: each rank computes `vocab_statistics`; the
caller all-reduces `lse` by log sum exp, `picked` and `total` by sum; `vocab_loss` is then the same on every rank.
Backward: `vocab_gradients` with the combined lse; the caller all-reduces hidden's gradient, the weight's is complete.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from xscale_kernels import refusals
from xscale_kernels.cross_entropy.op import LossTerms
from xscale_kernels.linear_cross_entropy.chunked import Gradients
from xscale_kernels.linear_cross_entropy.op import default_chunk
from xscale_kernels.select import Implementation, choose
from xscale_kernels.vocab_cross_entropy.shard import ShardStatistics, VocabShard


def _logits(shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Capped logits [N, V_local] in float32 at least, and the soft cap's derivative."""
    logits = F.linear(shard.hidden, shard.weight, shard.bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    cap = shard.terms.softcap
    if not cap:
        return logits, None
    squashed = torch.tanh(logits / cap)
    return cap * squashed, 1 - squashed.square()


def _one_hot(shard: VocabShard, like: torch.Tensor) -> torch.Tensor:
    """One-hot targets [N, V_local]: zeros for targets on other ranks."""
    entries = torch.arange(shard.first, shard.first + like.shape[1], device=like.device)
    return ((shard.targets[:, None] == entries) & shard.counted[:, None]).to(like.dtype)


def reference_statistics(shard: VocabShard) -> ShardStatistics:
    """Compute lse, picked and total, each [N]."""
    logits, _ = _logits(shard)
    picked = (logits * _one_hot(shard, logits)).sum(1)
    total = logits.sum(1) if shard.terms.label_smoothing else torch.zeros_like(picked)
    return logits.logsumexp(1).where(shard.counted, 0), picked, total.where(shard.counted, 0)


def reference_gradients(
    shard: VocabShard, lse: torch.Tensor, seed: torch.Tensor, vocabulary: int
) -> Gradients:
    """Gradients of sum(seed * loss) through this rank's vocabulary entries; lse [N] is combined over the ranks."""
    (logits, slope), terms, kept = _logits(shard), shard.terms, shard.counted
    scale = torch.where(kept, seed.to(lse.dtype), 0)[:, None]
    lse = lse.where(kept, 0)[:, None]
    out = (logits - lse).exp() * (1 + 2 * terms.z_loss * lse)
    out = (
        out
        - (1 - terms.label_smoothing) * _one_hot(shard, logits)
        - terms.label_smoothing / vocabulary
    )
    out = (out * scale).where(kept[:, None], 0)
    narrow = (out if slope is None else out * slope).to(shard.hidden.dtype)
    dbias = None if shard.bias is None else narrow.sum(0).to(shard.bias.dtype)
    return Gradients(narrow @ shard.weight, narrow.t() @ shard.hidden, dbias)


class Statistics(NamedTuple):
    """A rank's partial results for each token, in float32 at least; meaningless for ignored tokens."""

    lse: torch.Tensor
    """[N], log sum exp of the local logits."""
    picked: torch.Tensor
    """[N], the target's logit, 0 where the target is on another rank."""
    total: torch.Tensor
    """[N], the sum of the local logits with label smoothing, zeros without."""


def _triton(hidden: torch.Tensor, terms: LossTerms) -> str | None:
    reason = refusals.unless_triton(hidden)
    # The kernel divides the smoothing by the local vocabulary size.
    return reason or (
        "the kernel has no label smoothing over a sharded vocabulary"
        if terms.label_smoothing
        else None
    )


_HERE = "xscale_kernels.vocab_cross_entropy"
IMPLEMENTATIONS = (
    Implementation("triton", f"{_HERE}.triton", _triton),
    Implementation("torch", f"{_HERE}.chunked", refusals.never),
    Implementation("reference", f"{_HERE}.op", refusals.never, prefix="reference_"),
)


@torch.no_grad()
def vocab_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    first: int,
    *,
    bias: torch.Tensor | None = None,
    terms: LossTerms = LossTerms(),  # noqa: B008 (frozen)
    chunk: int | None = None,
    implementation: str | None = None,
) -> Statistics:
    """Compute this rank's part of each token's loss.

    hidden: [N, D]. weight: [V_local, D] and bias [V_local]: the vocabulary entries from `first` on. targets: [N] int64
    over the whole vocabulary, or terms.ignore_index. chunk: tokens in one block of logits.

    A rank may have no entry: its lse is minus infinity.

    Raises UnusableError when the named implementation refuses.
    """
    if not weight.shape[0]:
        nothing = hidden.new_zeros(
            hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32)
        )
        return Statistics(nothing - float("inf"), nothing, nothing)
    choice = choose("vocab_cross_entropy", IMPLEMENTATIONS, implementation, hidden, terms)
    chunk = chunk or default_chunk(weight.shape[0], hidden.device)
    shard = VocabShard(hidden, weight, bias, targets, first, terms, chunk)
    return Statistics(*choice.implementation.function("statistics")(shard))


def vocab_loss(
    combined: Statistics,
    targets: torch.Tensor,
    vocabulary: int,
    terms: LossTerms = LossTerms(),  # noqa: B008 (frozen)
) -> torch.Tensor:
    """Each token's loss [N] from the combined statistics. vocabulary: its global size."""
    lse, picked, total = combined
    loss = lse - (1 - terms.label_smoothing) * picked + terms.z_loss * lse.square()
    if terms.label_smoothing:
        loss = loss - terms.label_smoothing / vocabulary * total
    return loss.where(targets != terms.ignore_index, 0.0)


@torch.no_grad()
def vocab_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    first: int,
    lse: torch.Tensor,
    seed: torch.Tensor,
    vocabulary: int,
    *,
    bias: torch.Tensor | None = None,
    terms: LossTerms = LossTerms(),  # noqa: B008 (frozen)
    chunk: int | None = None,
    implementation: str | None = None,
) -> Gradients:
    """Compute gradients of sum(seed * loss) through this rank's vocabulary entries.

    lse: [N], combined over the ranks. seed: [N]. vocabulary: its global size. The rest as in
    vocab_statistics. hidden's gradient is a partial sum over ranks; weight's and bias's are complete.
    """
    if not weight.shape[0]:
        dbias = None if bias is None else torch.zeros_like(bias)
        return Gradients(torch.zeros_like(hidden), torch.zeros_like(weight), dbias)
    choice = choose(
        "vocab_cross_entropy (gradients)", IMPLEMENTATIONS, implementation, hidden, terms
    )
    chunk = chunk or default_chunk(weight.shape[0], hidden.device)
    shard = VocabShard(hidden, weight, bias, targets, first, terms, chunk)
    gradients: Gradients = choice.implementation.function("gradients")(shard, lse, seed, vocabulary)
    return gradients
