"""Query Slurm's partitions, jobs and accounts: `slurm_command` runs its commands, the rest parses their output."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from xscale_launch.status import LaunchError

UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "N/A", "")


@dataclass(frozen=True)
class Partition:
    """The limits of a partition."""

    name: str
    default: bool
    up: bool
    nodes: int
    """Nodes of the partition."""
    max_nodes: int
    """Maximum nodes of one job."""
    max_seconds: int | None
    allow_accounts: tuple[str, ...]
    """Empty: every account is allowed."""
    deny_accounts: tuple[str, ...]


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes of a partition: their number, and the resources of each."""

    partition: str
    nodes: int
    cpus: int
    memory_megabytes: int
    gpus: int
    features: tuple[str, ...]


def slurm_command(*command: str, seconds: float = 60.0) -> str:
    """Run a Slurm command and return its output; raise `LaunchError` with its message when it fails."""
    if shutil.which(command[0]) is None:
        raise LaunchError(
            f"{command[0]} is not installed here: run this on a login node of the cluster"
        )
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"`{' '.join(command)}` did not answer within {seconds:g} s: is slurmctld up?"
        ) from None
    if done.returncode:
        raise LaunchError(f"`{' '.join(command)}` failed: {error_text(done.stderr or done.stdout)}")
    return done.stdout


def error_text(text: str) -> str:
    """Return the error message of a Slurm command: the last line marked fatal if there is one, else all lines."""
    lines = text.strip().splitlines()
    fatal = [line for line in lines if ": fatal: " in line]
    return "\n".join(fatal[-1:] or lines)


def fields(line: str) -> dict[str, str]:
    """Parse one line of `scontrol show ... -o`: words `Key=value` (a value may contain = but no space)."""
    return {
        key: value
        for key, equals, value in (word.partition("=") for word in line.split())
        if equals
    }


def partitions(text: str) -> dict[str, Partition]:
    """Parse `scontrol show partition -o`."""
    by_name: dict[str, Partition] = {}
    for line in text.splitlines():
        said = fields(line)
        if "PartitionName" not in said:
            continue
        total = int(said.get("TotalNodes", "0"))
        limit = said.get("MaxNodes", "UNLIMITED")
        by_name[said["PartitionName"]] = Partition(
            name=said["PartitionName"],
            default=said.get("Default") == "YES",
            up=said.get("State", "UP") == "UP",
            nodes=total,
            max_nodes=total if limit in UNLIMITED else min(total, int(limit)),
            max_seconds=time_limit_seconds(said.get("MaxTime", "UNLIMITED")),
            allow_accounts=_names(said.get("AllowAccounts", "ALL")),
            deny_accounts=_names(said.get("DenyAccounts", "")),
        )
    return by_name


def node_groups(text: str) -> list[NodeGroup]:
    """Parse `sinfo -h -o "%R|%D|%c|%m|%G|%f"`."""
    groups = []
    for line in text.splitlines():
        partition, nodes, cpus, memory, gres, features = line.split("|")
        names = () if features in ("(null)", "") else tuple(features.split(","))
        count = [int(re.sub(r"\D.*", "", part) or 0) for part in (nodes, cpus, memory)]
        groups.append(NodeGroup(partition, count[0], count[1], count[2], gpus(gres), names))
    return groups


def gpus(gres: str) -> int:
    """Count the GPUs of a gres string such as `gpu:h200:8(S:0-1),shard:2`."""
    total = 0
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        words = part.split(":")
        if words[0] == "gpu":
            total += int(words[-1]) if words[-1].isdigit() else 1
    return total


def time_limit_seconds(text: str) -> int | None:
    """Convert Slurm's `days-hours:minutes:seconds` to seconds; None for no limit."""
    if text.upper() in UNLIMITED:
        return None
    days, _, clock = text.rpartition("-")
    total = 0
    for part in clock.split(":"):
        total = total * 60 + int(part)
    return int(days or 0) * 86400 + total


def accounts(text: str) -> list[str]:
    """Parse `sacctmgr -nP show assoc user=NAME format=account`."""
    return sorted({line.strip() for line in text.splitlines() if line.strip()})


def jobs(text: str) -> list[dict[str, str]]:
    """Parse `scontrol show job -o ID`: one dictionary per job or array task."""
    return [fields(line) for line in text.splitlines() if line.startswith("JobId=")]


def known_jobs(ids: Sequence[str]) -> list[dict[str, str]]:
    """Return the jobs that slurmctld still knows; jobs purged from its memory are omitted."""
    known: list[dict[str, str]] = []
    for job_id in ids:
        try:
            known += jobs(slurm_command("scontrol", "show", "job", "-o", job_id))
        except LaunchError as error:
            if "Invalid job id" not in str(error):
                raise
    return known


def _names(text: str) -> tuple[str, ...]:
    return () if text in ("ALL", "(null)", "") else tuple(text.split(","))
