"""adamw_step_ (Loshchilov and Hutter 2017): one step of all tensors of a parameter group, fused if possible."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xscale_kernels import cuda_library, refusals
from xscale_kernels.adamw.cuda import SOURCE, TYPES
from xscale_kernels.adamw.hyperparameters import AdamWHyperparameters, Tensors
from xscale_kernels.rows import wide
from xscale_kernels.select import Implementation, choose


def reference_step_(
    params: Tensors,
    grads: Tensors,
    means: Tensors,
    squares: Tensors,
    scale: torch.Tensor | None,
    hyper: AdamWHyperparameters,
) -> None:
    """Update params, means and squares in place."""
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


Roles = tuple[Sequence[torch.Tensor], ...]


def _mixed_or_strided(roles: Roles) -> str | None:
    for role in roles:
        if len({tensor.dtype for tensor in role}) > 1:
            return "the tensors of one role have different dtypes; call once for each dtype"
    if not all(tensor.is_contiguous() for role in roles for tensor in role):
        return "some tensors are not contiguous"
    return None


def _torch(roles: Roles) -> str | None:
    if len({tensor.dtype for role in roles for tensor in role}) > 1:
        return "torch's fused step takes one dtype for all roles"
    return (
        None
        if roles[0][0].device.type in ("cpu", "cuda")
        else f"the tensors are on {roles[0][0].device.type}"
    )


def _foreach(roles: Roles) -> str | None:
    if len({tensor.dtype for role in roles for tensor in role}) > 1:
        return "the roles have different dtypes"
    return None


def _apex(roles: Roles) -> str | None:
    reason = refusals.unless_apex("amp_C", roles[0][0]) or _mixed_or_strided(roles)
    if reason is None and roles[2][0].dtype is not torch.float32:
        return "apex needs float32 moments"
    return reason


def _triton(roles: Roles) -> str | None:
    return refusals.unless_triton(roles[0][0]) or _mixed_or_strided(roles)


def _cuda(roles: Roles) -> str | None:
    reason = refusals.unless_cuda(roles[0][0]) or _mixed_or_strided(roles)
    if reason is None and not {roles[0][0].dtype, roles[1][0].dtype} <= set(TYPES):
        return "the kernel takes parameters and gradients of float32, bfloat16 or float16"
    if reason is None and {roles[2][0].dtype, roles[3][0].dtype} != {torch.float32}:
        return "the kernel takes float32 moments"
    return reason or cuda_library.refusal(SOURCE, roles[0][0])


_HERE = "xscale_kernels.adamw"
IMPLEMENTATIONS = (
    Implementation("cuda", f"{_HERE}.cuda", _cuda),
    Implementation("apex", f"{_HERE}.libraries", _apex, prefix="apex_"),
    Implementation("torch", f"{_HERE}.libraries", _torch, prefix="torch_"),
    Implementation("triton", f"{_HERE}.triton", _triton),
    Implementation("foreach", f"{_HERE}.libraries", _foreach, prefix="foreach_"),
    Implementation("reference", f"{_HERE}.op", refusals.never, prefix="reference_"),
)


@torch.no_grad()
def adamw_step_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    means: Sequence[torch.Tensor],
    squares: Sequence[torch.Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    scale: torch.Tensor | None = None,
    implementation: str | None = None,
) -> None:
    """One AdamW step in place on params, means (of gradients) and squares (their running mean square).

    The four sequences match in length and in the shape of each tensor, on one device. step: counts from 1. lr, betas,
    eps, weight_decay (decoupled): as the paper. scale: a tensor of one element that multiplies every gradient first
    (the clip's coefficient), read on the device, so clipping costs no pass and no synchronisation; an implementation
    may leave the gradients scaled.

    Raises ValueError for sequences that do not match, UnusableError when the named implementation refuses.
    """
    roles = (params, grads, means, squares)
    if any(len(role) != len(params) for role in roles):
        raise ValueError(
            f"adamw_step_ takes as many tensors in each role, got {[len(role) for role in roles]}"
        )
    for index, counterparts in enumerate(zip(*roles, strict=True)):
        if any(tensor.shape != counterparts[0].shape for tensor in counterparts):
            raise ValueError(
                f"tensor {index} differs in shape between roles: {[[*tensor.shape] for tensor in counterparts]}"
            )
    if step < 1:
        raise ValueError(f"steps count from 1, got {step}")
    if not params:
        return
    hyper = AdamWHyperparameters(step, float(lr), *betas, eps, weight_decay)
    choice = choose("adamw", IMPLEMENTATIONS, implementation, roles)
    choice.implementation.function("step_")(params, grads, means, squares, scale, hyper)
