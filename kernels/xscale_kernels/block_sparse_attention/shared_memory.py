"""Shared memory of the Triton kernels of block_sparse_attention, which limits blocks and widths."""

from __future__ import annotations

import torch

HOPPER_BYTES = 232_448
"""Shared memory that a program may take on Hopper; assumed without a GPU."""
SLACK_BYTES = 1024
"""Room for what is not a tile: reductions and barriers."""


def shared_bytes(block: int, key_width: int, value_width: int, itemsize: int, stages: int) -> int:
    """Bytes of the kernel that takes the most: tiles of q and the gradient, and in each stage tiles of k and v.

    Equal to what Triton reports for Hopper, plus `SLACK_BYTES`. Widths are padded, to powers of two.
    """
    return (1 + stages) * block * (key_width + value_width) * itemsize + SLACK_BYTES


def stages(block: int, key_width: int, value_width: int, itemsize: int, limit: int) -> int:
    """Return the stages in which tiles are loaded ahead: 2, or 1 where two do not fit; 0 where one does not."""
    return next(
        (n for n in (2, 1) if shared_bytes(block, key_width, value_width, itemsize, n) <= limit), 0
    )


def limit_of(device: torch.device) -> int:
    """Return the shared memory that a program may take on this device."""
    if device.type != "cuda":
        return HOPPER_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", HOPPER_BYTES))
