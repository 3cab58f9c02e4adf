"""AdamW by NVIDIA apex's multi-tensor kernel (what its FusedAdam launches), where it is built."""

from __future__ import annotations

import importlib

import torch

from xscale_kernels.adamw.hyper import Hyper
from xscale_kernels.adamw.reference import Tensors

CHUNK = 2048 * 32
DECOUPLED = 1


def step_(
    params: Tensors, grads: Tensors, means: Tensors, squares: Tensors, scale: torch.Tensor | None, hyper: Hyper
) -> None:
    """As reference.step_."""
    from apex.multi_tensor_apply import multi_tensor_applier

    scaled = list(grads) if scale is None else list(torch._foreach_mul(list(grads), scale.to(grads[0].dtype)))
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
        DECOUPLED,
        True,
        hyper.weight_decay,
    )
