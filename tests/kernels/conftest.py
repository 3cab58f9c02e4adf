"""Every kernel test runs with poisoned memory: what torch.empty returns is NaN until something writes it."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    # torch.utils.deterministic.fill_uninitialized_memory (on by default) fills new memory with NaN in this mode.
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
