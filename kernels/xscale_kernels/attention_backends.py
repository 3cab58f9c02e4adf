"""The backends of torch's fused attention in the order that is the fastest on a GPU, which torch's own is not.

torch 2.13 asks FlashAttention-2 first. On Hopper cuDNN takes 0.43 to 0.6 of its time, by the figures of transformers'
pull request 48163. `xscale bench gpu --only J5` measures each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

MEASURED: dict[int, tuple[str, ...]] = {9: ("cudnn", "flash", "efficient", "math")}
"""Major compute capability -> the backends, the fastest first. A call that one refuses goes to the next. GPUs that are
not listed keep torch's order."""


def fastest_order(device: torch.device) -> tuple[str, ...] | None:
    """Return the order of the backends on that device; None: torch's own."""
    if device.type != "cuda":
        return None
    return MEASURED.get(torch.cuda.get_device_capability(device)[0])


@contextlib.contextmanager
def attention_backends(device: torch.device) -> Iterator[None]:
    """Let torch's fused attention ask its backends in the fastest order of that device, in all threads."""
    order = fastest_order(device)
    if order is None:
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    by_name = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    with sdpa_kernel([by_name[name] for name in order], set_priority=True):
        yield


def sentences(device: torch.device) -> list[str]:
    """Return what a run's log says of the order; empty: it is torch's."""
    order = fastest_order(device)
    if order is None:
        return []
    return [f"Attention without packed documents: {order[0]} first, then {', '.join(order[1:])}"]
