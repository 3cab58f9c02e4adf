"""The groups behind the axes of a mesh: the right ranks, few of them, and the same on every rank."""

import datetime
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, Shard

from tests.distributed import Pool
from xscale.checkpoint.planner import local_shards
from xscale.mesh import mesh as mesh_file
from xscale.mesh.axes import DENSE_AXES, EXPERT_AXES, Degrees
from xscale.mesh.environment import RankInfo, read_rank_info
from xscale.mesh.mesh import Mesh, build_mesh, create_communicators, fake_mesh, leaving_process_group, rank_grids
from xscale.mesh.rank_groups import groups_of

LAYOUTS = {
    "pp-tp-ep": Degrees(pp=2, dp_shard=2, tp=2, ep=2),
    "copies": Degrees(dp_replicate=2, dp_shard=4, ep=2),
    "order": Degrees(dp_shard=2, cp=2, tp=2, ep=4, order=("tp", "cp", "dp_shard", "dp_replicate", "pp")),
    "whole-experts": Degrees(dp_shard=4, tp=2, ep=2, tp_in_experts=False),
}


def laid_out(degrees: Degrees) -> Mesh:
    return build_mesh(read_rank_info(), degrees, torch.device("cpu"), datetime.timedelta(seconds=60))


def spoken(degrees: Degrees) -> tuple[dict[str, list[int]], int, float]:
    """The ranks of each axis of each mesh, how many groups this rank is in, and what a sum over some of them gives."""
    mesh = laid_out(degrees)
    found = {}
    for name, one, axes in zip(
        "deri",
        (mesh.dense, mesh.experts, mesh.replicas, mesh.expert_replicas),
        2 * (DENSE_AXES, EXPERT_AXES),
        strict=True,
    ):
        assert one is not None
        for axis in axes:
            found[f"{name}/{axis}"] = dist.get_process_group_ranks(one[axis].get_group())
    total = torch.tensor([float(mesh.rank_info.rank)])
    assert mesh.dense is not None
    dist.all_reduce(total, group=mesh.dense["tp"].get_group())
    return found, len(distributed_c10d._world.pg_map), total.item()


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_axis_s_group_is_the_line_of_its_mesh(name: str, pool: Pool) -> None:
    degrees = LAYOUTS[name]
    answers = pool.run(spoken, 8, degrees)
    for rank, (found, count, total) in enumerate(answers):
        for letter, grid, axes in zip("deri", rank_grids(degrees), 2 * (DENSE_AXES, EXPERT_AXES), strict=True):
            for dim, axis in enumerate(axes):
                lines = grid.movedim(dim, -1).flatten(0, -2).tolist()
                assert found[f"{letter}/{axis}"] == next(line for line in lines if rank in line), (letter, axis)
        # Torch's own way is 4 x 5, and the two of all ranks; and for each way of a pipeline.
        assert count <= 12, count
        assert total == sum(found["d/tp"])
    assert len({count for _, count, _ in answers}) == 1


def test_axes_of_one_name_share_and_others_do_not() -> None:
    """dp and ep have the same ranks here: rows that travel to experts must not wait for gradients."""
    degrees = Degrees(pp=2, dp_shard=4, ep=4)
    with fake_mesh(RankInfo(0, 8), degrees) as mesh:
        assert mesh.dense is not None
        assert mesh.experts is not None
        dp, ep = (one.get_group() for one in (mesh.dense["dp_shard"], mesh.experts["ep"]))
        assert dist.get_process_group_ranks(dp) == dist.get_process_group_ranks(ep)
        assert dp.group_name != ep.group_name
        assert mesh.dense["pp"].get_group().group_name == mesh.experts["pp"].get_group().group_name
        assert mesh.dense["tp"].get_group().size() == 1
        assert {one.axis for one in groups_of(mesh).values() if len(one.ranks) > 1} == {"pp", "dp", "ep", "all"}


def test_thousands_of_ranks_are_laid_out_at_once() -> None:
    """A rank makes only the groups that it is in, however many there are."""
    degrees = Degrees(pp=8, dp_shard=32, tp=8, ep=32)
    with fake_mesh(RankInfo(5, 2048), degrees):
        assert len(distributed_c10d._world.pg_map) <= 12


def test_each_rank_that_a_process_stands_for_has_its_own_offsets() -> None:
    """torch keeps the results' layouts by mesh, and meshes of two ranks are equal."""
    for rank in (0, 1):
        with fake_mesh(RankInfo(rank, 2), Degrees(tp=2)) as mesh:
            assert mesh.dense is not None
            doubled = 2 * DTensor.from_local(torch.zeros(3, 4), mesh.dense["tp"], [Shard(0)])
            box = local_shards({"doubled": doubled})["doubled"]
            assert box.offset == (3 * rank, 0)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_failing_rank_does_not_wait_for_kernels_of_the_others(
    backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Destroying NCCL's groups waits for kernels whose peers may never come: the traceback first, then abort."""
    calls: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(mesh_file, "rendezvous_to_serve", lambda: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy"))
    monkeypatch.setattr(mesh_file, "_abort_process_group", lambda: calls.append("abort: " + capsys.readouterr().err))
    with leaving_process_group():
        pass
    assert calls == ["destroy"]
    with pytest.raises(RuntimeError, match="out of memory"), leaving_process_group():
        raise RuntimeError("out of memory")
    if backend == "nccl":
        assert "RuntimeError: out of memory" in calls[1]
    else:
        assert calls == ["destroy", "destroy"]


def test_an_abort_that_hangs_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, statuses = threading.Event(), list[int]()

    def end(status: int) -> None:
        statuses.append(status)
        ended.set()

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(mesh_file.os, "_exit", end)
    monkeypatch.setattr(mesh_file, "ABORT_SECONDS", 0.01)
    monkeypatch.setattr(mesh_file, "_abort_process_group", lambda: ended.wait(30))
    with pytest.raises(RuntimeError, match="out of memory"), leaving_process_group():
        raise RuntimeError("out of memory")
    assert statuses == [1]


def connected(degrees: Degrees) -> list[str]:
    """The groups of more than one rank in the order in which `create_communicators` uses them."""
    mesh = laid_out(degrees)
    names: list[str] = []
    all_reduce = dist.all_reduce

    def record(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        names.append(group.group_desc)
        all_reduce(tensor, group=group)

    dist.all_reduce = record
    try:
        create_communicators(mesh)
    finally:
        dist.all_reduce = all_reduce
    expected = {name for name, group in groups_of(mesh).items() if len(group.ranks) > 1}
    assert len(names) == len(expected)
    return names


@pytest.mark.parametrize("name", LAYOUTS)
def test_communicators_are_created_in_one_order(name: str, pool: Pool) -> None:
    orders = pool.run(connected, 8, LAYOUTS[name])
    assert all(order == orders[0] for order in orders)
