"""The backends of torch's fused attention in the order that is the fastest on a GPU, which torch's own is not.

torch 2.13 asks FlashAttention-2 first. On Hopper cuDNN takes 0.43 to 0.6 of its time, by the figures of transformers'
pull request 48163. `xscale bench gpu --only J5` measures each. Where FlashAttention-3 or 4 is installed, torch runs it
in place of its own FlashAttention-2, also for packed documents.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from xscale_kernels.select import log_choice

MEASURED: dict[int, tuple[str, ...]] = {9: ("cudnn", "flash", "efficient", "math")}
"""Major compute capability -> the backends, the fastest first. A call that one refuses goes to the next. GPUs that are
not listed keep torch's order."""

FLASH: dict[int, tuple[tuple[str, str], ...]] = {
    9: (("FA3", "flash_attn_interface"), ("FA4", "flash_attn.cute.interface")),
    10: (("FA4", "flash_attn.cute.interface"),),
}
"""Major compute capability -> the versions of FlashAttention that torch can run there in place of its own, by the name
that torch has for each, with the module that has its kernels; the first that is there is taken."""


class FlashChoice(NamedTuple):
    """The version of FlashAttention, and why each that comes before it is not taken."""

    name: str | None
    """None: torch's own."""
    refused: tuple[tuple[str, str], ...]


def choose_flash(device: torch.device, *, dropout: bool = False) -> FlashChoice:
    """Choose the version of FlashAttention on that device. `dropout`: whether attention weights may be dropped."""
    if device.type != "cuda":
        return FlashChoice(None, ())
    refused: list[tuple[str, str]] = []
    for name, module in FLASH.get(torch.cuda.get_device_capability(device)[0], ()):
        reason = _why_not(name, module, dropout=dropout)
        if reason is None:
            return FlashChoice(name, tuple(refused))
        refused.append((name, reason))
    return FlashChoice(None, tuple(refused))


def _why_not(name: str, module: str, *, dropout: bool) -> str | None:
    """Return why torch cannot run that version of FlashAttention; None: it can."""
    import torch.nn.attention as attention

    known: list[str] = getattr(attention, "list_flash_attention_impls", list)()
    if name not in known:
        return f"torch {torch.__version__} cannot run it"
    if dropout:
        return "it drops no attention weights"
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"{module} cannot be imported: {error}"
    return None


@contextlib.contextmanager
def _flash(choice: FlashChoice) -> Iterator[None]:
    """Let torch run that version of FlashAttention, and its own afterwards; a line of the log says if it cannot."""
    if choice.name is None:
        yield
        return
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    try:
        activate_flash_attention_impl(choice.name)
    except (RuntimeError, ImportError, AttributeError) as error:
        log_choice("FlashAttention", "FA2", [*choice.refused, (choice.name, str(error))])
        yield
        return
    log_choice("FlashAttention", choice.name, choice.refused)
    try:
        yield
    finally:
        restore_flash_attention_impl()


def fastest_order(device: torch.device) -> tuple[str, ...] | None:
    """Return the order of the backends on that device; None: torch's own."""
    if device.type != "cuda":
        return None
    return MEASURED.get(torch.cuda.get_device_capability(device)[0])


@contextlib.contextmanager
def attention_backends(device: torch.device, *, dropout: bool = False) -> Iterator[None]:
    """Let torch's fused attention ask its backends in the fastest order of that device, in all threads.

    With the newest FlashAttention that is installed there. `dropout`: whether attention weights may be dropped.
    """
    with _flash(choose_flash(device, dropout=dropout)), _ordered(fastest_order(device)):
        yield


@contextlib.contextmanager
def _ordered(order: tuple[str, ...] | None) -> Iterator[None]:
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


def sentences(device: torch.device, *, dropout: bool = False) -> list[str]:
    """Return what a run's log says of the order and of FlashAttention; empty: they are torch's."""
    lines, order = [], fastest_order(device)
    if order is not None:
        lines.append(
            f"Attention without packed documents: {order[0]} first, then {', '.join(order[1:])}"
        )
    choice = choose_flash(device, dropout=dropout)
    if choice.name is not None or choice.refused:
        refused = "".join(f"; not {name}: {reason}" for name, reason in choice.refused)
        lines.append(f"FlashAttention: {choice.name or 'FA2'}{refused}")
    return lines
