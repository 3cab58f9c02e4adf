"""`xscale launch local`: start several processes on this machine, without a cluster and without torchrun."""

import argparse
import tempfile
from pathlib import Path

from xscale_launch import command, status
from xscale_launch.command import say, write
from xscale_launch.env import RankEnv, environment
from xscale_launch.files import make_run_folder, remove_file, remove_folder
from xscale_launch.nodes import devices
from xscale_launch.nodes.gpu_env import cpus_near_gpu
from xscale_launch.nodes.worker_environment import HOST, worker_environment, worker_settings
from xscale_launch.paths import expand
from xscale_launch.plans import plan_query
from xscale_launch.status import LaunchError
from xscale_launch.supervise import Supervisor, SupervisorResult, Timeouts, Worker, last_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `xscale launch local`."""
    command.add_config(parser)
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="number of workers; default: the number of visible GPUs, or 1",
    )
    parser.add_argument("--port", type=int, help="rendezvous port; default: a free port")
    parser.add_argument(
        "--grace-seconds",
        type=float,
        default=300.0,
        help="time to save after a signal, before SIGKILL",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands without starting them"
    )


def run(options: argparse.Namespace) -> int:
    """Start the workers and wait for them. The exit status is the trainer's: 0, 2, 75, or that of the failed worker."""
    config = command.check_config(options.config, options.overrides)
    variables = environment()
    processes = (
        options.processes if options.processes is not None else max(1, devices.gpus(variables))
    )
    if processes < 1:
        raise LaunchError(f"--processes must be at least 1, got {processes}")
    port = (
        devices.free_port(HOST)
        if options.port is None
        else devices.require_free(options.port, HOST)
    )
    argv = (*plan_query.xscale_command(options.xscale), "train", str(config), *options.overrides)
    logs, temporary = _log_folder(command.override(options.overrides, "run.dir"), options.dry_run)
    workers = [
        Worker(
            rank=rank,
            command=argv,
            environment=worker_environment(
                variables, RankEnv(rank, processes, rank, processes, HOST, port), logs
            ),
            log=None if rank == 0 else logs / f"rank-{rank}.log",
            cpus=cpus_near_gpu(variables, rank),
        )
        for rank in range(processes)
    ]
    if options.dry_run:
        for worker in workers:
            rank_env = RankEnv(worker.rank, processes, worker.rank, processes, HOST, port)
            settings = worker_settings(variables, rank_env, logs)
            values = " ".join(f"{name}={value}" for name, value in settings.items())
            write(f"{values} {' '.join(worker.command)}")
        return status.DONE
    if len(workers) > 1:
        make_run_folder(logs.parent, logs.name)
    for worker in workers[1:]:
        if worker.log is not None:
            remove_file(worker.log.parent, worker.log.name)
    outcome = Supervisor(workers, say, Timeouts(stop=options.grace_seconds)).run()
    report_failure(outcome, workers)
    if temporary and outcome.status in (status.DONE, status.RESUMABLE, status.USER_MISTAKE):
        remove_folder(logs.parent, logs.name)
    return outcome.status


def report_failure(outcome: SupervisorResult, workers: list[Worker]) -> None:
    """Print why the run failed, if it did. The output of rank 0 is on the terminal already."""
    if not outcome.cause or (outcome.status == outcome.statuses.get(0) == status.USER_MISTAKE):
        return
    failed = next(worker for worker in workers if worker.rank == outcome.rank)
    if failed.log is not None:
        say(f"last lines of {failed.log}:\n{last_lines(failed.log)}")
    say(f"{outcome.cause}; the other workers were stopped" if len(workers) > 1 else outcome.cause)


def _log_folder(run_dir: str | None, dry_run: bool) -> tuple[Path, bool]:
    """Return the folder for the output of ranks above 0: in run.dir if the command line sets it, else temporary."""
    if run_dir:
        return expand(run_dir) / "logs", False
    if dry_run:
        return Path(tempfile.gettempdir()) / "xscale-launch", False
    return Path(tempfile.mkdtemp(prefix="xscale-launch-")), True
