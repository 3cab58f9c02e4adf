"""The pool of ranks itself: it gathers, it reports, it does not hang."""

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path

import pytest

from tests.distributed import ROOT, Pool, RankError, distributed
from tests.worker import MANY_THREADS, threads


@distributed(ranks=2)
def test_ranks_meet_in_a_group_of_their_own(tmp_path: Path) -> None:
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    assert value.item() == 3
    assert dist.get_world_size() == 2
    assert os.environ["WORLD_SIZE"] == "2"
    assert tmp_path.is_dir()


@pytest.mark.parametrize("add", [1, 2])
@distributed(ranks=3)
def test_parametrised_values_travel(add: int) -> None:
    import torch
    import torch.distributed as dist

    value = torch.tensor([add])
    dist.all_reduce(value)
    assert value.item() == 3 * add


def rank_squared(offset: int, *, scale: int = 1) -> int:
    import torch.distributed as dist

    return int(dist.get_rank() ** 2 * scale + offset)


def sharded_norm() -> float:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layer = torch.nn.Linear(4, 4)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    loss = layer(torch.ones(2, 4)).square().sum()
    loss.backward()
    return float(loss)


def fail_on_one() -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("rank 1 will not")
    dist.all_reduce(torch.ones(1))


def vanish() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        os._exit(7)


def find_damage(folder: Path, times: int) -> int:
    """On rank 1, end as glibc ends a process with a damaged heap, in the first so many calls."""
    import torch.distributed as dist

    before = len(list(folder.iterdir()))
    if dist.get_rank() == 1 and before < times:
        (folder / str(before)).touch()
        print("malloc(): unaligned tcache chunk detected", flush=True)
        os.abort()
    dist.barrier()
    return before


def oversleep() -> None:
    time.sleep(60)


def test_results_come_back_by_rank(pool: Pool) -> None:
    assert pool.run(rank_squared, 3, 10, scale=2) == [10, 12, 18]


def order_of_a_set() -> int:
    return hash("a word")


def test_neighbours_have_different_hash_seeds(pool: Pool) -> None:
    """Hash seeds differ, as those of a run's ranks do: where the order of a set decides something, they disagree."""
    hashes = pool.run(order_of_a_set, 4)
    assert len(set(hashes)) == 2
    assert all(before != after for before, after in pairwise(hashes))


def test_a_rank_that_cannot_run_is_no_failed_comparison(pool: Pool) -> None:
    """A negative control with a misspelt patch would else pass."""
    with pytest.raises(RankError) as caught:
        pool.run(fail_on_one, 2)
    assert not isinstance(caught.value, AssertionError)


def test_groups_and_meshes_are_fresh_each_time(pool: Pool) -> None:
    first = pool.run(sharded_norm, 2)
    assert pool.run(sharded_norm, 2) == first
    assert first[0] == first[1]


def test_a_call_is_repeated_once_where_glibc_finds_a_damaged_heap(tmp_path: Path) -> None:
    pool = Pool()
    try:
        with pytest.warns(UserWarning, match="unaligned tcache chunk"):
            assert pool.run(find_damage, 2, tmp_path, 1)[1] == 1
        with pytest.raises(RankError, match="unaligned tcache chunk"):
            pool.run(find_damage, 2, tmp_path, 2)
        with pytest.raises(RankError, match="status 7"):
            pool.run(vanish, 2)
    finally:
        pool.close()


def lose_a_connection(folder: Path, times: int, also: bool) -> int:
    """Fail on rank 0 as gloo does, that many times; on rank 1 with another error, if `also`."""
    import torch.distributed as dist

    calls = folder / f"calls-{dist.get_rank()}"
    count = len(calls.read_text()) if calls.exists() else 0
    calls.write_text("x" * (count + 1))
    if also and dist.get_rank() == 1:
        raise ValueError("the cause")
    if dist.get_rank() == 0 and count < times:
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    return count


def test_a_call_is_repeated_once_where_gloo_loses_a_connection(tmp_path: Path) -> None:
    pool = Pool()
    try:
        (tmp_path / "caused").mkdir()
        with pytest.raises(RankError, match="the cause"):
            pool.run(lose_a_connection, 2, tmp_path / "caused", 2, True)
        with pytest.warns(UserWarning, match="gloo lost a connection"):
            assert pool.run(lose_a_connection, 2, tmp_path, 1, False)[0] == 1
        (tmp_path / "again").mkdir()
        with pytest.raises(RankError, match="Connection closed by peer"):
            pool.run(lose_a_connection, 2, tmp_path / "again", 2, False)
    finally:
        pool.close()


def threads_found(width: int) -> int:
    """How many threads the process has had since the call before this one."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    before_call = threads()
    mesh = init_device_mesh("cpu", (2, 1))
    weight = distribute_tensor(torch.ones(width, width, requires_grad=True), mesh, [Shard(0), Replicate()])
    (weight @ weight.redistribute(placements=[Replicate(), Replicate()])).sum().full_tensor().backward()
    return before_call


@pytest.mark.long
def test_a_worker_that_keeps_many_groups_is_replaced() -> None:
    pool = Pool()
    try:
        had = [pool.run(threads_found, 2, width)[0] for width in range(4, 20)]
    finally:
        pool.close()
    assert max(had) < MANY_THREADS + 20, f"{had}"


def test_a_failure_is_reported_with_its_rank_and_the_pool_lives_on(pool: Pool) -> None:
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(fail_on_one, 2)
    assert "rank 1 will not" in caught.value.texts[1]
    assert time.monotonic() - began < 300, "the failure is reported before the pool's timeout"
    assert pool.run(rank_squared, 2, 0) == [0, 1]


def test_a_dead_rank_is_reported_and_replaced(pool: Pool) -> None:
    with pytest.raises(RankError, match="ended with status 7"):
        pool.run(vanish, 2)
    assert pool.run(rank_squared, 2, 0) == [0, 1]


def test_a_hung_rank_is_killed_with_its_stack(pool: Pool) -> None:
    with pytest.raises(RankError, match="in oversleep") as caught:
        pool.run(oversleep, 1, timeout_seconds=3)
    assert "not done in 3 s" in caught.value.texts[0]
    assert pool.run(rank_squared, 1, 5) == [5]


def leave_at_once(rank: int) -> int:
    """Its process, unless it is the one that ends."""
    import torch.distributed as dist

    if dist.get_rank() == rank:
        os._exit(3)
    return os.getpid()


def own_process(_: int = 0) -> int:
    return os.getpid()


def test_a_process_keeps_its_rank_when_another_is_replaced() -> None:
    """Torch's caches hold meshes by what they look like, with the coordinates of the rank that made them."""
    pool = Pool()
    try:
        before = pool.run(own_process, 3)
        with pytest.raises(RankError):
            pool.run(leave_at_once, 3, 0)
        after = pool.run(own_process, 3)
    finally:
        pool.close()
    assert after[1:] == before[1:]
    assert after[0] != before[0]


def is_stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_an_idle_worker_is_stopped_until_the_next_call() -> None:
    """Threads of gloo wake 100 times a second: those of idle workers took a tenth of two cores."""
    pool = Pool()
    try:
        processes = pool.run(own_process, 2)
        end = time.monotonic() + 60
        while not all(is_stopped(process) for process in processes) and time.monotonic() < end:
            time.sleep(0.01)
        assert all(is_stopped(process) for process in processes)
        assert pool.run(own_process, 1) == processes[:1]
        assert is_stopped(processes[1])
    finally:
        pool.close()


@pytest.mark.long
def test_stopped_workers_end_when_the_test_run_is_killed() -> None:
    script = (
        "from tests.distributed import Pool; from tests.test_distributed import own_process; import time\n"
        "print(Pool().run(own_process, 2), flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        descriptors = [os.pidfd_open(process) for process in json.loads(run.stdout.readline())]
        run.kill()
    for descriptor in descriptors:
        assert wait_for_any([descriptor], 60), "a worker is there a minute after the end of its test run"
        os.close(descriptor)
