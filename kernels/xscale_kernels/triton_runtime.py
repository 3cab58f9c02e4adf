"""Whether a Triton kernel can run on a tensor here: on its GPU, or anywhere through Triton's interpreter."""

from __future__ import annotations

import functools
import importlib.util
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensor

EMPTY = "the tensors hold no numbers"


@functools.lru_cache(maxsize=1)
def importable() -> bool:
    """Whether Triton is installed. Cached: it cannot change in a process, and looking costs more than a launch."""
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether Triton is already loaded and runs its kernels on the CPU (TRITON_INTERPRET=1, a test setting)."""
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)


def refusal(tensor: torch.Tensor) -> str | None:
    """Why no Triton kernel can run on `tensor`, or None."""
    if isinstance(tensor, FakeTensor):
        return EMPTY
    if not tensor.is_cuda:
        return None if interpreting() else f"the tensors are on {tensor.device.type}, Triton needs a GPU"
    return None if importable() else "triton is not installed (pip install triton)"
