"""cross_entropy by QuACK's kernels for Hopper and Blackwell, which keep a row in the shared memory of a cluster.

Written from QuACK's source (quack.cross_entropy) and tested against a stand-in; not run on hardware yet.
"""

from __future__ import annotations

import torch

from xscale_kernels.cross_entropy.op import LossTerms


def quack_forward(
    logits: torch.Tensor, targets: torch.Tensor, terms: LossTerms
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `chunked.forward` by QuACK's kernel, which has no soft cap, z-loss and label smoothing."""
    from quack.cross_entropy import cross_entropy_fwd

    loss, lse = cross_entropy_fwd(
        logits.contiguous(), targets.contiguous(), ignore_index=terms.ignore_index, return_lse=True
    )
    return loss, lse


def quack_backward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    seed: torch.Tensor,
    terms: LossTerms,
) -> torch.Tensor:
    """Compute `chunked.backward` by QuACK's kernel; an ignored token's logits must be finite."""
    from quack.cross_entropy import cross_entropy_bwd

    gradient: torch.Tensor = cross_entropy_bwd(
        logits.contiguous(),
        targets.contiguous(),
        seed.float().contiguous(),
        lse,
        ignore_index=terms.ignore_index,
    )
    return gradient
