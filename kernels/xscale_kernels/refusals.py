"""Reasons to refuse a call that several operators share."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch._subclasses.fake_tensor import FakeTensor

from xscale_kernels import triton_runtime

# Below this many elements a loop over blocks costs more than the memory it saves.
SMALL = 2**15


def never(*_: object, **__: object) -> str | None:
    """No call is refused."""
    return None


def unless_cpu(x: torch.Tensor, *_: object, **__: object) -> str | None:
    """Refuses tensors that are not on the CPU. Fake ones are served: these ways are torch's operators throughout."""
    return None if x.device.type == "cpu" else f"the tensors are on {x.device.type}"


def unless_large(x: torch.Tensor, *_: object, **__: object) -> str | None:
    """Refuses what plain torch does with less overhead."""
    return None if x.numel() >= SMALL else f"fewer than {SMALL} elements: plain torch is quicker"


def unless_triton(x: torch.Tensor, *_: object, **__: object) -> str | None:
    """Refuses where Triton cannot run, and float64 on CUDA, which the kernels are not written for."""
    reason = triton_runtime.refusal(x)
    if reason is None and x.is_cuda and x.dtype is torch.float64:
        return "the kernel has no float64 on CUDA"
    return reason


@functools.lru_cache(maxsize=8)
def _without(extension: str) -> str | None:
    # Cached: what is installed cannot change in a process, and looking costs more than a launch.
    if importlib.util.find_spec("apex") is None:
        return "apex is not installed (build it from source, see docker/)"
    if importlib.util.find_spec(extension) is None:
        return f"apex is installed without its extension {extension} (build it with its CUDA extensions)"
    return None


def unless_apex(extension: str, x: torch.Tensor) -> str | None:
    """Refuses where apex or its compiled `extension` is not installed, or the tensors are not on a GPU."""
    if not x.is_cuda:
        return f"the tensors are on {x.device.type}, apex needs a GPU"
    return triton_runtime.EMPTY if isinstance(x, FakeTensor) else _without(extension)
