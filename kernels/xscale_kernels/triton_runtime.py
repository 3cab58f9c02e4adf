"""Whether a Triton kernel can run on a tensor: on its GPU, or on any device through Triton's interpreter."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import sys

import torch

from xscale_kernels import torch_private

FAKE = "the tensors are fake"


@functools.lru_cache(maxsize=1)
def importable() -> bool:
    """Whether Triton is installed. Cached: it does not change in a process, and the search costs more than a launch."""
    return importlib.util.find_spec("triton") is not None


@functools.lru_cache(maxsize=1)
def version() -> tuple[int, ...]:
    """Version of the installed Triton, such as (3, 7, 1)."""
    return tuple(
        int(digits) for digits in re.findall(r"\d+", importlib.metadata.version("triton"))[:3]
    )


def interpreting() -> bool:
    """Whether Triton is already loaded and runs its kernels on the CPU (TRITON_INTERPRET=1, a test setting)."""
    return "triton" in sys.modules and _interprets()


@functools.lru_cache(maxsize=1)
def _interprets() -> bool:
    # Cached: Triton reads it once, where a kernel is defined, and the knob costs more than a small operator.
    return bool(sys.modules["triton"].knobs.runtime.interpret)


def refusal(tensor: torch.Tensor) -> str | None:
    """Reason why no Triton kernel can run on `tensor`, or None."""
    if isinstance(tensor, torch_private.FakeTensor):
        return FAKE
    if not tensor.is_cuda:
        return (
            None
            if interpreting()
            else f"the tensors are on {tensor.device.type}, Triton needs a GPU"
        )
    return None if importable() else "triton is not installed (pip install triton)"


def element(dtype: torch.dtype) -> object:
    """Element type of a pointer to a tensor of this dtype."""
    import triton.language as tl

    return {
        torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16
    }[dtype]  # fmt: skip
