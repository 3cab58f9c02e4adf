"""Asks xscale, in processes of its own, what a config comes to: the launcher itself never imports it.

`xscale train CONFIG key=value ... --print-config` gives the resolved config; `xscale plan CONFIG key=value ... --world
N --json` says whether the layout divides N processes and the model fits. Both exit with 2 and sentences on stderr when
they refuse. They are asked at the same time, because most of theirs is the time to import a library.
"""

import concurrent.futures
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xscale_launch import status
from xscale_launch.errors import LaunchError

RUN_DIR = re.compile(
    r"""^run:[ ]*(?:\#.*)?\n  # the section, which may say where it came from
    (?:[ ]+.*\n)*?           # its other keys
    [ ]+dir:[ ]+(?P<dir>'[^']*'|"[^"]*"|.+?)(?=[ ]+\#|[ ]*$)""",
    re.MULTILINE | re.VERBOSE,
)


@dataclass(frozen=True)
class Plan:
    """xscale's answer."""

    config: str
    """The resolved config as YAML, each value with a comment that says where it came from."""
    run_dir: Path
    """The run folder, absolute."""
    answer: dict[str, Any]
    """What `xscale plan --json` says."""

    @property
    def gigabytes(self) -> float:
        """What one process keeps in memory between steps; 0 where plan does not say."""
        return float(self.answer.get("memory_at_rest_bytes", {}).get("total", 0)) / 1e9


def xscale(given: str | None, python: str | None = None) -> tuple[str, ...]:
    """The command that is xscale. `given` is for the launcher's own tests, which have a stand-in."""
    return tuple(shlex.split(given)) if given else (python or sys.executable, "-m", "xscale.cli")


def plan(
    command: Sequence[str], config: Path, overrides: Sequence[str], processes: int, variables: Mapping[str, str]
) -> Plan:
    """What xscale says about the config on so many processes; raises `LaunchError` with its words when it refuses."""
    shown = [*command, "train", str(config), *overrides, "--print-config"]
    judged = [*command, "plan", str(config), *overrides, "--world", str(processes), "--json"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        text, answer = pool.map(lambda argv: _asked(argv, config, variables), (shown, judged))
    found = RUN_DIR.search(text)
    if found is None:
        raise LaunchError(f"`{shlex.join(shown)}` shows no run.dir; it printed:\n{text[-500:]}")
    try:
        said = json.loads(answer)
    except ValueError:
        raise LaunchError(f"`{shlex.join(judged)}` gave no plan; it printed:\n{answer[-500:]}") from None
    return Plan(text, Path(found["dir"].strip("'\"")).absolute(), said)


def _asked(argv: Sequence[str], config: Path, variables: Mapping[str, str]) -> str:
    """The standard output of one question to xscale."""
    try:
        done = subprocess.run(argv, env=dict(variables), capture_output=True, text=True, check=False)
    except OSError as error:
        raise LaunchError(f"{argv[0]} cannot be started: {error.strerror}") from None
    if done.returncode == status.USER_MISTAKE:
        raise LaunchError(f"{config} is refused:\n{done.stderr.strip()}")
    if done.returncode:
        raise LaunchError(f"`{shlex.join(argv)}` failed with status {done.returncode}:\n{done.stderr.strip()}")
    return done.stdout
