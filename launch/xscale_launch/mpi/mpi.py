"""`xscale launch mpi`: start one rank per worker with mpirun (Open MPI or MPICH), or with srun in an allocation."""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from xscale_launch import attempts, command, profile, status
from xscale_launch.command import say, write
from xscale_launch.env import environment
from xscale_launch.files import make_run_folder
from xscale_launch.nodes import devices
from xscale_launch.nodes.worker_environment import HOST
from xscale_launch.paths import path_argument
from xscale_launch.plans import plan_query
from xscale_launch.status import LaunchError
from xscale_launch.supervise import Supervisor, Timeouts, Worker

FORWARDED_PREFIXES = (
    *("PYTHON", "OMP_", "NCCL_", "GLOO_", "TORCH_", "XDG_CACHE_HOME"),
    *("PYTORCH_", "TRITON_", "TORCHINDUCTOR_", "CUDA_"),
)
"""Prefixes of variables that a training process reads."""
WORK = {"train": ("train",), "prepare": ("data", "prepare")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `xscale launch mpi`."""
    command.add_config(parser)
    parser.add_argument(
        "--processes", type=int, required=True, metavar="N", help="number of ranks over all hosts"
    )
    parser.add_argument(
        "--hosts",
        metavar="HOST:N,HOST:N",
        help="hosts and the number of ranks on each; default: this host",
    )
    parser.add_argument(
        "--mpirun", type=path_argument, default="mpirun", help="the mpirun (or mpiexec) to use"
    )
    parser.add_argument(
        "--srun", action="store_true", help="use srun instead of mpirun (inside an allocation)"
    )
    parser.add_argument(
        "--work",
        choices=list(WORK),
        default="train",
        help="train, or prepare data with one shard per rank",
    )
    parser.add_argument(
        "--cluster",
        help="profile of clusters.toml that gives preflight, interface, environment and mpi",
    )
    parser.add_argument(
        "--clusters", type=path_argument, metavar="FILE", help="file with the profiles"
    )
    parser.add_argument(
        "--no-preflight", action="store_true", help="skip the preflight check of the nodes"
    )
    parser.add_argument(
        "--grace-seconds",
        type=float,
        default=300.0,
        help="time to save after a signal, before SIGKILL",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command without starting it"
    )


def run(options: argparse.Namespace) -> int:
    """Start the ranks and wait for them. The exit status is the trainer's, as for `xscale launch local`."""
    config = command.check_config(options.config, options.overrides)
    if options.processes < 1:
        raise LaunchError(f"--processes must be at least 1, got {options.processes}")
    site = profile.load(
        profile.find_file(options.clusters, Path.home(), Path.cwd()), options.cluster
    )
    trainer, variables = (
        plan_query.xscale_command(options.xscale),
        {**environment(), **site.environment},
    )
    if site.interface:
        variables |= {"NCCL_SOCKET_IFNAME": site.interface, "GLOO_SOCKET_IFNAME": site.interface}
    starter = (
        srun(options, site)
        if options.srun
        else mpirun(options, forwarded_variables(variables, site))
    )
    if options.work == "train":
        folder = plan_query.query_plan(
            trainer, config, options.overrides, options.processes, variables, say
        ).run_dir
    else:
        folder = plan_query.query_run_dir(trainer, config, options.overrides, variables)
    attempt = folder / "launch" / "attempts" / f"mpi-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    work = (*trainer, *WORK[options.work], str(config), *options.overrides)
    preflight: tuple[str, ...] = ()
    if not options.no_preflight:
        preflight = preflight_options(site, (*trainer, "bench", "links"), options.work)
    supervision = supervision_options(options, attempt, folder / "logs")
    rank = (command.PYTHON, "-m", "xscale_launch.mpi.mpi_rank")
    argv = (*starter, *rank, *supervision, *preflight, "--", *work)
    if options.dry_run:
        write(shlex.join(argv))
        return status.DONE
    make_run_folder(folder, "launch", "attempts", attempt.name)
    # On SIGTERM mpirun kills the ranks within a second; it forwards SIGUSR1, on which the ranks save and stop.
    timeouts = Timeouts(stop=options.grace_seconds + 10)
    outcome = Supervisor(
        [Worker(0, argv, variables)], say, timeouts, stop_signal=signal.SIGUSR1
    ).run()
    code, cause = attempts.read_attempt(attempt, options.processes, outcome.status)
    if cause and not (attempt / "said").exists():
        say(cause)
    return code


def supervision_options(
    options: argparse.Namespace, attempt: Path, outputs: Path
) -> tuple[str, ...]:
    """The options by which a rank finds its attempt, its output, the others, and how long it may take to stop."""
    rendezvous: tuple[str, ...] = ()
    if not options.hosts and not options.srun:
        rendezvous = ("--rendezvous", f"{HOST}:{devices.free_port(HOST)}")
    return (
        "--attempt",
        str(attempt),
        "--outputs",
        str(outputs),
        "--stop-seconds",
        f"{options.grace_seconds:g}",
        # mpirun gives its ranks a pseudo-terminal even where its own output is a file.
        *(() if sys.stdout.isatty() else ("--plain",)),
        *rendezvous,
    )


def preflight_options(
    site: profile.Profile, links_command: Sequence[str], work: str
) -> tuple[str, ...]:
    """Return the preflight options of each rank; data preparation needs no links between the nodes."""
    if not site.preflight:
        return ()
    checks = (
        "--preflight",
        "--gpus",
        str(site.gpus_per_node),
        "--disk",
        f"{site.minimum_disk_gigabytes:g}",
    )
    if work != "train" or not site.links:
        return checks
    return (
        *checks,
        "--links",
        shlex.join(links_command),
        "--slowest-link",
        f"{site.minimum_link_gigabytes:g}",
    )


def forwarded_variables(variables: Mapping[str, str], site: profile.Profile) -> list[str]:
    """Return the variables that ranks on other hosts need; Open MPI's mpirun forwards only those named with -x."""
    return sorted(
        name
        for name in variables
        if name.startswith(FORWARDED_PREFIXES) or name in site.environment
    )


def mpirun(options: argparse.Namespace, names: Sequence[str]) -> tuple[str, ...]:
    """Return the mpirun command: any number of ranks, and no rank bound to a single core."""
    if shutil.which(options.mpirun) is None:
        raise LaunchError(
            f"{options.mpirun} is not installed here: install Open MPI or MPICH, or give its path with --mpirun"
        )
    version = subprocess.run(
        [options.mpirun, "--version"], capture_output=True, text=True, errors="replace", check=False
    ).stdout
    return (
        str(options.mpirun),
        *flags(version, options.processes, hosts(options), os.getuid() == 0, names),
    )


def flags(
    version: str,
    processes: int,
    places: Mapping[str, int],
    root: bool,
    names: Sequence[str] = ("PYTHONPATH",),
) -> list[str]:
    """Return the options for the implementation that `mpirun --version` names."""
    where = ",".join(f"{host}:{count}" for host, count in places.items())
    if "Open MPI" in version or "OpenRTE" in version or "PRTE" in version:
        oversubscribed = not places and processes > devices.cores()
        return [
            *("--quiet", "-np", str(processes), "--bind-to", "none"),
            *(word for name in names for word in ("-x", name)),
            *(["--allow-run-as-root"] if root else []),
            *(["--oversubscribe"] if oversubscribed else []),
            *(["--host", where] if where else []),
        ]
    if "HYDRA" in version or "Intel" in version:
        return ["-np", str(processes), *(["-hosts", where] if where else [])]
    raise LaunchError(
        "this mpirun is neither Open MPI's nor MPICH's: give another one with --mpirun, or use --srun"
    )


def hosts(options: argparse.Namespace) -> dict[str, int]:
    """Return the number of ranks on each host; raise `LaunchError` when the sum is not `--processes`."""
    if not options.hosts:
        return {}
    places: dict[str, int] = {}
    for text in options.hosts.split(","):
        host, _, count = text.partition(":")
        if not host or not (count or "1").isdigit():
            raise LaunchError(
                f"--hosts {options.hosts}: write host:ranks,host:ranks, such as n1:4,n2:4"
            )
        places[host] = places.get(host, 0) + int(count or 1)
    if sum(places.values()) != options.processes:
        raise LaunchError(
            f"--hosts has slots for {sum(places.values())} ranks, but --processes is {options.processes}"
        )
    return places


def srun(options: argparse.Namespace, site: profile.Profile) -> Sequence[str]:
    """Return the srun command for the enclosing allocation."""
    if "SLURM_JOB_ID" not in environment():
        raise LaunchError(
            "--srun needs an allocation: run salloc first, or use `xscale launch slurm`"
        )
    return ("srun", "--export=ALL", f"--mpi={site.mpi or 'pmix'}", f"--ntasks={options.processes}")
