"""The environment of this process (the launcher reads it here only), and the ranks that Slurm and MPI define in it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from xscale_launch.hostlist import expand
from xscale_launch.status import LaunchError

PORT_BASE = 20000
PORT_SPAN = 10000
"""Rendezvous ports derived from a job id are even numbers in [20000, 30000), below Linux's ephemeral range (from
32768). The odd port above is used by the launcher's preflight."""
PORT_STRIDE = 1009
"""Distance, in job ids, between the ports of two attempts of one job."""


@dataclass(frozen=True)
class RankEnv:
    """The rank of one worker and the rendezvous address: what torchrun puts into a worker's environment."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    def variables(self) -> dict[str, str]:
        """Return the six variables that `torch.distributed` and the trainer read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def environment() -> dict[str, str]:
    """Copy this process's environment."""
    return dict(os.environ)


def set_variables(variables: Mapping[str, str]) -> None:
    """Set variables in this process's environment, for the libraries that it will use."""
    os.environ.update(variables)


def remove_variables(prefixes: tuple[str, ...]) -> None:
    """Remove the variables with these prefixes from this process's environment."""
    for name in [name for name in os.environ if name.startswith(prefixes)]:
        os.environ.pop(name)


def for_submission(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for sbatch: without the variables of an enclosing allocation, which leak into the job."""
    return {
        name: value
        for name, value in variables.items()
        if name == "SLURM_CONF" or not name.startswith("SLURM_")
    }


def port_of_job(job_id: int, restart: int = 0) -> int:
    """Derive the rendezvous port of a Slurm job: the same on every node without communication.

    A requeued job gets another port, because a port in use may be the reason for the requeue; it is not the port of a
    job submitted at about the same time, which may share a node.
    """
    return PORT_BASE + 2 * (job_id + PORT_STRIDE * restart) % PORT_SPAN


def integer(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Read a variable as an integer; raise `LaunchError` when it is not an integer, or missing without a default."""
    text = variables.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise LaunchError(
            f"{name} is {text!r}, expected an integer: was this process started by srun or mpirun?"
        ) from None


def check_rank(name: str, rank: int, of: str, count: int) -> None:
    """Raise `LaunchError` unless `rank`, the variable `name`, is one of `count` ranks, the variable `of`."""
    if not 0 <= rank < count:
        raise LaunchError(
            f"{name} is {rank}, but {of} is {count}: start the command with srun or mpirun itself"
        )


def slurm_head_node(variables: Mapping[str, str]) -> str:
    """Return the first node of the job's node list, where rank 0 runs."""
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        raise LaunchError("SLURM_JOB_NODELIST is not set: start this inside a Slurm job, with srun")
    return expand(nodes)[0]


def slurm_ranks(variables: Mapping[str, str], processes: int) -> list[RankEnv]:
    """Return the ranks that this Slurm task starts: `processes` of them if it is the only task on its node, else one.

    Ranks follow Slurm's order (node by node), so that consecutive ranks share a node.
    """
    task, tasks = integer(variables, "SLURM_PROCID"), integer(variables, "SLURM_NTASKS")
    head = variables.get("MASTER_ADDR") or slurm_head_node(variables)
    job, restart = integer(variables, "SLURM_JOB_ID"), integer(variables, "SLURM_RESTART_COUNT", 0)
    port = integer(variables, "MASTER_PORT", port_of_job(job, restart))
    check_rank("SLURM_PROCID", task, "SLURM_NTASKS", tasks)
    if not 0 < port < 2**16:
        raise LaunchError(
            f"MASTER_PORT is {port}, which is no port: leave it out, and it is derived from the job"
        )
    if processes > 1 or tasks == integer(variables, "SLURM_NNODES"):
        local = range(processes)
        return [
            RankEnv(task * processes + r, tasks * processes, r, processes, head, port)
            for r in local
        ]
    per_node = tasks_on_node(variables)
    return [RankEnv(task, tasks, integer(variables, "SLURM_LOCALID"), per_node, head, port)]


def tasks_on_node(variables: Mapping[str, str]) -> int:
    """Count the tasks of this node, from `SLURM_STEP_TASKS_PER_NODE` (such as `2(x3),1`: one entry per node)."""
    text = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE", "1")
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        if not count.isdecimal() or not (times.rstrip(")") or "1").isdecimal():
            raise LaunchError(
                f"SLURM_STEP_TASKS_PER_NODE is {text!r}, expected counts such as 2(x3),1"
            )
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[min(max(integer(variables, "SLURM_NODEID", 0), 0), len(counts) - 1)]


def mpi_ranks(variables: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    """Return (rank, size, local rank, local size) from the variables of Open MPI, MPICH or `srun --mpi=pmix`.

    None when no MPI started this process. Some versions of MPICH do not set the local values: they are -1 then.
    """
    if "OMPI_COMM_WORLD_RANK" in variables:
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        rank, size, local_rank, local_size = (
            integer(variables, f"OMPI_COMM_WORLD_{name}") for name in names
        )
        check_rank("OMPI_COMM_WORLD_RANK", rank, "OMPI_COMM_WORLD_SIZE", size)
        return rank, size, local_rank, local_size
    if "PMI_RANK" in variables:
        local_rank, local_size = (
            integer(variables, "MPI_LOCALRANKID", -1),
            integer(variables, "MPI_LOCALNRANKS", -1),
        )
        rank, size = integer(variables, "PMI_RANK"), integer(variables, "PMI_SIZE")
        check_rank("PMI_RANK", rank, "PMI_SIZE", size)
        return rank, size, local_rank, local_size
    return None
