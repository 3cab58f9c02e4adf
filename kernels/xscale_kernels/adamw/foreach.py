"""AdamW by torch's multi-tensor operations: a dozen launches for all tensors."""

from __future__ import annotations

import torch

from xscale_kernels.adamw.hyper import Hyper
from xscale_kernels.adamw.reference import Tensors


def step_(
    params: Tensors, grads: Tensors, means: Tensors, squares: Tensors, scale: torch.Tensor | None, hyper: Hyper
) -> None:
    """As reference.step_."""
    g = list(grads)
    if scale is not None:
        g = list(torch._foreach_mul(g, scale.to(g[0].dtype)))
    torch._foreach_lerp_(list(means), g, 1 - hyper.beta1)
    torch._foreach_mul_(list(squares), hyper.beta2)
    torch._foreach_addcmul_(list(squares), g, g, value=1 - hyper.beta2)
    divisors = torch._foreach_sqrt(list(squares))
    torch._foreach_div_(divisors, hyper.correction2**0.5)
    torch._foreach_add_(divisors, hyper.eps)
    if hyper.weight_decay:
        torch._foreach_mul_(list(params), 1 - hyper.lr * hyper.weight_decay)
    torch._foreach_addcdiv_(list(params), list(means), list(divisors), value=-hyper.lr / hyper.correction1)
