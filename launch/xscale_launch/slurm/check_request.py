"""Find, before submission, requests that Slurm would reject or leave pending for ever, and say how to fix them."""

import difflib
import re
from collections.abc import Sequence

from xscale_launch.slurm.job import Job, seconds
from xscale_launch.slurm.queue import (
    NodeGroup,
    Partition,
    accounts,
    node_groups,
    partitions,
    slurm_command,
)
from xscale_launch.status import LaunchError


def cluster_problems(job: Job, user: str) -> list[str]:
    """Query the cluster and return every problem of the job's request."""
    known = partitions(slurm_command("scontrol", "show", "partition", "-o"))
    groups = node_groups(slurm_command("sinfo", "-h", "-o", "%R|%D|%c|%m|%G|%f"))
    return find_problems(job, known, groups, _accounts(user))


def _accounts(user: str) -> list[str] | None:
    """Return the accounts that the user may charge; None if the cluster has no accounting."""
    try:
        return accounts(
            slurm_command("sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=account")
        )
    except LaunchError:
        return None


def find_problems(
    job: Job,
    known: dict[str, Partition],
    groups: Sequence[NodeGroup],
    user_accounts: Sequence[str] | None,
) -> list[str]:
    """Find every problem of the job on a cluster with these partitions, node groups and accounts."""
    requested = job.profile.partition or next(
        (part.name for part in known.values() if part.default), None
    )
    if requested is None:
        return [
            f"this cluster has no default partition: give --partition, one of {', '.join(known)}"
        ]
    problems: list[str] = []
    for name in requested.split(","):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            return [f"partition {name!r} does not exist: {hint}choose from {', '.join(known)}"]
        problems.append(
            _partition(
                job,
                known[name],
                [group for group in groups if group.partition == name],
                user_accounts,
            )
        )
    # With several partitions Slurm uses the first that fits: one without problems is enough.
    return (
        []
        if any(not problem for problem in problems)
        else [problem for problem in problems if problem]
    )


def _partition(
    job: Job, partition: Partition, groups: Sequence[NodeGroup], user_accounts: Sequence[str] | None
) -> str:
    """Return the problems with this partition in one line; empty if groups are none."""
    return "; ".join(
        [
            *_limits(job, partition),
            *_account(job, partition, user_accounts),
            *_nodes(job, partition, groups),
        ]
    )


def _limits(job: Job, partition: Partition) -> list[str]:
    profile, name = job.profile, partition.name
    problems: list[str] = []
    if not partition.up:
        problems.append(f"partition {name} is down")
    if profile.nodes > partition.nodes:
        problems.append(
            f"{profile.nodes} nodes are requested, but partition {name} has {partition.nodes}"
        )
    elif profile.nodes > partition.max_nodes:
        problems.append(
            f"{profile.nodes} nodes are requested, but the limit of a job in {name} is {partition.max_nodes}"
        )
    limit = seconds(profile.time)
    if limit and partition.max_seconds and limit > partition.max_seconds:
        problems.append(
            f"--time {profile.time} exceeds the limit of {name}, {partition.max_seconds // 3600} h "
            f"{partition.max_seconds % 3600 // 60:02d} min; request less: a requeued job resumes (or use --chain)"
        )
    return problems


def _account(job: Job, partition: Partition, user_accounts: Sequence[str] | None) -> list[str]:
    account, name = job.profile.account, partition.name
    problems: list[str] = []
    if account is None and partition.allow_accounts:
        problems.append(
            f"partition {name} needs an account: give --account, one of {', '.join(partition.allow_accounts)}"
        )
    elif account and partition.allow_accounts and account not in partition.allow_accounts:
        problems.append(
            f"partition {name} does not allow account {account}; it allows {', '.join(partition.allow_accounts)}"
        )
    elif account and account in partition.deny_accounts:
        problems.append(f"partition {name} does not allow account {account}")
    if account and user_accounts and account not in user_accounts:
        problems.append(f"you have no account {account}; you have {', '.join(user_accounts)}")
    return problems


def megabytes(text: str | None) -> float:
    """Convert Slurm's memory format, such as `64G` (no letter: megabytes), to megabytes; 0 if `text` is not of it."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", (text or "").upper())
    return float(match[1]) * 1024.0 ** ("KMGT".index(match[2] or "M") - 1) if match else 0.0


def _nodes(job: Job, partition: Partition, groups: Sequence[NodeGroup]) -> list[str]:
    """Check that enough nodes have what each node of the job needs."""
    profile, name = job.profile, partition.name
    cpus = profile.cpus_per_process * profile.processes_per_node
    able = [group for group in groups if group.gpus >= profile.gpus_per_node]
    if groups and not able:
        most = max(group.gpus for group in groups)
        return [
            f"{profile.gpus_per_node} GPUs per node are requested, but nodes of {name} have {most}"
        ]
    fitting = [group for group in able if group.cpus >= cpus]
    if able and not fitting:
        most = max(group.cpus for group in able)
        return [f"{cpus} CPU cores per node are requested, but nodes of {name} have {most}"]
    memory = megabytes(profile.memory)
    if fitting and memory > (most := max(group.memory_megabytes for group in fitting)):
        return [
            f"{profile.memory} of memory per node is requested, but nodes of {name} have {most} MB"
        ]
    fitting = [group for group in fitting if group.memory_megabytes >= memory]
    if profile.constraint and profile.constraint.isidentifier():
        fit = [group for group in fitting if profile.constraint in group.features]
        if not fit:
            features = sorted({feature for group in groups for feature in group.features}) or [
                "none"
            ]
            return [
                f"no node of {name} has the feature {profile.constraint}; features are {', '.join(features)}"
            ]
        fitting = fit
    left = sum(group.nodes for group in fitting)
    if left < profile.nodes <= partition.nodes:
        return [f"{profile.nodes} such nodes are requested, but {name} has {left} of them"]
    return []
