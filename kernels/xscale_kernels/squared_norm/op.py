"""squared_norm: the sum of squares over many tensors: the local part of clipping by global norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xscale_kernels import cuda_library, refusals
from xscale_kernels.rows import wide
from xscale_kernels.select import Implementation, choose
from xscale_kernels.squared_norm.cuda import SOURCE, TYPES


def reference_squared_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of squares of all elements, in float32 at least within a tensor and in float64 over the tensors."""
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    for tensor in tensors:
        total = total + tensor.to(wide(tensor.dtype)).square().sum()
    return total


def _apex(tensors: Sequence[torch.Tensor]) -> str | None:
    reason = refusals.unless_apex("amp_C", tensors[0])
    if reason is None and len({tensor.dtype for tensor in tensors}) > 1:
        return "apex takes tensors of one dtype"
    return reason


def _torch(tensors: Sequence[torch.Tensor]) -> str | None:
    same = len({(tensor.device, tensor.dtype) for tensor in tensors}) == 1
    return None if same else "the tensors differ in device or dtype"


def _triton(tensors: Sequence[torch.Tensor]) -> str | None:
    return refusals.unless_triton(tensors[0]) or _torch(tensors)


def _cuda(tensors: Sequence[torch.Tensor]) -> str | None:
    reason = _torch(tensors)
    if reason is None and tensors[0].dtype not in TYPES:
        return f"the kernel is for float32, bfloat16 and float16, not {tensors[0].dtype}"
    return reason or cuda_library.refusal(SOURCE, tensors[0])


_HERE = "xscale_kernels.squared_norm"
IMPLEMENTATIONS = (
    Implementation("torch", f"{_HERE}.libraries", _torch, prefix="torch_"),
    Implementation("triton", f"{_HERE}.triton", _triton),
    Implementation("apex", f"{_HERE}.libraries", _apex, prefix="apex_"),
    Implementation("cuda", f"{_HERE}.cuda", _cuda),
    Implementation("reference", f"{_HERE}.op", refusals.never, prefix="reference_"),
)


@torch.no_grad()
def squared_norm(
    tensors: Sequence[torch.Tensor], *, implementation: str | None = None
) -> torch.Tensor:
    """Sum of squares of all elements of all tensors, a float64 scalar on their device.

    A tensor's own sum is made in float32 at least, the sum over tensors in float64.

    tensors: local ones (not DTensor), of any shapes, on one device. No tensors give 0 on the CPU. The device is not
    waited for. Squares of parts add up over ranks, norms do not; so this is what to reduce.

    Raises UnusableError when the named implementation refuses.
    """
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    choice = choose("squared_norm", IMPLEMENTATIONS, implementation, tensors)
    out: torch.Tensor = choice.implementation.function("squared_norm")(tensors)
    return out
