"""The preflight: facts about each node, collected before the model is built, and the problems that they show.

`facts` inspects this machine; `find_problems` compares the facts of several machines and is a pure function, so every
problem can be tested without a faulty machine. `find_slow_links` evaluates bandwidths that its caller measured.
"""

import hashlib
import importlib.metadata
import math
import os
import platform
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xscale_launch.command import columns
from xscale_launch.files import open_run_file, read_run_file, remove_file

PACKAGES = (
    "torch",
    "numpy",
    "pydantic",
    "triton",
    "deepspeed",
    "mpi4py",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
PROBE_BYTES = 32 * 2**20
CLOCK_SECONDS = 30.0
"""Clocks further apart make logs unreadable and file times lie in the future; a second or two is harmless."""
WRITE_MEGABYTES_PER_SECOND = 5.0
LOOPBACK = ("127.0.0.1", "127.0.1.1", "::1")
"""Addresses that installers assign to a machine's own name; others in 127/8 were chosen on purpose."""
GPU_QUERY = (
    "index",
    "name",
    "memory.total",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
    "temperature.gpu",
)


@dataclass(frozen=True)
class NodeFacts:
    """The facts of one node, as plain data that is sent as JSON."""

    node: str
    hostname: str = ""
    """The output of `hostname`, which gloo resolves."""
    address: str = ""
    """The address that `hostname` resolves to on this node; empty if it does not resolve."""
    interface: str = ""
    """The network interface set for gloo, if any."""
    head_address: str = ""
    """The address that the head node's name resolves to on this node."""
    clock: float = 0.0
    """The node's clock when the facts were collected, in seconds since the epoch."""
    heard: float = 0.0
    """The head node's clock when it received the facts."""
    disk_free_gigabytes: float = 0.0
    write_megabytes_per_second: float = 0.0
    python: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    code: str = ""
    """Digest of the code that will run."""
    gpus: list[dict[str, str]] = field(default_factory=list)
    """One row per GPU, as nvidia-smi prints it."""
    gpu_fault: str = ""
    """Why nvidia-smi failed, if it did."""


@dataclass(frozen=True)
class NodeProblem:
    """A problem of a node and its fix."""

    node: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.node}: {self.what}; {self.fix}"


def facts(
    node: str, head: str, folder: Path, code: Path, gpus_required: int, interface: str = ""
) -> NodeFacts:
    """Collect the facts of this machine. Takes about a second: `PROBE_BYTES` are written into `folder` and deleted."""
    rows, gpu_fault = _gpus() if gpus_required else ([], "")
    return NodeFacts(
        node=node,
        hostname=socket.gethostname(),
        interface=interface,
        address=_resolve(socket.gethostname()),
        head_address=_resolve(head),
        clock=time.time(),
        disk_free_gigabytes=disk_free(folder),
        write_megabytes_per_second=write_speed(folder, node),
        python=platform.python_version(),
        packages=packages(),
        code=digest(code),
        gpus=rows,
        gpu_fault=gpu_fault,
    )


def as_data(node_facts: NodeFacts) -> dict[str, Any]:
    """Convert to plain data for JSON; `NodeFacts(**data)` is the inverse."""
    return asdict(node_facts)


def disk_free(folder: Path) -> float:
    """Return the free disk space in GB; NaN if the folder does not exist, as on a node that does not mount it."""
    try:
        return shutil.disk_usage(folder).free / 1e9
    except OSError:
        return math.nan


def write_speed(folder: Path, node: str) -> float:
    """Measure the speed of synced writes into `folder`, in MB/s; 0 if writing fails."""
    probe = folder / f".write-probe-{node}"
    started = time.monotonic()
    try:
        remove_file(probe.parent, probe.name)
        with open_run_file(probe, "xb") as file:
            block = b"\0" * 2**20
            for _ in range(PROBE_BYTES // len(block)):
                file.write(block)
                if (
                    time.monotonic() - started > 5
                ):  # so slow that the bytes written so far are enough
                    break
            size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        return size / 1e6 / max(time.monotonic() - started, 1e-9)
    except OSError:
        return 0.0
    finally:
        remove_file(probe.parent, probe.name)


def digest(code: Path) -> str:
    """Hash the names and contents of all Python files below `code`."""
    total = hashlib.sha256()
    for path in sorted(code.rglob("*.py")):
        total.update(str(path.relative_to(code)).encode() + b"\0" + read_run_file(path))
    return total.hexdigest()[:16]


def find_problems(
    nodes: Sequence[NodeFacts], expected: Sequence[str], gpus: int = 0, disk_gigabytes: float = 1.0
) -> list[NodeProblem]:
    """Find every problem of the nodes that reported, and the `expected` nodes that did not."""
    problems = [
        NodeProblem(
            node,
            "did not report in the preflight",
            "is it up, and can it reach the head node's port?",
        )
        for node in expected
        if node not in {known.node for known in nodes}
    ]
    for known in nodes:
        problems += _node_problems(known, gpus, disk_gigabytes)
    return problems + _differences(nodes)


def _node_problems(known: NodeFacts, gpus: int, disk_gigabytes: float) -> list[NodeProblem]:
    """Find the problems of one node that do not depend on the other nodes."""
    problems: list[tuple[str, str]] = []
    if not known.head_address:
        problems.append(("cannot resolve the head node's name", "put it into DNS or /etc/hosts"))
    offset = known.heard - known.clock if known.heard else 0.0
    if abs(offset) > CLOCK_SECONDS:
        problems.append((f"its clock is {-offset:+.0f} s off the head node's", "start NTP on it"))
    if known.disk_free_gigabytes < disk_gigabytes:
        free = f"{known.disk_free_gigabytes:.1f} GB free, {disk_gigabytes:g} GB are required"
        problems.append(
            (f"the run folder's disk has {free}", "free some space, or choose another run.dir")
        )
    if known.write_megabytes_per_second == 0:
        problems.append(
            ("cannot write into the run folder", "is the file system mounted there, and writable?")
        )
    elif known.write_megabytes_per_second < WRITE_MEGABYTES_PER_SECOND:
        speed = f"{known.write_megabytes_per_second:.1f} MB/s"
        problems.append(
            (
                f"writes {speed} into the run folder",
                "a checkpoint would take hours; choose another run.dir",
            )
        )
    if gpus and known.gpu_fault:
        problems.append((f"its GPUs cannot be queried: {known.gpu_fault}", "is the driver loaded?"))
    elif len(known.gpus) < gpus:
        problems.append(
            (
                f"shows {len(known.gpus)} of {gpus} GPUs",
                "one may have fallen off the bus; drain the node",
            )
        )
    for row in known.gpus:
        errors = row.get("ecc.errors.uncorrected.volatile.total", "0")
        if errors.isdigit() and int(errors) > 0:
            problems.append(
                (f"GPU {row['index']} has {errors} uncorrected ECC errors", "reset or replace it")
            )
        used, total = row.get("memory.used", "0"), row.get("memory.total", "0")
        if used.isdigit() and total.isdigit() and int(total) and int(used) > 0.1 * int(total):
            problems.append(
                (
                    f"GPU {row['index']} has {used} MiB in use already",
                    "another process is running on it",
                )
            )
    return [NodeProblem(known.node, what, fix) for what, fix in problems]


def _differences(nodes: Sequence[NodeFacts]) -> list[NodeProblem]:
    """Find the nodes that differ from the majority in what has to be the same everywhere."""
    problems: list[NodeProblem] = []
    if len({known.hostname for known in nodes}) == len(nodes) > 1:
        fix = "correct /etc/hosts, or give the profile an `interface`"
        problems += [
            NodeProblem(
                known.node,
                f"its own name resolves to {known.address or 'nothing'}, which no other node can reach",
                fix,
            )
            for known in nodes
            if known.address in ("", *LOOPBACK) and not known.interface
        ]
    versions: dict[str, dict[str, str]] = {known.node: _versions(known) for known in nodes}
    for name in sorted({name for node_versions in versions.values() for name in node_versions}):
        values = {node: node_versions.get(name, "none") for node, node_versions in versions.items()}
        majority = statistics.mode(values.values())
        problems += [
            NodeProblem(
                node,
                f"has {name} {value}, the others {majority}",
                "install the same version on all nodes",
            )
            for node, value in values.items()
            if value != majority
        ]
    return problems


def _versions(known: NodeFacts) -> dict[str, str]:
    kinds = ",".join(sorted({row.get("name", "?") for row in known.gpus}))
    return {"Python": known.python, "code": known.code, "GPU": kinds or "none", **known.packages}


def table(nodes: Sequence[NodeFacts]) -> str:
    """Format the facts as a table with one line per node."""
    rows = [["NODE", "ADDRESS", "DISK FREE", "WRITES", "GPUS", "PYTHON", "TORCH", "CODE"]]
    for known in nodes:
        disk, speed = (
            f"{known.disk_free_gigabytes:.0f} GB",
            f"{known.write_megabytes_per_second:.0f} MB/s",
        )
        torch = known.packages.get("torch", "none")
        rows.append(
            [
                known.node,
                known.address,
                disk,
                speed,
                str(len(known.gpus)),
                known.python,
                torch,
                known.code,
            ]
        )
    return columns(rows)


def find_slow_links(
    pairs: Mapping[tuple[str, str], float], fraction: float = 0.5
) -> list[NodeProblem]:
    """Find nodes whose links (in GB/s) are all below `fraction` of the median link, and other single slow links."""
    if len(pairs) < 2:
        return []
    median = statistics.median(pairs.values())
    slow = {pair: speed for pair, speed in pairs.items() if speed < fraction * median}
    problems: list[NodeProblem] = []
    for node in sorted({name for pair in slow for name in pair}):
        speeds = [speed for pair, speed in pairs.items() if node in pair]
        slow_speeds = [speed for pair, speed in slow.items() if node in pair]
        if len(speeds) > 1 and len(speeds) == len(slow_speeds):
            what = f"all its links are slow: {max(speeds):.2f} GB/s at best, the median is {median:.2f}"
            problems.append(NodeProblem(node, what, "exclude it, and check its network card"))
    named = {problem.node for problem in problems}
    for (first, second), speed in sorted(slow.items()):
        if not named & {first, second}:
            what = f"its link to {second} reaches {speed:.2f} GB/s, the median is {median:.2f}"
            problems.append(NodeProblem(first, what, "check the cable or the switch between them"))
    return problems


def _resolve(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def packages() -> dict[str, str]:
    """Return the versions of those `PACKAGES` that are installed here."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _gpus() -> tuple[list[dict[str, str]], str]:
    """Return one row per GPU, or the reason why nvidia-smi failed."""
    if shutil.which("nvidia-smi") is None:
        return [], "nvidia-smi is not installed"
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(
            query, capture_output=True, text=True, errors="replace", timeout=30, check=False
        )
    except subprocess.TimeoutExpired:
        return [], "nvidia-smi hangs"
    if listed.returncode:
        lines = (listed.stdout + listed.stderr).strip().splitlines()
        return [], lines[-1] if lines else f"nvidia-smi failed with status {listed.returncode}"
    rows = [
        [cell.strip() for cell in line.split(",")]
        for line in listed.stdout.splitlines()
        if line.strip()
    ]
    return [dict(zip(GPU_QUERY, row, strict=False)) for row in rows], ""
