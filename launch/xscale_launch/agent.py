"""The launcher's agent on a node of a job: `python -m xscale_launch.agent ... -- COMMAND`, one per Slurm task.

The agent derives the ranks that it has to start, takes part in the preflight, starts the workers, and records how they
ended in the attempt's folder (see `status`), where the batch script reads it.
"""

import argparse
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from xscale_launch import attempts, status
from xscale_launch.command import say
from xscale_launch.env import RankEnv, environment, integer, slurm_ranks
from xscale_launch.files import write_run_file
from xscale_launch.nodes import devices, links
from xscale_launch.nodes.gpu_env import cpus_near_gpu
from xscale_launch.nodes.node_check import check_node
from xscale_launch.nodes.worker_environment import worker_environment
from xscale_launch.status import LaunchError
from xscale_launch.supervise import Supervisor, Timeouts, Worker, hold_signal, last_lines

PREFLIGHT_FAILED = 76
"""Exit status of an attempt that ended before training because a node failed the preflight."""


def main(argv: Sequence[str]) -> int:
    """Run the workers of this task until they end; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m xscale_launch.agent", allow_abbrev=False)
    parser.add_argument(
        "--attempt", type=Path, required=True, help="folder for the status files of this attempt"
    )
    parser.add_argument(
        "--outputs", type=Path, required=True, help="folder for the output of ranks above 0"
    )
    parser.add_argument("--processes", type=int, default=1, help="workers of this task")
    parser.add_argument(
        "--torchrun", action="store_true", help="start the workers through torchrun"
    )
    parser.add_argument(
        "--placed",
        action="store_true",
        help="RANK, WORLD_SIZE ... are already set; start one worker",
    )
    parser.add_argument(
        "--gpus", type=int, default=0, help="GPUs that the preflight must find on the node"
    )
    parser.add_argument(
        "--disk", type=float, default=1.0, help="free disk space required by the preflight, in GB"
    )
    parser.add_argument("--no-preflight", action="store_true")
    parser.add_argument("--links", help="the command that measures the links between the nodes")
    parser.add_argument(
        "--slowest-link", type=float, default=0.0, help="minimum bandwidth of a link, in GB/s"
    )
    parser.add_argument("--stop-seconds", type=float, default=300.0)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(list(argv))
    node = socket.gethostname()
    pending_signals = hold_signal(signal.SIGUSR1)
    try:
        variables = environment()
        if options.placed:
            return run_workers(
                options,
                [rank_from_torchrun(variables)],
                variables,
                variables.get("SLURMD_NODENAME", node),
                pending_signals,
            )
        node = variables.get("SLURMD_NODENAME", node)
        places = slurm_ranks(variables, options.processes)
        if not options.no_preflight and not preflight_passes(options, places[0], variables, node):
            return PREFLIGHT_FAILED
        return run_workers(options, places, variables, node, pending_signals)
    except LaunchError as error:
        return attempts.record_task(options.attempt, None, status.USER_MISTAKE, f"{node}: {error}")


def rank_from_torchrun(variables: Mapping[str, str]) -> RankEnv:
    """Read the rank that torchrun gave this worker."""
    return RankEnv(
        rank=integer(variables, "RANK"),
        world_size=integer(variables, "WORLD_SIZE"),
        local_rank=integer(variables, "LOCAL_RANK"),
        local_world_size=integer(variables, "LOCAL_WORLD_SIZE"),
        master_addr=variables["MASTER_ADDR"],
        master_port=integer(variables, "MASTER_PORT"),
    )


def preflight_passes(
    options: argparse.Namespace, rank_env: RankEnv, variables: Mapping[str, str], node: str
) -> bool:
    """Run the preflight on this task's node; False, with the problems recorded in `fault`, when a node is bad."""
    result = check_node(node, rank_env, variables, options.attempt, options.gpus, options.disk)
    problems, bad_nodes = list(result.problems), set(result.bad_nodes)
    if not problems and options.links and links.should_measure(rank_env, variables):
        slow = links.measure(
            shlex.split(options.links),
            links.rank_of_node(rank_env, variables),
            node,
            variables,
            options.attempt,
        )
        problems += map(str, slow)
        if not slow and rank_env.rank == 0:
            try:
                pairs = links.read_results(options.attempt)
            except LaunchError as error:
                problems.append(str(error))
            else:
                say(links.summary(pairs))
                slow = links.find_problems(pairs, options.slowest_link)
                problems += map(str, slow)
                bad_nodes |= {problem.node for problem in slow}
    if bad_nodes:
        write_run_file(
            options.attempt / "bad_nodes", "".join(f"{name}\n" for name in sorted(bad_nodes))
        )
    if problems:
        attempts.record_task(
            options.attempt, None, PREFLIGHT_FAILED, "preflight: " + "; ".join(problems)
        )
    return not problems


def run_workers(
    options: argparse.Namespace,
    rank_envs: list[RankEnv],
    variables: dict[str, str],
    node: str,
    pending_signals: list[signal.Signals],
) -> int:
    """Start the workers, wait for them, and record their exit status."""
    if "OMP_NUM_THREADS" not in variables and not options.placed:
        cpus = int(variables.get("SLURM_CPUS_PER_TASK", "0")) or devices.cores()
        variables = {**variables, "OMP_NUM_THREADS": str(max(1, cpus // len(rank_envs)))}
    if options.torchrun:
        workers = [torchrun_worker(options, rank_envs, variables)]
    else:
        workers = [
            Worker(
                rank=rank_env.rank,
                command=tuple(options.command),
                environment=worker_environment(variables, rank_env, options.outputs),
                log=None if rank_env.rank == 0 else options.outputs / f"rank-{rank_env.rank}.log",
                cpus=cpus_near_gpu(variables, rank_env.local_rank),
            )
            for rank_env in rank_envs
        ]
    outcome = Supervisor(
        workers,
        say,
        Timeouts(stop=options.stop_seconds),
        signal_children=options.torchrun,
        pending_signals=pending_signals,
    ).run()
    message = f"{node}: {outcome.cause}"
    tails = [
        last_lines(w.log)
        for w in workers
        if outcome.cause and w.rank == outcome.rank and w.log is not None
    ]
    if outcome.status == status.USER_MISTAKE:
        attempts.report_config_refused(
            options.attempt, outcome.statuses.get(0) == outcome.status, rank_envs[0].rank == 0
        )
        message = "\n".join([message, *tails])
    elif outcome.cause and not attempts.config_refused(options.attempt):
        # srun ends every task after rank 0's: a worker that SIGTERM kills before its own refusal has nothing to add.
        say("\n".join([message, *tails]))
    if options.torchrun and outcome.status not in (status.DONE, status.RESUMABLE):
        # torchrun replaces every exit status by 1; the status files of its workers are reliable.
        failed, stopped = (options.attempt / "fault").exists(), (options.attempt / "go_on").exists()
        code = status.RESUMABLE if stopped and not failed else outcome.status
    else:
        code = outcome.status
    return attempts.record_task(
        options.attempt, None if options.placed else rank_envs[0].rank, code, message
    )


def torchrun_worker(
    options: argparse.Namespace, places: Sequence[RankEnv], variables: Mapping[str, str]
) -> Worker:
    """Return the torchrun process for the workers of one node.

    torchrun starts each worker through its own agent (`--placed`), because torchrun discards the worker's exit status.
    """
    first, count = places[0], len(places)
    command = (
        *(sys.executable, "-m", "torch.distributed.run", "--max-restarts=0", "--no-python"),
        f"--nnodes={first.world_size // count}",
        f"--nproc-per-node={count}",
        f"--node-rank={first.rank // count}",
        f"--master-addr={first.master_addr}",
        f"--master-port={first.master_port}",
        *(sys.executable, "-m", "xscale_launch.agent", "--placed"),
        *("--attempt", str(options.attempt), "--outputs", str(options.outputs)),
        *("--stop-seconds", str(options.stop_seconds), "--", *options.command),
    )
    return Worker(first.rank, command, dict(variables))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
