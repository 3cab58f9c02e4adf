"""Asks xscale, in a process of its own, what a config comes to: the launcher itself never imports it.

`xscale plan CONFIG key=value ... --world N --json` gives the resolved config, and what does not fit into the GPU that
it is told of; or it exits with 2 and sentences on stderr when the layout does not divide N processes, or anything else
is wrong. Told of no GPU, it is asked to `--check` only. What it said before of the same config and the same code is not
asked again, see `remembered`.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xscale_launch import remembered, status
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
    def problems(self) -> list[str]:
        """What does not fit, in plan's words."""
        return [
            f"{one['path']}: {one['what']}. {one.get('fix', '')}".strip() for one in self.answer.get("problems") or []
        ]


def xscale(given: str | None, python: str | None = None) -> tuple[str, ...]:
    """The command that is xscale. `given` is for the launcher's own tests, which have a stand-in."""
    return tuple(shlex.split(given)) if given else (python or sys.executable, "-m", "xscale.cli")


def plan(
    command: Sequence[str],
    config: Path,
    overrides: Sequence[str],
    processes: int,
    variables: Mapping[str, str],
    told: Callable[[str], None] = lambda sentence: None,
    gpu: Sequence[str] = (),
) -> Plan:
    """What xscale says about the config on so many processes; raises `LaunchError` with its words when it refuses.

    `told` gets a sentence when the answer is one from before. `gpu`: plan's options for a GPU that it has to fit into.
    """
    looked_at = gpu or ("--check",)
    question = [*command, "plan", str(config), *overrides, "--world", str(processes), "--json", *looked_at]
    own = tuple(command) == xscale(None)
    place, name = remembered.folder(variables), remembered.key(question, variables) if own else ""
    before = remembered.recall(place, name) if own else None
    if before is not None:
        told(f"this config and code were checked {_ago(before.seconds_ago)} ago ({place / name}.json)")
        return _read(question, json.dumps(before.answer))
    answer = _asked(question, config, variables)
    found = _read(question, answer)
    if own:
        remembered.keep(place, name, found.answer)
    return found


def run_dir(command: Sequence[str], config: Path, overrides: Sequence[str], variables: Mapping[str, str]) -> Path:
    """The run folder of a config that is not going to be trained now, whatever its layout."""
    shown = [*command, "train", str(config), *overrides, "--print-config"]
    text = _asked(shown, config, variables)
    found = RUN_DIR.search(text)
    if found is None:
        raise LaunchError(f"`{shlex.join(shown)}` shows no run.dir; it printed:\n{text[-500:]}")
    return Path(found["dir"].strip("'\"")).absolute()


def _read(question: Sequence[str], answer: str) -> Plan:
    try:
        said = json.loads(answer)
        return Plan(str(said["config"]), Path(said["run_dir"]).absolute(), said)
    except (ValueError, KeyError, TypeError):
        raise LaunchError(f"`{shlex.join(question)}` gave no plan; it printed:\n{answer[-500:]}") from None


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


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
