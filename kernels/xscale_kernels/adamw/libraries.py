"""AdamW by kernels of libraries: torch's fused step, torch's multi-tensor operations, and NVIDIA apex."""

from __future__ import annotations

import importlib

import torch

from xscale_kernels import torch_private
from xscale_kernels.adamw.hyperparameters import AdamWHyperparameters, Tensors

APEX_DECOUPLED = 1
"""The mode of apex's kernel with decoupled weight decay."""


def torch_step_(
    params: Tensors,
    grads: Tensors,
    means: Tensors,
    squares: Tensors,
    scale: torch.Tensor | None,
    hyper: AdamWHyperparameters,
) -> None:
    """Compute `reference_step_` by torch's fused step; scales the gradients in place.

    It is one pass over each tensor on CPU, few launches on CUDA.
    """
    inverse = None
    if scale is not None and params[0].dtype is torch.float64:
        grads = torch_private.foreach_mul(list(grads), scale.double())
    elif scale is not None:
        # torch divides by grad_scale, which must be float32: too coarse for float64.
        inverse = scale.float().reciprocal()
    count = torch.tensor(float(hyper.step), device=params[0].device)
    torch_private.fused_adamw_(
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


def apex_step_(
    params: Tensors,
    grads: Tensors,
    means: Tensors,
    squares: Tensors,
    scale: torch.Tensor | None,
    hyper: AdamWHyperparameters,
) -> None:
    """Compute `reference_step_` by NVIDIA apex's multi-tensor kernel (behind its FusedAdam), if it is installed."""
    from apex.multi_tensor_apply import multi_tensor_applier

    scaled = (
        list(grads)
        if scale is None
        else list(torch_private.foreach_mul(list(grads), scale.to(grads[0].dtype)))
    )
    overflow = torch.zeros(1, dtype=torch.int32, device=params[0].device)
    multi_tensor_applier(
        importlib.import_module("amp_C").multi_tensor_adam,
        overflow,
        [scaled, list(params), list(means), list(squares)],
        hyper.lr,
        hyper.beta1,
        hyper.beta2,
        hyper.eps,
        hyper.step,
        APEX_DECOUPLED,
        True,
        hyper.weight_decay,
    )


def foreach_step_(
    params: Tensors,
    grads: Tensors,
    means: Tensors,
    squares: Tensors,
    scale: torch.Tensor | None,
    hyper: AdamWHyperparameters,
) -> None:
    """Compute `reference_step_` by torch's multi-tensor operations: a dozen launches for all tensors."""
    g = list(grads)
    if scale is not None:
        g = list(torch_private.foreach_mul(g, scale.to(g[0].dtype)))
    torch_private.foreach_lerp_(list(means), g, 1 - hyper.beta1)
    torch_private.foreach_mul_(list(squares), hyper.beta2)
    torch_private.foreach_addcmul_(list(squares), g, g, value=1 - hyper.beta2)
    divisors = torch_private.foreach_sqrt(list(squares))
    torch_private.foreach_div_(divisors, hyper.correction2**0.5)
    torch_private.foreach_add_(divisors, hyper.eps)
    if hyper.weight_decay:
        torch_private.foreach_mul_(list(params), 1 - hyper.lr * hyper.weight_decay)
    torch_private.foreach_addcdiv_(
        list(params), list(means), list(divisors), value=-hyper.lr / hyper.correction1
    )
