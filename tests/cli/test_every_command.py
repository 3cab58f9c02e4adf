"""Every command typed with nothing: a result, or help and a sentence; status 0, 1, 2 or 3, no traceback, no address."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from xscale.cli.main import app
from xscale_launch.main import verbs

ROOT = Path(__file__).parents[2]
SLOW = {"bench", "doctor"}
"""Commands that do their work with nothing, which takes its time."""


def commands(command: Any, name: str = "") -> Iterator[str]:
    """The command and those below it, by their words."""
    yield name
    for below, inner in getattr(command, "commands", {}).items():
        if below not in SLOW:
            yield from commands(inner, f"{name} {below}".strip())


COMMANDS = [*commands(typer.main.get_command(app)), *(f"launch {verb}" for verb in verbs())]


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_with_nothing_is_a_result_or_a_sentence(command: str, tmp_path: Path) -> None:
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "launch"))
    done = subprocess.run(
        [sys.executable, "-m", "xscale", *command.split()],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    both = done.stdout + done.stderr
    assert done.returncode in (0, 1, 2, 3), both
    assert both.strip(), "nothing is said"
    assert "Traceback" not in both
    assert not re.search(r"<\S+ object at 0x[0-9a-f]+>", both), both


def test_the_commands_are_found() -> None:
    """Negative control."""
    assert {"train", "check-part", "data prepare", "checkpoint verify", "launch slurm"} <= set(COMMANDS)
