"""The definition of an AdamW step, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xscale_kernels.adamw.hyper import Hyper
from xscale_kernels.rows import wide

Tensors = Sequence[torch.Tensor]


def step_(
    params: Tensors, grads: Tensors, means: Tensors, squares: Tensors, scale: torch.Tensor | None, hyper: Hyper
) -> None:
    """Changes params, means and squares in place. Shapes as in op.py."""
    for param, grad, mean, square in zip(params, grads, means, squares, strict=True):
        compute = wide(param.dtype)
        g = grad.to(compute) if scale is None else grad.to(compute) * scale.to(compute)
        m = mean.to(compute).lerp(g, 1 - hyper.beta1)
        v = square.to(compute) * hyper.beta2 + g.square() * (1 - hyper.beta2)
        p = param.to(compute) * (1 - hyper.lr * hyper.weight_decay)
        divisor = (v / hyper.correction2).sqrt() + hyper.eps
        param.copy_(p - hyper.lr / hyper.correction1 * m / divisor)
        mean.copy_(m)
        square.copy_(v)
