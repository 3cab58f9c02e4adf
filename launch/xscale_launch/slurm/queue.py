"""What Slurm says of its partitions, jobs and accounts: `ask` runs its commands, the rest reads their text."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from xscale_launch.errors import LaunchError

UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "N/A", "")


@dataclass(frozen=True)
class Partition:
    """A partition as far as a submission can break against it."""

    name: str
    default: bool
    up: bool
    nodes: int
    """Nodes that it has."""
    max_nodes: int
    """Nodes that one job may have."""
    max_seconds: int | None
    allow_accounts: tuple[str, ...]
    """Empty: every account."""
    deny_accounts: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """Nodes of one kind in a partition: how many, and what each has."""

    partition: str
    nodes: int
    cpus: int
    memory_megabytes: int
    gpus: int
    features: tuple[str, ...]


def ask(*command: str, seconds: float = 60.0) -> str:
    """Runs one of Slurm's commands; raises `LaunchError` with its own words when it fails or is not there."""
    if shutil.which(command[0]) is None:
        raise LaunchError(f"there is no {command[0]} here: call this on a machine of the cluster")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"`{' '.join(command)}` did not answer within {seconds:g} s: is slurmctld up?") from None
    if done.returncode:
        raise LaunchError(f"`{' '.join(command)}` failed: {said(done.stderr or done.stdout)}")
    return done.stdout


def said(text: str) -> str:
    """What a command of Slurm complains of: when one line is fatal, that one, for the others only led to it."""
    lines = text.strip().splitlines()
    fatal = [line for line in lines if ": fatal: " in line]
    return "\n".join(fatal[-1:] or lines)


def fields(line: str) -> dict[str, str]:
    """One line of `scontrol show ... -o` as a dictionary: words `Key=value` (a value may hold = but no space)."""
    return {key: value for key, equals, value in (word.partition("=") for word in line.split()) if equals}


def partitions(text: str) -> dict[str, Partition]:
    """Out of `scontrol show partition -o`."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        said = fields(line)
        if "PartitionName" not in said:
            continue
        total = int(said.get("TotalNodes", "0"))
        most = said.get("MaxNodes", "UNLIMITED")
        found[said["PartitionName"]] = Partition(
            name=said["PartitionName"],
            default=said.get("Default") == "YES",
            up=said.get("State", "UP") == "UP",
            nodes=total,
            max_nodes=total if most in UNLIMITED else min(total, int(most)),
            max_seconds=clock(said.get("MaxTime", "UNLIMITED")),
            allow_accounts=_names(said.get("AllowAccounts", "ALL")),
            deny_accounts=_names(said.get("DenyAccounts", "")),
        )
    return found


def kinds(text: str) -> list[Kind]:
    """Out of `sinfo -h -o "%R|%D|%c|%m|%G|%f"`."""
    found = []
    for line in text.splitlines():
        partition, nodes, cpus, memory, gres, features = line.split("|")
        names = () if features in ("(null)", "") else tuple(features.split(","))
        count = [int(re.sub(r"\D.*", "", part) or 0) for part in (nodes, cpus, memory)]
        found.append(Kind(partition, count[0], count[1], count[2], gpus(gres), names))
    return found


def gpus(gres: str) -> int:
    """The GPUs in a gres text such as `gpu:h200:8(S:0-1),shard:2`."""
    total = 0
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        words = part.split(":")
        if words[0] == "gpu":
            total += int(words[-1]) if words[-1].isdigit() else 1
    return total


def clock(text: str) -> int | None:
    """Slurm's `days-hours:minutes:seconds` in seconds; None for no limit."""
    if text.upper() in UNLIMITED:
        return None
    days, _, rest = text.rpartition("-")
    total = 0
    for part in rest.split(":"):
        total = total * 60 + int(part)
    return int(days or 0) * 86400 + total


def accounts(text: str) -> list[str]:
    """Out of `sacctmgr -nP show assoc user=NAME format=account`."""
    return sorted({line.strip() for line in text.splitlines() if line.strip()})


def jobs(text: str) -> list[dict[str, str]]:
    """Out of `scontrol show job -o ID`: one dictionary a job, or a task of an array."""
    return [fields(line) for line in text.splitlines() if line.startswith("JobId=")]


def known(ids: Sequence[str]) -> list[dict[str, str]]:
    """What the controller still knows of the jobs; those that it has forgotten are left out."""
    found: list[dict[str, str]] = []
    for one in ids:
        try:
            found += jobs(ask("scontrol", "show", "job", "-o", one))
        except LaunchError as error:
            if "Invalid job id" not in str(error):
                raise
    return found


def _names(text: str) -> tuple[str, ...]:
    return () if text in ("ALL", "(null)", "") else tuple(text.split(","))
