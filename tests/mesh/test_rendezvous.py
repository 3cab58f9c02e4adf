"""Ranks of one attempt meet in a store that has the keys of the attempts before."""

import socket
import threading
import uuid
from datetime import timedelta

import pytest
import torch.distributed as dist

from xscale.core.errors import ConfigError, FaultError
from xscale.mesh.rendezvous import attempt_store, claim_gpu, listener_of_store


def attempt(store: dist.Store, world: int, late: int = 0) -> list[str]:
    """Values that rank 0 wrote, as each rank reads them once they have met; `late` begins after the others."""
    found = [""] * world
    seconds = timedelta(seconds=10)

    def rank(number: int) -> None:
        own = attempt_store(store, number, world, seconds)
        if number == 0:
            own.set("address", uuid.uuid4().hex)
        found[number] = own.get("address").decode()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world)]
    ordered = [*threads[:late], *threads[late + 1 :], threads[late]]
    for thread in ordered:
        thread.start()
    for thread in threads:
        thread.join(15)
    return found


@pytest.mark.parametrize("late", [0, 2])
def test_each_attempt_reads_its_own(late: int) -> None:
    """Also when the first rank, which opens the attempt, comes last; and with fewer ranks than before."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    seen = [set(attempt(store, world, late)) for world in (3, 3, 4, 3)]
    assert all(len(found) == 1 and "" not in found for found in seen)
    assert len(set.union(*seen)) == 4


def test_without_it_a_rank_reads_what_is_stale() -> None:
    """The control: in the store as it is, the key of the attempt before is there at once."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("address", "of the dead")
    assert store.get("address") == b"of the dead"


def test_the_store_listens_at_one_address() -> None:
    """A machine's name, and an address that it does not have, are left to torch, which listens at all."""
    for name in (socket.gethostname(), "no such name.", "192.0.2.1"):
        assert listener_of_store(name, 0) is None
    for name, address in {"127.0.0.2": "127.0.0.2", "localhost": "127.0.0.1"}.items():
        listener = listener_of_store(name, 0)
        assert listener is not None
        with listener:
            host, port = listener.getsockname()[:2]
            assert host == address
            with pytest.raises(OSError, match="in use"):
                listener_of_store(name, port)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.3", port))


def test_a_rank_that_does_not_come() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("attempt", "old")
    with pytest.raises(FaultError, match="rank 1 waited 0 s for the others of 2 to start"):
        attempt_store(store, 1, 2, timedelta(seconds=0.2))


def test_two_ranks_of_an_attempt_have_different_gpus() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    first, again = dist.PrefixStore("first", store), dist.PrefixStore("again", store)  # type: ignore[attr-defined]
    for attempt in (first, again):
        claim_gpu(attempt, "GPU-1")
        claim_gpu(attempt, "GPU-2")
    with pytest.raises(ConfigError, match=r"another process of this run computes on the same GPU \(GPU-2\)"):
        claim_gpu(again, "GPU-2")
