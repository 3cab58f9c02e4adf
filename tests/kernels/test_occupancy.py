"""Programs of a persistent kernel: by the registers that the compiler gave it, not by a constant."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xscale_kernels.occupancy import programs_at_once, resident_programs

CASES = {
    # Registers and warps of a program -> programs of an SM of Hopper, by NVIDIA's occupancy calculator.
    "RMSNorm backward, Triton 3.7": (80, 8, 3),
    "RMSNorm backward, Triton 3.6": (100, 8, 2),
    "few registers: threads decide": (16, 8, 8),
    "a program of one warp": (255, 1, 8),
    "all registers": (255, 8, 1),
    "more than there are": (255, 16, 1),
    "at a unit": (128, 4, 4),
    "over a unit": (129, 4, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_programs_of_an_sm(name: str) -> None:
    registers, warps, expected = CASES[name]
    assert resident_programs(registers, warps, 2048) == expected


def test_shared_memory_decides_where_it_is_scarce() -> None:
    assert resident_programs(32, 4, 2048, shared=100_000, shared_of_sm=233_472) == 2


class Kernel:
    """A compiled kernel, whose registers are there once it is loaded."""

    metadata = SimpleNamespace(shared=64)

    def __init__(self, registers: int) -> None:
        self._registers = registers

    @property
    def run(self) -> Any:
        self.n_regs = self._registers
        return print


@pytest.mark.parametrize(("registers", "programs"), [(80, 3 * 132), (100, 2 * 132)])
def test_programs_of_a_gpu(registers: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(
        multi_processor_count=132, max_threads_per_multi_processor=2048, shared_memory_per_multiprocessor=233_472
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert programs_at_once(Kernel(registers), 8, torch.device("cuda")) == programs
