"""The environment of this process, read here and nowhere else in the launcher; and ranks as Slurm and MPI tell them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from xscale_launch.errors import LaunchError
from xscale_launch.hostlist import expand

PORT_BASE = 20000
PORT_SPAN = 10000
"""Ports that follow from a job's id are the even ones in [20000, 30000), below Linux's ephemeral range (from 32768).
The odd one above a job's port is the launcher's own, for its roll-call."""
PORT_STRIDE = 1009
"""How many jobs lie between those that have the ports of two attempts of one job."""


@dataclass(frozen=True)
class Place:
    """Where one worker stands: its ranks, and the address at which the world meets."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    def variables(self) -> dict[str, str]:
        """The six variables that the trainer, `torch.distributed` and everybody else read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def environment() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def add(variables: Mapping[str, str]) -> None:
    """Puts variables into this process's environment, for the libraries that it is going to use."""
    os.environ.update(variables)


def take_out(beginnings: tuple[str, ...]) -> None:
    """Removes the variables whose names begin so from this process's environment."""
    for name in [name for name in os.environ if name.startswith(beginnings)]:
        os.environ.pop(name)


def for_submission(variables: Mapping[str, str]) -> dict[str, str]:
    """An environment to call sbatch in: without what an allocation around us has set, which would leak into the job."""
    return {name: value for name, value in variables.items() if name == "SLURM_CONF" or not name.startswith("SLURM_")}


def port_of_job(job_id: int, restart: int = 0) -> int:
    """The rendezvous port of a Slurm job: the same on every node without a message, and another for the next job.

    A job that was put back gets another one, because a port that somebody else holds may be why; not that of a job
    submitted about the same time, with which it may share a node.
    """
    return PORT_BASE + 2 * (job_id + PORT_STRIDE * restart) % PORT_SPAN


def whole(variables: Mapping[str, str], name: str) -> int:
    """A variable that has to be a whole number; raises `LaunchError` when it is missing or is not."""
    text = variables.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise LaunchError(
            f"{name} is {text!r}, and a whole number was expected: was this started by srun or mpirun?"
        ) from None


def slurm_head(variables: Mapping[str, str]) -> str:
    """The first node of the job's node list, where rank 0 runs."""
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        raise LaunchError("SLURM_JOB_NODELIST is not set: start this inside a Slurm job, with srun")
    return expand(nodes)[0]


def slurm_places(variables: Mapping[str, str], processes: int) -> list[Place]:
    """The workers that this Slurm task starts: `processes` of them, when it is the only task on its node, else one.

    Ranks follow Slurm's own order (node by node), so that neighbours in rank share a node.
    """
    task, tasks = whole(variables, "SLURM_PROCID"), whole(variables, "SLURM_NTASKS")
    head = variables.get("MASTER_ADDR") or slurm_head(variables)
    job, restart = whole(variables, "SLURM_JOB_ID"), int(variables.get("SLURM_RESTART_COUNT", "0"))
    port = int(variables.get("MASTER_PORT") or port_of_job(job, restart))
    if processes > 1 or tasks == whole(variables, "SLURM_NNODES"):
        local = range(processes)
        return [Place(task * processes + r, tasks * processes, r, processes, head, port) for r in local]
    per_node = tasks_on_node(variables)
    return [Place(task, tasks, whole(variables, "SLURM_LOCALID"), per_node, head, port)]


def tasks_on_node(variables: Mapping[str, str]) -> int:
    """How many tasks this node has: `SLURM_STEP_TASKS_PER_NODE` says it as `2(x3),1`, one entry a node."""
    text = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE", "1")
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[min(int(variables.get("SLURM_NODEID", "0")), len(counts) - 1)]


def mpi_ranks(variables: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    """(rank, size, local rank, local size) as Open MPI, MPICH or `srun --mpi=pmix` put them into the environment.

    None where no MPI started this process. MPICH does not tell the local ones on every version: then they are -1.
    """
    if "OMPI_COMM_WORLD_RANK" in variables:
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        rank, size, local_rank, local_size = (whole(variables, f"OMPI_COMM_WORLD_{name}") for name in names)
        return rank, size, local_rank, local_size
    if "PMI_RANK" in variables:
        local_rank = int(variables.get("MPI_LOCALRANKID", "-1"))
        local_size = int(variables.get("MPI_LOCALNRANKS", "-1"))
        return whole(variables, "PMI_RANK"), whole(variables, "PMI_SIZE"), local_rank, local_size
    return None
