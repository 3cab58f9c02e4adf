"""How many programs of a compiled Triton kernel are resident on a GPU at once, which a persistent kernel launches.

The compiler decides how many registers a kernel takes, and another version of it decides otherwise: RMSNorm's backward
at width 4096 takes 100 with Triton 3.6 and 80 with 3.7, which is two programs an SM and three.
"""

from __future__ import annotations

from typing import Any

import torch

WARP = 32
PARTITIONS = 4
"""Parts of an SM, each with registers and a scheduler of its own, among which the warps of a program are spread."""
REGISTERS = 16384
"""Registers of a part (compute capability 7.0 to 12.x)."""
UNIT = 8
"""A thread's registers are given in multiples of this."""


def resident_programs(
    registers: int, warps: int, most_threads: int, shared: int = 0, shared_of_sm: int = 0
) -> int:
    """Return how many programs of `warps` warps an SM holds, at least 1.

    `registers` of a thread; `most_threads` of an SM; `shared` bytes of a program, of `shared_of_sm`.
    """
    allocated = -(-max(registers, 1) // UNIT) * UNIT
    by_registers = PARTITIONS * (REGISTERS // (allocated * WARP)) // warps
    by_threads = most_threads // (warps * WARP)
    by_memory = shared_of_sm // shared if shared else by_threads
    return max(1, min(by_registers, by_threads, by_memory))


def programs_at_once(kernel: Any, warps: int, device: torch.device) -> int:
    """Return how many programs of a kernel that Triton compiled are resident on all SMs of that GPU."""
    # Triton knows a kernel's registers once it is loaded, which reading its launcher does.
    assert kernel.run is not None, "the kernel is loaded"
    gpu = torch.cuda.get_device_properties(device)
    shared = (kernel.metadata.shared, gpu.shared_memory_per_multiprocessor)
    resident = resident_programs(kernel.n_regs, warps, gpu.max_threads_per_multi_processor, *shared)
    return resident * gpu.multi_processor_count
