"""Reasons to refuse a call that several operators share."""

from __future__ import annotations

import functools
import importlib.util

import torch

from xscale_kernels import triton_runtime

# Below this many elements a loop over blocks costs more than the memory it saves.
SMALL = 2**15


def never(*_: object, **__: object) -> str | None:
    """No call is refused."""
    return None


def unless_cpu(x: torch.Tensor, *_: object, **__: object) -> str | None:
    """Refuses tensors that are not on the CPU."""
    return None if x.device.type == "cpu" else f"the tensors are on {x.device.type}"


def unless_large_on_cpu(x: torch.Tensor, *_: object, **__: object) -> str | None:
    """Refuses what plain torch does with less overhead."""
    return unless_cpu(x) or (None if x.numel() >= SMALL else f"fewer than {SMALL} elements: plain torch is quicker")


def unless_triton(x: torch.Tensor, *_: object, **__: object) -> str | None:
    """Refuses where Triton cannot run, and float64 on CUDA, which the kernels are not written for."""
    reason = triton_runtime.refusal(x)
    if reason is None and x.is_cuda and x.dtype is torch.float64:
        return "the kernel has no float64 on CUDA"
    return reason


@functools.lru_cache(maxsize=1)
def _apex() -> bool:
    # Cached: whether a package is installed cannot change in a process, and looking costs more than a launch.
    return importlib.util.find_spec("apex") is not None


def unless_apex(x: torch.Tensor, *_: object, **__: object) -> str | None:
    """Refuses where apex is not installed or the tensors are not on a GPU."""
    if not x.is_cuda:
        return f"the tensors are on {x.device.type}, apex needs a GPU"
    return None if _apex() else "apex is not installed (build it from source, see docker/)"
