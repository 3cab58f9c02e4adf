"""How the ranks of a run find each other: an attempt's part of the store, its socket, and a GPU for each rank."""

import errno
import ipaddress
import socket
import time
import uuid
from datetime import timedelta

import torch

from xscale.core.errors import ConfigError
from xscale.mesh.torch_private import PrefixStore, Store

POLL_SECONDS, LONGEST_POLL_SECONDS = 0.05, 1.0
"""A rank that waits for the others asks the store again after this time, each time twice as long."""


def attempt_store(store: Store, rank: int, world: int, timeout: timedelta) -> Store:
    """Return a prefix of the store that only this attempt uses. Collective; TimeoutError when a rank is missing.

    Rank 0 publishes a new prefix and closes it with the tokens of the ranks that answered. A rank that reads the prefix
    of an earlier attempt does not find its own token there and tries again.

    The store may contain keys of earlier attempts: torchrun's agent keeps it over restarts, and a rank that reads the
    address of a dead rank there would wait for it.
    """
    token = uuid.uuid4().hex
    if rank == 0:
        store.set("attempt", token)
        answers = [store.get(f"{token}/{other}").decode() for other in range(1, world)]
        store.set(f"{token}/closed", ",".join(answers))
        return PrefixStore(token, store)
    end, pause = time.monotonic() + timeout.total_seconds(), POLL_SECONDS
    while time.monotonic() < end:
        attempt = store.get("attempt").decode()
        store.set(f"{attempt}/{rank}", token)
        if store.check([f"{attempt}/closed"]) and token in store.get(f"{attempt}/closed").decode().split(","):
            return PrefixStore(attempt, store)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_SECONDS)
    raise TimeoutError(f"rank {rank} waited {timeout.total_seconds():.0f} s for the others to start")


def gpu_name(device: torch.device) -> str | None:
    """Return the name of a GPU, the same in every process of any machine; None for a CPU or where it has no name."""
    if device.type != "cuda":
        return None
    name = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if name is None else str(name)


def claim_gpu(store: Store, gpu: str) -> None:
    """Claim a GPU for this rank; ConfigError where another rank of the attempt has it.

    Ranks that see one GPU each, all as number 0, cannot tell alone whether it is the same one; NCCL fails then.
    """
    if store.add(f"gpu/{gpu}", 1) > 1:
        fix = "Give each process a GPU: torchrun --nproc-per-node with no more than there are, srun --gpus-per-task=1."
        raise ConfigError("run.device", f"another process of this run computes on the same GPU ({gpu})", fix)


def listener_of_store(name: str, port: int) -> socket.socket | None:
    """Listen for the store at the address that MASTER_ADDR is: torch's own socket listens on all interfaces.

    None for the name of a machine, which others may resolve to another of its addresses, and for an address that no
    interface has.
    """
    address = "127.0.0.1" if name == "localhost" else name
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        return None
    listener = socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    return listener
