"""Triton's kernels are tested on a GPU where there is one, else in Triton's interpreter, on from the start.

tests/kernels/test_triton.py starts a second pytest with TRITON_INTERPRET=1 for this folder; without a GPU and without
the interpreter nothing is collected here.
"""

import os
from importlib import metadata
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if INTERPRETED or torch.cuda.is_available():
        return None
    return True


def interpreter_problem(triton: str, numpy: str) -> str | None:
    """Why this Triton's interpreter is wrong beside this numpy; None if it is not known to be."""
    triton_version, numpy_version = (tuple(int(part) for part in text.split(".")[:2]) for text in (triton, numpy))
    if triton_version < (3, 7) and numpy_version >= (2, 5):
        return f"the interpreter of Triton {triton} needs numpy < 2.5, and numpy {numpy} is installed"
    return None


def pytest_configure() -> None:
    if INTERPRETED:
        problem = interpreter_problem(metadata.version("triton"), metadata.version("numpy"))
        if problem is not None:
            raise pytest.UsageError(f"{problem}: run pip install 'numpy<2.5', or take Triton 3.7")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # There are thousands of other items, for which paths as text are compared sooner.
    folder = f"{Path(__file__).parent}{os.sep}"
    for item in [] if INTERPRETED else items:
        if str(item.path).startswith(folder):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"
