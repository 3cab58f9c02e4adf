"""The Triton kernels' tests, run in a second process where Triton's interpreter is on from its first import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "triton"


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_in_the_interpreter(file: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FOLDER / file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    print(done.stdout[-4000:], done.stderr[-2000:])
    assert done.returncode == 0
