"""AdamW by torch's fused step: one pass over each tensor on CPU, few launches on CUDA."""

from __future__ import annotations

import torch

from xscale_kernels.adamw.hyper import Hyper
from xscale_kernels.adamw.reference import Tensors


def step_(
    params: Tensors, grads: Tensors, means: Tensors, squares: Tensors, scale: torch.Tensor | None, hyper: Hyper
) -> None:
    """As reference.step_, but the gradients are scaled in place."""
    inverse = None
    if scale is not None and params[0].dtype is torch.float64:
        grads = torch._foreach_mul(list(grads), scale.double())
    elif scale is not None:
        # torch divides by its grad_scale; it is float32 there by contract, too coarse for float64.
        inverse = scale.float().reciprocal()
    count = torch.tensor(float(hyper.step), device=params[0].device)
    torch._fused_adamw_(
        list(params),
        list(grads),
        list(means),
        list(squares),
        [],
        [count] * len(params),
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=inverse,
        found_inf=None,
    )
