"""What a node says about itself before the model is built, and what is wrong with a set of nodes that said so.

`facts` looks at this machine; `judge` compares what several machines said and is pure, so that every complaint is
tested without one. Bandwidth needs the training's own library: `judge_bandwidth` takes what its caller measured.
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

from xscale_launch.columns import columns

PACKAGES = ("torch", "numpy", "pydantic", "triton", "deepspeed", "mpi4py", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
PROBE_BYTES = 32 * 2**20
CLOCK_SECONDS = 30.0
"""Clocks further apart than this make logs unreadable and files from the future; a second or two does nothing."""
WRITE_MEGABYTES_PER_SECOND = 5.0
LOOPBACK = ("127.0.0.1", "127.0.1.1", "::1")
"""What installers give a machine's own name; the rest of 127/8 somebody has chosen."""
GPU_QUERY = ("index", "name", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total", "temperature.gpu")


@dataclass(frozen=True)
class Facts:
    """One node's word about itself. Plain data, so that it travels as JSON."""

    node: str
    hostname: str = ""
    """What `hostname` prints on it, which gloo looks up."""
    address: str = ""
    """What that resolves to on it; empty when it does not resolve."""
    interface: str = ""
    """The network interface that gloo was told to use, if it was."""
    head_address: str = ""
    """What the head node's name resolves to on this node."""
    clock: float = 0.0
    """Seconds since the epoch, when the facts were gathered."""
    heard: float = 0.0
    """The head node's clock when it heard them."""
    disk_free_gigabytes: float = 0.0
    write_megabytes_per_second: float = 0.0
    python: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    code: str = ""
    """Digest of the code that will run."""
    gpus: list[dict[str, str]] = field(default_factory=list)
    """One row a GPU, as nvidia-smi says it."""
    gpu_fault: str = ""
    """Why the GPUs could not be asked, when they could not."""


@dataclass(frozen=True)
class Problem:
    """Something wrong with a node: which, what, and what to do."""

    node: str
    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.node}: {self.what}; {self.advice}"


def facts(node: str, head: str, folder: Path, code: Path, gpus_wanted: int, interface: str = "") -> Facts:
    """Looks at this machine. Takes a second: `PROBE_BYTES` are written into `folder` and removed."""
    rows, fault = _gpus() if gpus_wanted else ([], "")
    return Facts(
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
        gpu_fault=fault,
    )


def as_data(known: Facts) -> dict[str, Any]:
    """Facts as plain data for JSON; `Facts(**data)` is the way back."""
    return asdict(known)


def disk_free(folder: Path) -> float:
    """Gigabytes; not a number where there is no such folder, as on a node that does not mount it."""
    try:
        return shutil.disk_usage(folder).free / 1e9
    except OSError:
        return math.nan


def write_speed(folder: Path, node: str) -> float:
    """Megabytes a second that this node writes into `folder`, synced; 0 when it cannot write there."""
    probe = folder / f".write-probe-{node}"
    begun = time.monotonic()
    try:
        with probe.open("wb", buffering=0) as file:
            block = b"\0" * 2**20
            for _ in range(PROBE_BYTES // len(block)):
                file.write(block)
                if time.monotonic() - begun > 5:  # slow enough to be told from what has been written so far
                    break
            size = file.tell()
            os.fsync(file.fileno())
        return size / 1e6 / max(time.monotonic() - begun, 1e-9)
    except OSError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)


def digest(code: Path) -> str:
    """One digest over every Python file below `code`, by name and content."""
    total = hashlib.sha256()
    for path in sorted(code.rglob("*.py")):
        total.update(str(path.relative_to(code)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


def judge(nodes: Sequence[Facts], wanted: Sequence[str], gpus: int = 0, disk_gigabytes: float = 1.0) -> list[Problem]:
    """Everything that is wrong with the nodes that answered, and who of those `wanted` did not."""
    found = [
        Problem(node, "did not answer the roll-call", "is it up, and can it reach the head node's port?")
        for node in wanted
        if node not in {known.node for known in nodes}
    ]
    for known in nodes:
        found += _alone(known, gpus, disk_gigabytes)
    return found + _together(nodes)


def _alone(known: Facts, gpus: int, disk_gigabytes: float) -> list[Problem]:
    """What is wrong with a node without a look at the others."""
    found: list[tuple[str, str]] = []
    if not known.head_address:
        found.append(("cannot resolve the head node's name", "put it into DNS or /etc/hosts"))
    offset = known.heard - known.clock if known.heard else 0.0
    if abs(offset) > CLOCK_SECONDS:
        found.append((f"its clock is {-offset:+.0f} s off the head node's", "start NTP on it"))
    if known.disk_free_gigabytes < disk_gigabytes:
        free = f"{known.disk_free_gigabytes:.1f} GB free of the {disk_gigabytes:g} GB wanted"
        found.append((f"the run folder's disk has {free}", "make room, or choose another run.dir"))
    if known.write_megabytes_per_second == 0:
        found.append(("cannot write into the run folder", "is the file system mounted there, and writable?"))
    elif known.write_megabytes_per_second < WRITE_MEGABYTES_PER_SECOND:
        speed = f"{known.write_megabytes_per_second:.1f} MB/s"
        found.append((f"writes {speed} into the run folder", "a checkpoint would take hours; choose another run.dir"))
    if gpus and known.gpu_fault:
        found.append((f"its GPUs cannot be asked: {known.gpu_fault}", "is the driver loaded?"))
    elif len(known.gpus) < gpus:
        found.append((f"shows {len(known.gpus)} of {gpus} GPUs", "one may have fallen off the bus; drain the node"))
    for row in known.gpus:
        errors = row.get("ecc.errors.uncorrected.volatile.total", "0")
        if errors.isdigit() and int(errors) > 0:
            found.append((f"GPU {row['index']} has {errors} uncorrected memory errors", "reset or replace it"))
        used, total = row.get("memory.used", "0"), row.get("memory.total", "0")
        if used.isdigit() and total.isdigit() and int(total) and int(used) > 0.1 * int(total):
            found.append((f"GPU {row['index']} has {used} MiB in use already", "somebody's process was left on it"))
    return [Problem(known.node, what, advice) for what, advice in found]


def _together(nodes: Sequence[Facts]) -> list[Problem]:
    """Who differs from the majority in what has to be the same everywhere."""
    found: list[Problem] = []
    if len({known.hostname for known in nodes}) == len(nodes) > 1:
        fix = "correct /etc/hosts, or give the profile an `interface`"
        found += [
            Problem(
                known.node, f"its own name leads to {known.address or 'nothing'}, where no other node finds it", fix
            )
            for known in nodes
            if known.address in ("", *LOOPBACK) and not known.interface
        ]
    seen: dict[str, dict[str, str]] = {known.node: _versions(known) for known in nodes}
    for name in sorted({name for said in seen.values() for name in said}):
        values = {node: said.get(name, "none") for node, said in seen.items()}
        usual = statistics.mode(values.values())
        found += [
            Problem(node, f"has {name} {value}, the others {usual}", "make them the same")
            for node, value in values.items()
            if value != usual
        ]
    return found


def _versions(known: Facts) -> dict[str, str]:
    kinds = ",".join(sorted({row.get("name", "?") for row in known.gpus}))
    return {"Python": known.python, "code": known.code, "GPU": kinds or "none", **known.packages}


def table(nodes: Sequence[Facts]) -> str:
    """What the nodes said, a line each, for a person."""
    rows = [["NODE", "ADDRESS", "DISK FREE", "WRITES", "GPUS", "PYTHON", "TORCH", "CODE"]]
    for known in nodes:
        disk, speed = f"{known.disk_free_gigabytes:.0f} GB", f"{known.write_megabytes_per_second:.0f} MB/s"
        torch = known.packages.get("torch", "none")
        rows.append([known.node, known.address, disk, speed, str(len(known.gpus)), known.python, torch, known.code])
    return columns(rows)


def judge_bandwidth(pairs: Mapping[tuple[str, str], float], share: float = 0.5) -> list[Problem]:
    """The nodes whose links (GB/s between two nodes) are all below `share` of the median one; else slow links."""
    if len(pairs) < 2:
        return []
    usual = statistics.median(pairs.values())
    slow = {pair: speed for pair, speed in pairs.items() if speed < share * usual}
    found: list[Problem] = []
    for node in sorted({name for pair in slow for name in pair}):
        mine = [speed for pair, speed in pairs.items() if node in pair]
        others = [speed for pair, speed in slow.items() if node in pair]
        if len(mine) > 1 and len(mine) == len(others):
            what = f"all its links are slow: {max(mine):.2f} GB/s at best, {usual:.2f} between the others"
            found.append(Problem(node, what, "exclude it, and look at its network card"))
    named = {problem.node for problem in found}
    for (one, other), speed in sorted(slow.items()):
        if not named & {one, other}:
            what = f"its link to {other} gives {speed:.2f} GB/s, the usual one {usual:.2f}"
            found.append(Problem(one, what, "look at the cable or the switch between them"))
    return found


def _resolve(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def packages() -> dict[str, str]:
    """The versions of those of `PACKAGES` that are installed here."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _gpus() -> tuple[list[dict[str, str]], str]:
    """One row a GPU and why there are none, if there are none."""
    if shutil.which("nvidia-smi") is None:
        return [], "there is no nvidia-smi"
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return [], "nvidia-smi hangs"
    if asked.returncode:
        said = (asked.stdout + asked.stderr).strip().splitlines()
        return [], said[-1] if said else f"nvidia-smi ended with status {asked.returncode}"
    rows = [[cell.strip() for cell in line.split(",")] for line in asked.stdout.splitlines() if line.strip()]
    return [dict(zip(GPU_QUERY, row, strict=False)) for row in rows], ""
