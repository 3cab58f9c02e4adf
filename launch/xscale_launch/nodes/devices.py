"""The CPU cores, GPUs and free ports of this machine, found with the standard library only."""

import errno
import ipaddress
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping

from xscale_launch.status import LaunchError


def cores() -> int:
    """Count the CPU cores that this process may use (a cpuset or `taskset` may allow fewer than the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpus(variables: Mapping[str, str]) -> int:
    """Count the visible GPUs: `CUDA_VISIBLE_DEVICES` if set, else the output of `nvidia-smi -L`."""
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len(
            [name for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
        )
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(
        ["nvidia-smi", "-L"],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=30,
        check=False,
    )
    return (
        sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
        if listed.returncode == 0
        else 0
    )


def threads(processes: int) -> int:
    """Return the number of OMP threads for each of `processes` workers on this machine."""
    return max(1, cores() // processes)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that no process listens on now. Another process could take it before it is used."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
        return port


def address_to_listen_on(name: str) -> str:
    """Return `name` if it is an address of this machine; empty, for all addresses, for a name.

    Other machines may resolve a name to another address of this machine than it does itself.
    """
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return ""
    with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6) as probe:
        try:
            probe.bind((name, 0))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return ""
            raise
    return name


def require_free(port: int, host: str = "") -> int:
    """Return `port`; raise `LaunchError` when a process listens on it already or it is not a valid port."""
    if not 1 <= port <= 65535:
        raise LaunchError(
            f"{port} is not a port: choose one from 1024 to 65535, or omit --port to have a free one chosen"
        )
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise LaunchError(
                f"port {port} cannot be used on this machine ({error.strerror}): another run may listen on it. "
                f"Omit --port to have a free one chosen; {free_port()} is free now"
            ) from None
    return port
