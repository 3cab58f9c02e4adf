"""`usable` checks that several operators share: each returns None, or the reason to refuse the call."""

from __future__ import annotations

import functools
import importlib.util

import torch

from xscale_kernels import torch_private, triton_runtime

# Below this many elements a loop over blocks costs more than the memory it saves.
SMALL = 2**15
IS_SMALL = f"fewer than {SMALL} elements: plain torch is faster"


def never(*_: object, **__: object) -> str | None:
    """Refuse nothing."""
    return None


def unless_cpu(x: torch.Tensor, *_: object, **__: object) -> str | None:
    """Refuse tensors that are not on the CPU. Fake tensors pass: these implementations call torch operators only."""
    return None if x.device.type == "cpu" else f"the tensors are on {x.device.type}"


def unless_cuda(x: torch.Tensor, *_: object, **__: object) -> str | None:
    """Refuse tensors that are not on a GPU, and fake ones."""
    if not x.is_cuda:
        return f"the tensors are on {x.device.type}, CUDA C++ needs a GPU"
    return triton_runtime.FAKE if isinstance(x, torch_private.FakeTensor) else None


def unless_large(x: torch.Tensor, *_: object, **__: object) -> str | None:
    """Refuse tensors that are so small that plain torch has less overhead."""
    return None if x.numel() >= SMALL else IS_SMALL


def unless_triton(x: torch.Tensor, *_: object, **__: object) -> str | None:
    """Refuse where Triton cannot run, and float64 on CUDA, which the kernels do not support."""
    reason = triton_runtime.refusal(x)
    if reason is None and x.is_cuda and x.dtype is torch.float64:
        return "the kernel does not support float64 on CUDA"
    return reason


@functools.lru_cache(maxsize=8)
def _without(extension: str) -> str | None:
    # Cached: the installed packages do not change in a process, and the search costs more than a launch.
    if importlib.util.find_spec("apex") is None:
        return "apex is not installed (build it from source, see docker/)"
    if importlib.util.find_spec(extension) is None:
        return f"apex is installed without its extension {extension} (build it with its CUDA extensions)"
    return None


def unless_apex(extension: str, x: torch.Tensor) -> str | None:
    """Refuse if apex or its compiled `extension` is not installed, or the tensors are not on a GPU."""
    if not x.is_cuda:
        return f"the tensors are on {x.device.type}, apex needs a GPU"
    return triton_runtime.FAKE if isinstance(x, torch_private.FakeTensor) else _without(extension)


def is_hopper(x: torch.Tensor) -> bool:
    """Whether the tensor is on a GPU of compute capability 9.x."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9


INSTALL = {
    "fla": "pip install 'fla-core>=0.6,<0.7'",
    "liger_kernel": "pip install 'liger-kernel>=0.8.5,<0.9'",
    "flash_attn_2_cuda": "FlashAttention-2, a wheel of the releases of flash-attention",
    "flash_attn_interface": "FlashAttention-3, built from the folder hopper of flash-attention",
}
"""Package -> how it is installed."""


@functools.lru_cache(maxsize=8)
def _absent(package: str) -> str | None:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    if spec is not None:
        return None
    return f"{package} is not installed" + (f" ({INSTALL[package]})" if package in INSTALL else "")


def unless_library(x: torch.Tensor, package: str, capability: tuple[int, int]) -> str | None:
    """Refuse if the package is not installed, the GPU is older than `capability`, or the tensors are not on a GPU."""
    if not x.is_cuda:
        return f"the tensors are on {x.device.type}, {package} needs a GPU"
    if isinstance(x, torch_private.FakeTensor):
        return triton_runtime.FAKE
    if torch.cuda.get_device_capability(x.device) < capability:
        return f"{package} needs a GPU of compute capability {capability[0]}.{capability[1]}"
    return _absent(package)


def unless_liger(x: torch.Tensor) -> str | None:
    """Refuse where Liger's Triton kernels cannot run on rows [..., D]."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not x.numel():
        return "liger needs rows of bfloat16, float16 or float32"
    return unless_library(x, "liger_kernel", (8, 0))
