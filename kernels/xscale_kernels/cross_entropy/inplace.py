"""Loss and gradient of a block of logits, in the memory of that block: what the torch implementations are made of."""

from __future__ import annotations

from typing import NamedTuple

import torch

from xscale_kernels.cross_entropy.terms import Terms


class Folded(NamedTuple):
    """What `fold_` leaves: the block now holds exp(logits - max)."""

    loss: torch.Tensor
    """[N]; meaningless where the target is ignored."""
    lse: torch.Tensor
    """[N], log sum exp(logits)."""
    sums: torch.Tensor
    """[N], the sum of each row of the block."""
    slope: torch.Tensor | None
    """[N, V], the soft cap's derivative, where there is one."""


def cap_(logits: torch.Tensor, terms: Terms) -> torch.Tensor | None:
    """Squashes the logits in place; returns the derivative [N, V], or None where there is no cap."""
    if not terms.softcap:
        return None
    logits.div_(terms.softcap).tanh_()
    slope = logits.square().neg_().add_(1)
    logits.mul_(terms.softcap)
    return slope


def fold_(logits: torch.Tensor, targets: torch.Tensor, terms: Terms) -> Folded:
    """Each token's loss. logits: [N, V], overwritten. targets: [N] in [0, V)."""
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


def refold_(logits: torch.Tensor, lse: torch.Tensor, terms: Terms) -> Folded:
    """As `fold_` for a block whose lse [N] is known; the loss is not computed again."""
    slope = cap_(logits, terms)
    logits.sub_(lse[:, None]).exp_()
    return Folded(lse, lse, torch.ones_like(lse), slope)


def gradient_(
    block: torch.Tensor,
    folded: Folded,
    targets: torch.Tensor,
    seed: torch.Tensor,
    terms: Terms,
    mine: torch.Tensor | None = None,
    words: int | None = None,
) -> torch.Tensor:
    """Turns a folded block into the gradient of sum(seed * loss), in place. seed: [N].

    Where the block is a part of the vocabulary: mine [N] says whose target is in it, words is the whole's size.
    """
    scale = seed / folded.sums
    if terms.z_loss:
        scale.addcmul_(scale, folded.lse, value=2 * terms.z_loss)
    block.mul_(scale[:, None])
    pull = seed * (terms.label_smoothing - 1)
    block.scatter_add_(1, targets[:, None], (pull if mine is None else pull * mine)[:, None])
    if terms.label_smoothing:
        block.sub_((seed * (terms.label_smoothing / (words or block.shape[1])))[:, None])
    return block if folded.slope is None else block.mul_(folded.slope)
