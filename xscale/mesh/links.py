"""Bandwidth between nodes: an all-reduce between every pair of nodes, in rounds in which every node has a partner."""

import datetime
import time
from typing import Any

import torch
import torch.distributed as dist

from xscale.core.errors import FaultError
from xscale.mesh.collectives import all_gather_object
from xscale.mesh.environment import RankInfo
from xscale.mesh.mesh import init_process_group, leave_process_group, temporary_group

REPEATS = 3


def round_robin_pairs(count: int) -> list[list[tuple[int, int]]]:
    """Schedule every pair of `count` nodes once; in a round all nodes but one of an odd count have a partner."""
    ring = list(range(count + count % 2))
    schedule = []
    for _ in range(len(ring) - 1):
        pairs = [(min(pair), max(pair)) for pair in zip(ring, reversed(ring), strict=True)][
            : len(ring) // 2
        ]
        schedule.append([pair for pair in pairs if pair[1] < count])
        ring[1:] = [ring[-1], *ring[1:-1]]
    return schedule


def measure_links(
    rank_info: RankInfo, name: str, size: int, seconds: float, timeout_seconds: float = 60.0
) -> dict[str, Any]:
    """Measure GB/s of an all-reduce of `size` bytes between every pair of nodes. Collective, one rank per node.

    `name` is the name of this node. No round starts after `seconds`. FaultError names a pair whose all-reduce fails.
    """
    cuda = torch.cuda.is_available()
    backend, device = (
        ("nccl", torch.device("cuda", rank_info.local_rank))
        if cuda
        else ("gloo", torch.device("cpu"))
    )
    timeout = datetime.timedelta(seconds=timeout_seconds)
    init_process_group(rank_info, "gloo", timeout)
    try:
        names: list[str] = all_gather_object(name)
        speeds: list[tuple[str, str, float]] = []
        begun = time.monotonic()
        for pairs in round_robin_pairs(rank_info.world):
            local_pair = next((pair for pair in pairs if rank_info.rank in pair), None)
            speed = None
            if local_pair is not None:
                try:
                    speed = (
                        names[local_pair[0]],
                        names[local_pair[1]],
                        _speed(local_pair, backend, device, size, timeout),
                    )
                except RuntimeError as error:
                    what = f"{backend} all-reduce between {names[local_pair[0]]} and {names[local_pair[1]]} fails"
                    raise FaultError(f"{what}: {str(error).splitlines()[0]}") from None
            results = all_gather_object((speed, time.monotonic() - begun))
            speeds += [results[first][0] for first, _ in pairs]
            if results[0][1] > seconds:
                break
        return {
            "backend": backend,
            "bytes": size,
            "nodes": names,
            "gigabytes_per_second": sorted(speeds),
        }
    finally:
        leave_process_group()


def _speed(
    pair: tuple[int, int],
    backend: str,
    device: torch.device,
    size: int,
    timeout: datetime.timedelta,
) -> float:
    """Measure GB/s between this rank and its partner."""
    tensor = torch.ones(size // 4, device=device)
    best = float("inf")
    with temporary_group(pair, backend, timeout) as group:
        for repeat in range(REPEATS + 1):
            begun = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            # Reading a value waits for the device; the first time connects, and does not count.
            total = tensor[0].item()
            if repeat:
                best = min(best, time.perf_counter() - begun)
    assert total == 2.0 ** (REPEATS + 1), f"an all-reduce of ones gave {total}"
    return size / best / 1e9
