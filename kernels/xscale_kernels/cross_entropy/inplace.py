"""Loss and gradient of a block of logits, in the memory of that block: building blocks of the torch implementations."""

from __future__ import annotations

from typing import NamedTuple

import torch

from xscale_kernels.cross_entropy.op import LossTerms


class Folded(NamedTuple):
    """Results of `fold_`, which leaves exp(logits - max) in the block."""

    loss: torch.Tensor
    """[N]; meaningless where the target is ignored."""
    lse: torch.Tensor
    """[N], log sum exp(logits)."""
    sums: torch.Tensor
    """[N], the sum of each row of the block."""
    slope: torch.Tensor | None
    """[N, V], the soft cap's derivative, or None without a cap."""


def cap_(logits: torch.Tensor, terms: LossTerms) -> torch.Tensor | None:
    """Apply the soft cap in place; return its derivative [N, V], or None without a cap."""
    if not terms.softcap:
        return None
    logits.div_(terms.softcap).tanh_()
    slope = logits.square().neg_().add_(1)
    logits.mul_(terms.softcap)
    return slope


def fold_(logits: torch.Tensor, targets: torch.Tensor, terms: LossTerms) -> Folded:
    """Compute each token's loss. logits: [N, V], overwritten. targets: [N] in [0, V)."""
    slope = cap_(logits, terms)
    picked = logits.gather(1, targets[:, None])[:, 0]
    mean = logits.mean(1) if terms.label_smoothing else None
    top = logits.amax(1)
    logits.sub_(top[:, None]).exp_()
    sums = logits.sum(1)
    lse = sums.log().add_(top)
    loss = torch.add(lse, picked, alpha=terms.label_smoothing - 1)
    if mean is not None:
        loss.sub_(mean, alpha=terms.label_smoothing)
    if terms.z_loss:
        loss.addcmul_(lse, lse, value=terms.z_loss)
    return Folded(loss, lse, sums, slope)


def refold_(logits: torch.Tensor, lse: torch.Tensor, terms: LossTerms) -> Folded:
    """Fold a block whose lse [N] is known, as `fold_` does; the loss is not recomputed."""
    slope = cap_(logits, terms)
    logits.sub_(lse[:, None]).exp_()
    return Folded(lse, lse, torch.ones_like(lse), slope)


def gradient_(
    block: torch.Tensor,
    folded: Folded,
    targets: torch.Tensor,
    seed: torch.Tensor,
    terms: LossTerms,
    is_local: torch.Tensor | None = None,
    vocabulary: int | None = None,
) -> torch.Tensor:
    """Turn a folded block into the gradient of sum(seed * loss), in place. seed: [N].

    If the block is a vocabulary shard, is_local [N] masks the tokens whose target is in it, and vocabulary is the
    global size.
    """
    scale = seed / folded.sums
    if terms.z_loss:
        scale.addcmul_(scale, folded.lse, value=2 * terms.z_loss)
    block.mul_(scale[:, None])
    pull = seed * (terms.label_smoothing - 1)
    block.scatter_add_(
        1, targets[:, None], (pull if is_local is None else pull * is_local)[:, None]
    )
    if terms.label_smoothing:
        block.sub_((seed * (terms.label_smoothing / (vocabulary or block.shape[1])))[:, None])
    return block if folded.slope is None else block.mul_(folded.slope)
