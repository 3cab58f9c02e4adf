"""Variables that libraries read when they are loaded: set where nothing is set, before torch is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xscale.mesh.environment import WAITING, waiting_policy

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
sys.argv = ["xscale", "--version"]
from xscale.cli.main import main
try:
    main()
except SystemExit:
    pass
assert "torch" not in sys.modules
import torch
from xscale.mesh.environment import waiting_policy, wait_passively
wait_passively()
print("policy:", waiting_policy())
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("variables", "policy", "display"),
    [
        ({}, "OMP_WAIT_POLICY=PASSIVE", "OMP_WAIT_POLICY = 'PASSIVE'"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "OMP_WAIT_POLICY=ACTIVE", "OMP_WAIT_POLICY = 'ACTIVE'"),
        ({"GOMP_SPINCOUNT": "1000"}, "GOMP_SPINCOUNT=1000", "OMP_WAIT_POLICY"),
    ],
)
def test_threads_sleep_while_they_wait_unless_something_is_set(
    variables: dict[str, str], policy: str, display: str
) -> None:
    """OpenMP itself says what it has read."""
    inherited = {name: value for name, value in os.environ.items() if name not in WAITING}
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "launch"))
    environment = {**inherited, "PYTHONPATH": paths, "OMP_DISPLAY_ENV": "TRUE", **variables}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    assert f"policy: {policy}\n" in done.stdout
    assert display in done.stderr


def test_nothing_is_set_after_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from xscale.mesh.environment import wait_passively

    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    wait_passively()
    assert waiting_policy() == "", "torch, which this process has imported, would not read it"
    monkeypatch.delitem(sys.modules, "torch")
    wait_passively()
    assert waiting_policy() == "OMP_WAIT_POLICY=PASSIVE"
