"""How the ranks of a run find each other: an attempt's part of the store, its socket, and a GPU for each rank."""

import contextlib
import errno
import ipaddress
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from xscale.core.errors import ConfigError, FaultError
from xscale.mesh.environment import (
    RankInfo,
    meeting_place,
    rendezvous_to_serve,
    why_ranks_are_missing,
)
from xscale.mesh.torch_private import PrefixStore, Store

POLL_SECONDS, LONGEST_POLL_SECONDS = 0.05, 1.0
"""A rank that waits for the others asks the store again after this time, each time twice as long."""
SAY_SECONDS = 10.0
"""After so long a rank says for whom it waits."""
LISTED = 8
"""Missing ranks that a message names."""


@contextlib.contextmanager
def saying_after(seconds: float, text: str) -> Iterator[None]:
    """Print `text` once on standard error if the block is not over after `seconds`, whatever it waits in."""
    timer = threading.Timer(seconds, lambda: print(f"xscale: {text}", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def open_store(rank_info: RankInfo, timeout: timedelta) -> Store:
    """Open the store at MASTER_ADDR and MASTER_PORT; rank 0 holds it, unless torchrun does.

    A rank that waits for rank 0 says so: one of each node, and all of rank 0's own node, where the first is missing.
    FaultError when rank 0 does not start, ConfigError when its machine's name is not known.
    """
    rank, world = rank_info.rank, rank_info.world
    is_on_node_of_rank_0 = rank == rank_info.local_rank
    says = rank > 0 and (rank_info.local_rank == 0 or is_on_node_of_rank_0)
    waits_for = f"for rank 0 of {world}, which has the store at {meeting_place()}"
    text = f"rank {rank} has waited {SAY_SECONDS:.0f} s {waits_for}. {why_ranks_are_missing(world)}"
    if (address := rendezvous_to_serve()) is not None:
        wait_for_name(*address, timeout.total_seconds(), says=says or rank == 0)
    try:
        with saying_after(SAY_SECONDS, text) if says else contextlib.nullcontext():
            return _connected_store(rank, world, timeout)
    except dist.DistNetworkError as error:
        if rank == 0 or "timed out" not in str(error):
            raise
        waited = f"rank {rank} waited {timeout.total_seconds():.0f} s {waits_for}"
        raise FaultError(f"{waited}. {why_ranks_are_missing(world)}") from None


def wait_for_name(name: str, port: int, seconds: float, *, says: bool) -> None:
    """Wait until the name in MASTER_ADDR has an address: of a machine that starts, name services may not know it yet.

    ConfigError when it has none after `seconds`. With `says` a rank that waits long says so in a line.
    """
    begin, pause = time.monotonic(), POLL_SECONDS
    text = f"no machine is known by the name {name!r} in MASTER_ADDR, where rank 0 should be; waiting for it"
    with saying_after(SAY_SECONDS, text) if says else contextlib.nullcontext():
        while True:
            try:
                socket.getaddrinfo(name, port)
                return
            except (OSError, UnicodeError) as error:
                if time.monotonic() - begin > seconds:
                    why = getattr(error, "strerror", None) or "it is no name"
                    what = f"no machine is known by the name {name!r} after {seconds:.0f} s ({why})"
                    fix = (
                        "Set it to the name or address of rank 0's machine, the same on every rank."
                    )
                    raise ConfigError("MASTER_ADDR", what, fix) from None
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_SECONDS)


def _connected_store(rank: int, world: int, timeout: timedelta) -> Store:
    """Listen for the store or connect to it, without waiting for the other ranks: `attempt_store` names those."""
    address = rendezvous_to_serve()
    if address is None:
        store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=timeout))  # type: ignore[attr-defined]
        return store  # type: ignore[no-any-return]
    listener = listener_of_store(*address) if rank == 0 else None
    with listener or contextlib.nullcontext():
        descriptor = None if listener is None else listener.detach()
        return dist.TCPStore(  # type: ignore[attr-defined]
            *(*address, world, rank == 0, timeout, False),
            multi_tenant=True,
            master_listen_fd=descriptor,
        )


def attempt_store(
    store: Store, rank: int, world: int, timeout: timedelta, *, says: bool = True
) -> Store:
    """Return a prefix of the store that only this attempt uses. Collective; FaultError when a rank is missing.

    With `says` a rank that waits long says so in a line, rank 0 always.

    Rank 0 publishes a new prefix and closes it with the tokens of the ranks that answered. A rank that reads the prefix
    of an earlier attempt does not find its own token there and tries again.

    The store may contain keys of earlier attempts: torchrun's agent keeps it over restarts, and a rank that reads the
    address of a dead rank there would wait for it.
    """
    token = uuid.uuid4().hex
    if rank == 0:
        store.set("attempt", token)
        keys = {other: f"{token}/{other}" for other in range(1, world)}
        missing = wait_for_keys(
            store,
            keys,
            timeout.total_seconds(),
            SAY_SECONDS,
            "to start",
            why_ranks_are_missing(world),
        )
        if missing:
            what = f"{names_of(missing)} of {world} did not start within {timeout.total_seconds():.0f} s"
            raise FaultError(f"{what}. {why_ranks_are_missing(world)}")
        store.set(f"{token}/closed", ",".join(store.get(key).decode() for key in keys.values()))
        return PrefixStore(token, store)
    begin, pause, said = time.monotonic(), POLL_SECONDS, not says
    while (waited := time.monotonic() - begin) < timeout.total_seconds():
        # The key is missing until rank 0 starts, and `get` would wait for it without a word.
        if store.check(["attempt"]):
            attempt = store.get("attempt").decode()
            store.set(f"{attempt}/{rank}", token)
            if store.check([f"{attempt}/closed"]) and token in store.get(
                f"{attempt}/closed"
            ).decode().split(","):
                return PrefixStore(attempt, store)
        if waited > SAY_SECONDS and not said:
            said = True
            text = f"rank {rank} has waited {waited:.0f} s for the other ranks of {world} to start; rank 0 names them"
            print(f"xscale: {text}. {why_ranks_are_missing(world)}", file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_SECONDS)
    what = f"rank {rank} waited {timeout.total_seconds():.0f} s for the others of {world} to start"
    raise FaultError(f"{what}. {why_ranks_are_missing(world)}")


def wait_for_keys(
    store: Store,
    keys: Mapping[int, str],
    seconds: float,
    say_after: float,
    until: str,
    why: str = "",
) -> list[int]:
    """Wait until the store has the key of each rank; return the ranks whose key is missing after `seconds`.

    After `say_after` seconds one line on standard error says for which ranks this rank waits `until` what, and `why`.
    """
    begin = time.monotonic()
    pause = POLL_SECONDS
    said = False
    missing = list(keys)
    while missing:
        # One question for all; single ones only once something is to be said about them.
        if store.check([keys[rank] for rank in missing]):
            return []
        waited = time.monotonic() - begin
        if waited > say_after or waited > seconds:
            missing = [rank for rank in missing if not store.check([keys[rank]])]
        if waited > seconds:
            break
        if waited > say_after and not said and missing:
            said = True
            text = f"rank 0 has waited {waited:.0f} s for {names_of(missing)} {until}. {why}"
            print(f"xscale: {text.strip()}", file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_SECONDS)
    return missing


def names_of(ranks: Sequence[int]) -> str:
    """Name ranks for a message, the first of them where they are many."""
    more = f" and {len(ranks) - LISTED} more" if len(ranks) > LISTED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:LISTED]))}{more}"


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
        raise ConfigError(
            "run.device", f"another process of this run computes on the same GPU ({gpu})", fix
        )


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


LEAVE_SECONDS, LEAVE_AFTER_FAILURE_SECONDS = 60.0, 10.0
"""Longest time that the process with the store waits for the other ranks at its end."""
LEAVE_SAY_SECONDS = 5.0


def announce_leaving(store: Store, rank: int) -> None:
    """Note in the attempt's store that this rank uses it no more."""
    # Where the store is gone, nobody waits for this.
    with contextlib.suppress(RuntimeError, OSError):
        store.set(f"left/{rank}", "")


def leave_last(store: Store, world: int, seconds: float) -> None:
    """Wait, in the process that has the store, until no other rank uses it; say so where one does not come."""
    keys = {other: f"left/{other}" for other in range(1, world)}
    if missing := wait_for_keys(
        store, keys, seconds, LEAVE_SAY_SECONDS, "to end, since it holds their store"
    ):
        print(
            f"xscale: rank 0 ends without {names_of(missing)}, after {seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )
