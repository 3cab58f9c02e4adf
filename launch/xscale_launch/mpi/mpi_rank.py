"""The process that mpirun and `srun --mpi` start: it gets its rank from MPI and then starts its worker.

mpi4py is the only package outside the standard library that the launcher uses, here and only if it is installed: ranks
and rendezvous then come from MPI itself, whatever the names of its vendor's variables. Without it the ranks come from
those variables, and all ranks must be on one host, for which the launcher chose an address (`--rendezvous`).

MPI is finalised before the worker starts, and its variables are removed from the worker's environment: otherwise a
library that initialises MPI in the worker would register a second time as this rank.

`set_rank_env` is for a program that mpirun or srun started directly: it sets RANK, WORLD_SIZE ..., because each of N
processes would otherwise run as a single process, and all of them would write into one run folder.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xscale_launch import attempts, status
from xscale_launch.agent import PREFLIGHT_FAILED
from xscale_launch.command import say
from xscale_launch.env import (
    RankEnv,
    environment,
    integer,
    mpi_ranks,
    remove_variables,
    set_variables,
    slurm_ranks,
)
from xscale_launch.mpi import mpi_preflight
from xscale_launch.nodes import devices, links
from xscale_launch.nodes.devices import free_port
from xscale_launch.nodes.gpu_env import cpus_near_gpu
from xscale_launch.nodes.worker_environment import worker_environment
from xscale_launch.status import LaunchError
from xscale_launch.supervise import (
    PR_SET_PDEATHSIG,
    Supervisor,
    Timeouts,
    Worker,
    hold_signal,
    last_lines,
)

MPI_VARIABLES = ("OMPI_", "PMIX_", "PMI_", "PMI2_", "PRTE_", "MPI_LOCAL", "HYDRA_", "HYDI_")
COPY_SECONDS = 5.0
"""How long to wait for the rest of a worker's output after its end."""
STARTED_BY_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")


def main(argv: Sequence[str]) -> int:
    """Run one worker with the rank that MPI assigned."""
    parser = argparse.ArgumentParser(
        prog="python -m xscale_launch.mpi.mpi_rank", allow_abbrev=False
    )
    parser.add_argument(
        "--attempt", type=Path, required=True, help="folder for the status files of this attempt"
    )
    parser.add_argument(
        "--outputs", type=Path, required=True, help="folder for the output of ranks above 0"
    )
    parser.add_argument("--rendezvous", help="host:port, when all ranks are on this host")
    parser.add_argument("--stop-seconds", type=float, default=300.0)
    parser.add_argument(
        "--plain",
        action="store_true",
        help="give the worker no terminal: its output goes to a file",
    )
    mpi_preflight.add_arguments(parser)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(list(argv))
    if sys.platform == "linux":  # mpirun may die without a signal to its ranks
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    variables, pending_signals = environment(), hold_signal(signal.SIGUSR1)
    try:
        rank_env, problems = rank_and_problems(options, variables)
    except LaunchError as error:
        say(str(error))
        return attempts.record_task(options.attempt, None, status.USER_MISTAKE, str(error))
    if problems:
        # Only rank 0 fails: mpirun prints a message for every rank that does.
        failed = attempts.record_task(
            options.attempt, None, PREFLIGHT_FAILED, "preflight: " + "; ".join(problems)
        )
        return failed if rank_env.rank == 0 else status.DONE
    without_mpi = {
        name: value for name, value in variables.items() if not name.startswith(MPI_VARIABLES)
    }
    if "OMP_NUM_THREADS" not in without_mpi:
        without_mpi["OMP_NUM_THREADS"] = str(devices.threads(rank_env.local_world_size))
    log = None if rank_env.rank == 0 else options.outputs / f"rank-{rank_env.rank}.log"
    variables_of_worker = worker_environment(without_mpi, rank_env, options.outputs)
    cpus = cpus_near_gpu(without_mpi, rank_env.local_rank)
    worker = Worker(rank_env.rank, tuple(options.command), variables_of_worker, log, cpus)
    supervisor = Supervisor(
        [worker], say, Timeouts(stop=options.stop_seconds), pending_signals=pending_signals
    )
    with without_terminal() if options.plain else contextlib.nullcontext():
        outcome = supervisor.run()
    message = f"{socket.gethostname()}: {outcome.cause}"
    if outcome.cause and log is not None:
        message += f"\nlast lines of {log}:\n{last_lines(log)}"
    if outcome.status == status.USER_MISTAKE:
        attempts.report_config_refused(options.attempt, rank_env.rank == 0, rank_env.rank == 0)
    return attempts.record_task(options.attempt, rank_env.rank, outcome.status, message)


@contextlib.contextmanager
def without_terminal() -> Iterator[None]:
    """Make stdout a pipe, whose text is copied to what it was: a program started meanwhile sees no terminal."""
    reader, writer = os.pipe()
    terminal = os.dup(1)
    os.dup2(writer, 1)
    os.close(writer)

    def copy() -> None:
        while block := os.read(reader, 65536):
            os.write(terminal, block)

    thread = threading.Thread(target=copy, name="copy stdout", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.dup2(terminal, 1)
        # A child of the worker may outlive it and keep the pipe open.
        thread.join(COPY_SECONDS)


def rank_and_problems(
    options: argparse.Namespace, variables: Mapping[str, str]
) -> tuple[RankEnv, tuple[str, ...]]:
    """Return this rank and the problems that the preflight found."""
    required = mpi_preflight.PreflightOptions(
        options.attempt, options.gpus, options.disk, options.links, options.slowest_link
    )
    result = mpi_preflight.MpiPreflightResult()

    def check(world: Any, rank_env: RankEnv) -> None:
        nonlocal result
        if options.preflight:
            result = mpi_preflight.run_preflight(world, rank_env, variables, required)
            if rank_env.rank == 0 and result.pairs:
                say(
                    links.summary({(first, second): speed for first, second, speed in result.pairs})
                )

    rank_env = rank_from_mpi(check)
    if rank_env is None:
        rank_env = rank_from_variables(variables, options.rendezvous)
        check(None, rank_env)
    return rank_env, result.problems


def rank_from_mpi(
    before_finalize: Callable[[Any, RankEnv], None] = lambda world, rank_env: None,
) -> RankEnv | None:
    """Return this rank, agreed over MPI; None if mpi4py is not installed. `before_finalize` may still use MPI."""
    try:
        from mpi4py import MPI
    except ModuleNotFoundError:
        return None
    except RuntimeError as error:  # installed, but finds no MPI library
        say(f"mpi4py cannot be used here: {str(error).splitlines()[0]}")
        return None
    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    names = world.allgather(socket.gethostname())
    rendezvous = world.bcast(rendezvous_address(names) if world.Get_rank() == 0 else None)
    rank_env = RankEnv(
        world.Get_rank(), world.Get_size(), node.Get_rank(), node.Get_size(), *rendezvous
    )
    before_finalize(world, rank_env)
    MPI.Finalize()
    return rank_env


def rank_from_variables(variables: Mapping[str, str], rendezvous: str | None) -> RankEnv:
    """Return this rank from the variables that mpirun sets."""
    ranks = mpi_ranks(variables)
    if ranks is None:
        raise LaunchError(
            "no MPI started this process: use `xscale launch mpi`, which calls mpirun"
        )
    if rendezvous is None:
        raise LaunchError(
            "ranks on several hosts need mpi4py for the rendezvous: pip install mpi4py on each"
        )
    rank, size, local_rank, local_size = ranks
    host, _, port = rendezvous.rpartition(":")
    on_one_host = (rank, size) if local_size < 0 else (local_rank, local_size)
    return RankEnv(rank, size, *on_one_host, host, int(port))


def rendezvous_address(names: Sequence[str]) -> tuple[str, int]:
    """Return an address of rank 0 that the other hosts can reach, and a free port there."""
    other = next((name for name in names if name != socket.gethostname()), None)
    if other is None:
        return "127.0.0.1", free_port()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(
            (other, 9)
        )  # sends nothing: the kernel chooses the local address of that route
        address = str(probe.getsockname()[0])
    return address, free_port("")


def set_rank_env() -> None:
    """Set the variables of `RankEnv` if MPI or a Slurm step of several tasks started this process.

    Do nothing if RANK is set already, or for a single process. Raise `LaunchError` if there are several processes and
    the rank of this one is unknown.
    """
    variables = environment()
    rank_env = None if "RANK" in variables else rank_from_launcher(variables)
    if rank_env is not None:
        remove_variables(MPI_VARIABLES)
        set_variables(rank_env.variables())


def rank_from_launcher(variables: Mapping[str, str]) -> RankEnv | None:
    """Return this process's rank from MPI, else from the Slurm step; None for a single process."""
    tasks = integer(variables, "SLURM_STEP_NUM_TASKS", 1)
    if any(name in variables for name in STARTED_BY_MPI):
        size = integer(variables, "OMPI_COMM_WORLD_SIZE", integer(variables, "PMI_SIZE", tasks))
        rank_env = rank_from_mpi() if size > 1 else None
        if rank_env is not None and rank_env.world_size == size:
            return rank_env
        if size > 1 and tasks == 1:
            why = (
                "mpi4py is not installed"
                if rank_env is None
                else "mpi4py uses another MPI than this mpirun"
            )
            raise LaunchError(
                f"mpirun started {size} processes, but {why}: pip install mpi4py with that MPI in the path, or "
                "start the run with `xscale launch mpi`"
            )
    return slurm_ranks(variables, 1)[0] if tasks > 1 else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
