"""linear_cross_entropy by Liger (Hsu et al. 2024): torch's products around its Triton kernel, a chunk at a time."""

from __future__ import annotations

import torch

from xscale_kernels.cross_entropy.op import LossTerms
from xscale_kernels.linear_cross_entropy.chunked import Gradients


def _sweep(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    seed: torch.Tensor | None,
    terms: LossTerms,
    chunk: int,
) -> tuple[torch.Tensor, Gradients | None]:
    from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

    (N, D), V = hidden.shape, weight.shape[0]
    # Without gradient mode its products write into one buffer of logits.
    with torch.no_grad():
        losses, _, _, _, dhidden, dweight, dbias = fused_linear_cross_entropy_forward(
            hidden.contiguous(),
            weight.contiguous(),
            targets.contiguous(),
            bias=bias,
            ignore_index=terms.ignore_index,
            lse_square_scale=terms.z_loss,
            label_smoothing=terms.label_smoothing,
            reduction="none",
            softcap=terms.softcap or None,
            # Sums over chunks in the weight's dtype would lose small chunks in half precision.
            accum_dtype=torch.float32,
            token_grad_output=seed,
            compute_gradients=seed is not None,
            weight_requires_grad=True,
            # Its chunk has N * D * chunk_mem_const / V tokens, rounded up to a power of two.
            chunk_mem_const=max(1, -(-V * chunk // (N * D))),
        )
    return losses, None if seed is None else Gradients(dhidden, dweight, dbias)


def liger_forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    seed: torch.Tensor | None,
    terms: LossTerms,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor, Gradients | None]:
    """Compute `chunked.forward` by Liger, with zeros for lse, which `liger_backward` computes again."""
    losses, gradients = _sweep(hidden, weight, bias, targets, seed, terms, chunk)
    return losses, torch.zeros_like(losses), gradients


def liger_backward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    lse: torch.Tensor,
    seed: torch.Tensor,
    terms: LossTerms,
    chunk: int,
) -> Gradients:
    """Compute `chunked.backward` by Liger."""
    gradients = _sweep(hidden, weight, bias, targets, seed, terms, chunk)[1]
    assert gradients is not None
    return gradients
