"""Asks xscale, in a process of its own, what a config comes to: the launcher itself never imports it.

The contract: `xscale plan CONFIG key=value ... --json --processes N` prints one JSON object that holds at least
`config`, the resolved config as plain data, and exits with 2 and a sentence on stderr when the config is wrong, the
layout does not divide N processes, or the model does not fit.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xscale_launch import status
from xscale_launch.errors import LaunchError


@dataclass(frozen=True)
class Plan:
    """xscale's answer."""

    config: dict[str, Any]
    """The resolved config; JSON, hence YAML, hence a config that xscale reads."""
    answer: dict[str, Any]
    """The whole answer: memory, parameters and whatever else `xscale plan --json` says."""

    @property
    def run_dir(self) -> Path:
        """The run folder, absolute."""
        return Path(str(self.config["run"]["dir"])).absolute()


def xscale(given: str | None, python: str | None = None) -> tuple[str, ...]:
    """The command that is xscale. `given` is for the launcher's own tests, which have a stand-in."""
    return tuple(shlex.split(given)) if given else (python or sys.executable, "-m", "xscale.cli")


def plan(
    command: Sequence[str], config: Path, overrides: Sequence[str], processes: int, variables: Mapping[str, str]
) -> Plan:
    """What xscale says about the config on so many processes; raises `LaunchError` with its words when it refuses."""
    argv = [*command, "plan", str(config), *overrides, "--json", "--processes", str(processes)]
    try:
        asked = subprocess.run(argv, env=dict(variables), capture_output=True, text=True, check=False)
    except OSError as error:
        raise LaunchError(f"{argv[0]} cannot be started: {error.strerror}") from None
    said = asked.stderr.strip()
    if asked.returncode == status.USER_MISTAKE:
        raise LaunchError(f"xscale plan refuses {config}:\n{said}")
    if asked.returncode:
        raise LaunchError(f"`{shlex.join(argv)}` failed with status {asked.returncode}:\n{said}")
    try:
        answer = json.loads(asked.stdout)
        return Plan(answer["config"], answer)
    except (ValueError, KeyError, TypeError):
        raise LaunchError(f"`{shlex.join(argv)}` gave no plan; it printed:\n{asked.stdout[-500:]}") from None
