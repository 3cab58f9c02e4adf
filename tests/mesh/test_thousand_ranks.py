"""A run of 1,024 ranks as one of its ranks has it: start, step and save cost it no more than a run of a few ranks.

Its incident is in `tests/watchdog/test_diagnosis.py`. The other ranks are torch's fake process group, a store that
counts requests, and plans of what they would write.
"""

import math
import os
from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.distributed import Pool
from tests.train.tiny import recipe
from xscale.checkpoint.async_saver import AsyncSaver
from xscale.checkpoint.disk import Disk
from xscale.checkpoint.planner import Box, write_items
from xscale.mesh import axes, rendezvous
from xscale.mesh.axes import Degrees
from xscale.mesh.collectives import MeanOverOwners
from xscale.mesh.environment import RankInfo
from xscale.mesh.mesh import fake_mesh
from xscale.mesh.rendezvous import attempt_store
from xscale.planning.simulate_step import simulate_step

WORLD = 1024


class CountedStore:
    """A store in which rank 0 answers when the clock has come to `answers`; requests are counted."""

    def __init__(self, answers: float) -> None:
        self.now, self.answers, self.token = 0.0, answers, b""
        self.requests: Counter[str] = Counter()

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        return b"attempt" if key == "attempt" else self.token

    def set(self, key: str, value: str) -> None:
        self.requests["set"] += 1
        self.token = value.encode()

    def check(self, keys: list[str]) -> bool:
        self.requests["check"] += 1
        return self.now >= self.answers


def test_a_rank_that_waits_for_the_others_asks_the_store_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountedStore(answers=120.0)

    def sleep(seconds: float) -> None:
        store.now += seconds

    clock = SimpleNamespace(monotonic=lambda: store.now, sleep=sleep)
    monkeypatch.setattr(rendezvous, "time", clock)
    monkeypatch.setattr(rendezvous, "PrefixStore", lambda prefix, inner: prefix)
    attempt_store(store, 5, WORLD, timedelta(seconds=600))  # type: ignore[arg-type]
    assert store.now < 122
    assert sum(store.requests.values()) < 4 * 130


def messages_of_a_step(folder: Path, world: int) -> tuple[Counter[str], dict[str, int]]:
    """The collectives of a step of rank 0, by name, and the sizes of its groups by axis."""
    mesh = {"dp_shard": world // 2, "pp": 2, "ep": 4}
    parallel = {"mesh": mesh, "zero": {"stage": 3}}
    train = {"steps": 6, "batch_size": 4 * world, "micro_batch_size": 1, "eval_every": 0}
    settings = recipe(folder, parallel=parallel, train=train)
    simulated = simulate_step(settings, axes.resolve(settings.parallel.mesh, world), 0, 2, 260)
    names = Counter(message.operator for message in simulated.messages)
    return names, {group.axis: len(group.ranks) for group in simulated.groups.values() if len(group.ranks) > 1}


OBJECT_COLLECTIVES = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")


@pytest.mark.long
def test_a_step_has_as_many_collectives_as_on_few_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, some_groups = messages_of_a_step(tmp_path, 64)
    for name in OBJECT_COLLECTIVES:
        monkeypatch.delattr(dist, name)
    many, groups = messages_of_a_step(tmp_path, WORLD)
    assert many == few
    assert groups.keys() == some_groups.keys()


def test_names_of_statistics_are_gathered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def gather(gathered: list[Any], mine: Any, group: Any = None) -> None:
        calls["objects"] += 1
        gathered[:] = [mine] * len(gathered)

    def reduce(tensor: torch.Tensor) -> None:
        calls["all_reduce"] += 1

    with fake_mesh(RankInfo(5, WORLD), Degrees(pp=4, dp_shard=256)) as mesh:
        monkeypatch.setattr(dist, "all_gather_object", gather)
        monkeypatch.setattr(dist, "all_reduce", reduce)
        means = MeanOverOwners(mesh.background)
        for _ in range(3):
            means({"a/load": torch.ones(8, dtype=torch.float64)}, {"a/load": 2}, mesh.device)
    assert calls == {"objects": 1, "all_reduce": 3}


@pytest.mark.long
def test_a_save_of_thirty_thousand_boxes_is_divided_evenly() -> None:
    """30,000 boxes, each written once, by ranks with as much to write."""
    shard = torch.empty(64, 1024, device="meta")
    names = [f"model.stack.blocks.{number}.ffn.up.weight" for number in range(30)]

    def items(rank: int) -> list[Any]:
        boxes = [Box(shard, (64 * WORLD, 1024), (64 * rank, 0)) for _ in names]
        return [item for name, box in zip(names, boxes, strict=True) for item in write_items(name, box)]

    plans = [SavePlan(items(rank)) for rank in range(WORLD)]
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planned, index = planner.create_global_plan(plans)
    assert {len(plan.items) for plan in planned} == {len(names)}
    assert len(index.state_dict_metadata) == len(names)


def operations_of_two_saves(folder: Path) -> list[Counter[str]]:
    """Count this rank's changes of the file system in the first save of a run and in the second, by operation."""
    counts: Counter[str] = Counter()

    class Counted(Disk):
        def touch(self, operation: str, path: Path) -> None:
            counts[operation] += 1

    group, saves = dist.new_group(backend="gloo"), []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # As much on each rank, however many there are.
    weights = {f"w{n}": distribute_tensor(torch.ones(4 * dist.get_world_size(), 5), mesh, [Shard(0)]) for n in range(3)}
    with AsyncSaver(folder, group=group, disk=Counted()) as saver:
        for step in (1, 2):
            saver.save(step, weights, {"step": step}, {})
            saver.wait()
            saves.append(+counts)
            counts.clear()
    return saves


@pytest.mark.long
def test_a_save_costs_each_rank_a_few_operations_of_the_file_system(tmp_path: Path) -> None:
    """Operations are as many on eight ranks as on two; the first rank also makes the folder and its index.

    So in a save of 1,024 ranks each opens one file of its own.
    """
    workers = Pool()
    try:
        few, many = (workers.run(operations_of_two_saves, world, tmp_path / str(world)) for world in (2, 8))
    finally:
        workers.close()
    assert all(of_rank == few[1] for of_rank in many[1:])
    assert all(save["open"] == 1 and save.total() <= 8 for save in many[1]), many[1]
    assert many[0] == few[0]
    assert all(save.total() <= 40 for save in many[0]), many[0]


def descriptors(lazy: str) -> tuple[int, int]:
    """Open files that a gloo group of all ranks takes: when it is created, and after the collectives of a save."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = lazy
    world = dist.get_world_size()
    words, parts = ([None] * world, ["plan"] * world) if dist.get_rank() == 0 else (None, None)
    try:
        before = len(os.listdir("/proc/self/fd"))
        group = dist.new_group(backend="gloo")
        created = len(os.listdir("/proc/self/fd")) - before
        dist.barrier()  # over the group before: a rank that goes on connects to those that still count
        dist.all_gather_object([None] * world, "shard", group=group)
        dist.broadcast_object_list(["folder"], 0, group=group)
        dist.gather_object("shard", words, 0, group=group)
        dist.scatter_object_list([None], parts, 0, group=group)
        dist.barrier(group)
        return created, len(os.listdir("/proc/self/fd")) - before
    finally:
        del os.environ["TORCH_GLOO_LAZY_INIT"]


@pytest.mark.parametrize(
    "world", [pytest.param(8, marks=pytest.mark.long), pytest.param(32, marks=pytest.mark.nightly)]
)
def test_a_lazy_background_group_connects_to_a_few_ranks_only(world: int) -> None:
    """Connections are lazy, as the launcher asks for it beside GPUs: otherwise a rank has a connection to each of
    1,023 others.

    docs/how-to/launch.md has the bound, 6 + 2 log2(world), for 1,024 ranks. Rank 0 gathers from all.
    """
    workers = Pool()
    try:
        (_, gathers), *lazy = workers.run(descriptors, world, "1")
        everyone = workers.run(descriptors, world, "0")
    finally:
        workers.close()
    assert all(created <= 5 for created, _ in lazy)
    assert all(used <= 6 + 2 * math.log2(world) for _, used in lazy), lazy
    assert gathers <= world + 3
    assert all(created >= world for created, _ in everyone), "the negative control: a group with all connections"
