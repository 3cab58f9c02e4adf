"""What torch's dtypes are called in Triton."""

from __future__ import annotations

import torch
import triton.language as tl


def element(dtype: torch.dtype) -> object:
    """The type that a pointer to a tensor's elements points to."""
    return {
        torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16
    }[dtype]  # fmt: skip
