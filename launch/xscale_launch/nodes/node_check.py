"""The preflight of a Slurm job: every task reports its node's facts, and the head node compares them.

Before any worker starts, every node sends its facts to the head node over TCP and receives the problems. The port is
the one above the rendezvous port, so this also proves that every node can resolve and reach the head node.
"""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xscale_launch
from xscale_launch.env import RankEnv, integer
from xscale_launch.hostlist import expand
from xscale_launch.nodes import preflight
from xscale_launch.nodes.devices import address_to_listen_on, require_free
from xscale_launch.status import LaunchError
from xscale_launch.typed_json import decode_json

NODE_CHECK_SECONDS = 90.0
MESSAGE_SECONDS = 10.0
"""How long the head node waits for a message on an open connection: whoever says nothing must not keep the others."""
BACKLOG = 128
"""Fewest connections that may wait to be accepted."""
MESSAGE_BYTES = 1 << 20
"""Largest message that is read."""
NodeReport = dict[str, Any]


@dataclass(frozen=True)
class TaskFacts(preflight.NodeFacts):
    """A task's report as it is received."""

    task: int = 0


@dataclass(frozen=True)
class NodeCheckResult:
    """The result of the node check on this task."""

    problems: tuple[str, ...]
    """One sentence per problem, naming the node; the same on every task that reported."""
    bad_nodes: tuple[str, ...] = ()
    """The nodes with a problem; known on the head node only."""
    nodes: tuple[preflight.NodeFacts, ...] = ()
    """The facts of all nodes; known on the head node only."""


def check_node(
    node: str,
    rank_env: RankEnv,
    variables: Mapping[str, str],
    folder: Path,
    gpus: int,
    disk_gigabytes: float,
) -> NodeCheckResult:
    """Run this task's part of the node check of its Slurm step.

    `folder` is where the write speed is measured; `gpus` is the number of GPUs required on each node.
    """
    tasks, task = integer(variables, "SLURM_NTASKS"), integer(variables, "SLURM_PROCID")
    expected = expand(variables.get("SLURM_STEP_NODELIST") or variables["SLURM_JOB_NODELIST"])
    code = Path(xscale_launch.__file__).parents[1]
    # If a node has several tasks, the first one queries its GPUs.
    gpus_here = gpus if rank_env.local_rank == 0 else 0
    interface = variables.get("GLOO_SOCKET_IFNAME", "")
    facts_here = preflight.facts(node, rank_env.master_addr, folder, code, gpus_here, interface)
    report = {**preflight.as_data(facts_here), "task": task}
    port = rank_env.master_port + 1
    if task > 0:
        try:
            return NodeCheckResult(
                tuple(send_report(rank_env.master_addr, port, report, NODE_CHECK_SECONDS))
            )
        except TimeoutError as error:
            return NodeCheckResult((f"{node}: {error}",))
    nodes: dict[str, preflight.NodeFacts] = {}
    bad_nodes: set[str] = set()

    def compare(reports: Sequence[NodeReport]) -> list[str]:
        for received in sorted(reports, key=lambda received: int(received["task"])):
            facts = preflight.NodeFacts(
                **{key: value for key, value in received.items() if key != "task"}
            )
            nodes.setdefault(facts.node, facts)
        problems = preflight.find_problems(list(nodes.values()), expected, gpus, disk_gigabytes)
        bad_nodes.update(problem.node for problem in problems)
        return [str(problem) for problem in problems]

    try:
        require_free(rank_env.master_port)
        host = address_to_listen_on(rank_env.master_addr)
        problems = serve(port, report, tasks, NODE_CHECK_SECONDS, compare, host)
    except LaunchError as error:
        return NodeCheckResult((f"{node}: {error}",))
    except OSError as error:
        return NodeCheckResult(
            (f"{node}: port {port}, derived from the job id, cannot be used ({error.strerror})",)
        )
    return NodeCheckResult(tuple(problems), tuple(sorted(bad_nodes)), tuple(nodes.values()))


def serve(
    port: int,
    head_report: NodeReport,
    count: int,
    seconds: float,
    compare: Callable[[Sequence[NodeReport]], list[str]],
    host: str = "",
) -> list[str]:
    """Run the head node's part: receive `count` reports (its own included) and send all nodes the result of `compare`.

    After `seconds` it compares the reports that arrived. Each report gets `heard`, the head node's clock on arrival.
    A message that is no report is ignored. `host`: the address to listen on; empty: all.
    """
    reports = [{**head_report, "heard": time.time()}]
    connections: list[socket.socket] = []
    deadline = time.monotonic() + seconds
    with (
        contextlib.ExitStack() as open_connections,
        socket.create_server((host, port), backlog=max(count, BACKLOG)) as server,
    ):
        while len(reports) < count and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                connection, _ = server.accept()
            except TimeoutError:
                break
            open_connections.enter_context(connection)
            connection.settimeout(min(MESSAGE_SECONDS, max(1.0, left)))
            try:
                reports.append({**asdict(_read(connection, TaskFacts)), "heard": time.time()})
                connections.append(connection)
            except (OSError, ValueError):
                connection.close()
        problems = compare(reports)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(problems).encode() + b"\n")
    return problems


def send_report(host: str, port: int, report: NodeReport, seconds: float) -> list[str]:
    """Run another node's part: send its report and return the problems. Raises `TimeoutError` with the reason."""
    deadline, why = time.monotonic() + seconds, "no answer"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=min(10.0, seconds)) as connection:
                connection.sendall(json.dumps({**report, "clock": time.time()}).encode() + b"\n")
                connection.settimeout(seconds)
                problems: list[str] = _read(connection, list[str])
                return problems
        except (OSError, ValueError) as error:
            why = str(error)
            time.sleep(0.1)
    raise TimeoutError(f"the head node {host} cannot be reached at port {port} from here: {why}")


def _read(connection: socket.socket, kind: Any) -> Any:
    """Read one line of JSON of the type `kind`; OSError or ValueError when none comes."""
    deadline, message = time.monotonic() + (connection.gettimeout() or MESSAGE_SECONDS), b""
    while not message.endswith(b"\n") and len(message) < MESSAGE_BYTES:
        if time.monotonic() > deadline:
            raise TimeoutError("the message did not end in time")
        if not (received := connection.recv(1 << 16)):
            break
        message += received
    return decode_json(message, kind)
