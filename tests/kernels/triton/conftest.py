"""Triton's kernels are tested on a GPU where there is one, else in Triton's interpreter, on from the start.

tests/kernels/test_triton.py starts a second pytest with TRITON_INTERPRET=1 for this folder; without a GPU and without
the interpreter nothing is collected here.
"""

import os
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if INTERPRETED or torch.cuda.is_available():
        return None
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not INTERPRETED and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"
