"""The device mesh of a run: the one file that creates process groups, and that knows their ranks and axes."""

import atexit
import contextlib
import datetime
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from xscale.core.errors import ConfigError
from xscale.mesh.axes import DENSE_AXES, EXPERT_AXES, Degrees
from xscale.mesh.collectives import SharedCounter
from xscale.mesh.environment import RankInfo, check_rendezvous, rendezvous_to_serve
from xscale.mesh.rendezvous import (
    LEAVE_AFTER_FAILURE_SECONDS,
    LEAVE_SECONDS,
    announce_leaving,
    attempt_store,
    claim_gpu,
    gpu_name,
    leave_last,
    open_store,
)
from xscale.mesh.torch_private import (
    _abort_process_group,
    _get_default_store,
)


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run along named axes; a single process has no process groups."""

    rank_info: RankInfo
    degrees: Degrees
    device: torch.device
    dense: DeviceMesh | None = None
    """Axes pp, dp_replicate, dp_shard, cp, tp; None for one process. Parameters are replicated over cp, so cp is folded
    into `dp_shard` here (FSDP shards over dp_shard x cp) and the cp axis has size 1."""
    experts: DeviceMesh | None = None
    """The same ranks for expert layers: pp, dp_replicate, expert_shard, ep, tp; None for one process. Its tp axis has
    size 1 unless `tp_in_experts`."""
    replicas: DeviceMesh | None = None
    """`dense` with all data-parallel ranks on dp_replicate, for replicated parameters (ZeRO stage 0)."""
    expert_replicas: DeviceMesh | None = None
    """`experts` with all ranks of expert_shard on dp_replicate."""
    background: dist.ProcessGroup | None = None
    """All ranks over gloo, for messages in the background of training; None for one process."""
    context: dist.ProcessGroup | None = None
    """The cp group of this rank; None when cp is 1."""
    timeout: datetime.timedelta = field(default=datetime.timedelta(minutes=10))
    pp_forward: dist.ProcessGroup | None = None
    """The pp group, for messages to later stages; None for one stage. Each direction has its own group, because on NCCL
    a message waits for the earlier messages of its group."""
    pp_backward: dist.ProcessGroup | None = None
    """The pp group, for messages to earlier stages."""
    io_progress: SharedCounter = field(default_factory=lambda: SharedCounter("disk operations"))
    """Disk operations of all ranks."""

    @property
    def data_rank(self) -> int:
        """Index among the ranks that read different samples."""
        return self.degrees.data_rank(self.rank_info.rank)


COLLECTIVE_GRACE_SECONDS = 30.0
"""Collectives time out this much later than the watchdog, which has the better diagnosis."""


def init_mesh(
    rank_info: RankInfo,
    degrees: Degrees,
    device: torch.device,
    timeout_seconds: float,
    on_connected: Callable[[], None] = lambda: None,
    io_timeout_seconds: float | None = None,
) -> Mesh:
    """Join the run's process group and build the mesh. Collective; ConfigError when the port is in use.

    `on_connected` is called once the ranks are connected, before any other group is created. `io_timeout_seconds`: how
    long a rank waits for the others in the background group; None: as long as in the other groups.
    """
    if rank_info.is_single_process:
        return Mesh(rank_info, degrees, device)
    timeout = datetime.timedelta(seconds=timeout_seconds + COLLECTIVE_GRACE_SECONDS)
    io_timeout = (
        timeout if io_timeout_seconds is None else datetime.timedelta(seconds=io_timeout_seconds)
    )
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    init_process_group(rank_info, backend, timeout, gpu_name(device))
    on_connected()
    mesh = build_mesh(rank_info, degrees, device, timeout, io_timeout=io_timeout)
    create_communicators(mesh)
    return mesh


def create_communicators(mesh: Mesh) -> None:
    """Create the communicator of each process group of this rank by a first all-reduce, in one order. Collective.

    NCCL creates them on first use, when the host waits for the other ranks: in a training step these may wait for this
    one in something else. And a network that does not work is found before the model is built.
    """
    layouts = (mesh.dense, mesh.experts, mesh.replicas, mesh.expert_replicas)
    groups = [
        layout[axis].get_group()
        for layout in layouts
        if layout
        for axis in layout.mesh_dim_names or ()
    ]
    groups += [
        group for group in (mesh.context, mesh.pp_forward, mesh.pp_backward) if group is not None
    ]
    for group in {
        group.group_name: group for group in (dist.group.WORLD, *groups) if group is not None
    }.values():
        if group.size() > 1:
            dist.all_reduce(torch.zeros(1, device=mesh.device), group=group)


def init_process_group(
    rank_info: RankInfo, backend: str, timeout: datetime.timedelta, gpu: str | None = None
) -> None:
    """Join the process group of all ranks, at MASTER_ADDR and MASTER_PORT.

    `gpu`: name of the GPU that this rank alone uses. ConfigError when the port is in use, or the GPU by another rank.
    """
    if dist.is_initialized():
        return
    check_rendezvous(rank_info.world)
    rank = rank_info.rank
    world = rank_info.world
    try:
        store = open_store(rank_info, timeout)
        attempt = attempt_store(store, rank, world, timeout, says=rank_info.local_rank == 0)
        if gpu is not None:
            claim_gpu(attempt, gpu)
        dist.init_process_group(
            backend, store=attempt, rank=rank, world_size=world, timeout=timeout
        )
    except (dist.DistNetworkError, RuntimeError, OSError) as error:
        if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
            raise
        fix = "Choose another with torchrun's --master-port, or leave it out and let the launcher find a free one."
        raise ConfigError("MASTER_PORT", "the port is in use by another program", fix) from None


@contextlib.contextmanager
def temporary_group(
    ranks: Sequence[int], backend: str, timeout: datetime.timedelta
) -> Iterator[dist.ProcessGroup]:
    """Create a group of some ranks, by these ranks only, and destroy it at the end of the block.

    Torch names such a group by its ranks and by how many groups there are, so that two ranks agree on the name only if
    both have as many: a group of two that stayed would make its ranks fail to agree with others later.
    """
    group = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


@contextmanager
def single_process_group() -> Iterator[None]:
    """Create a process group of this process only, for libraries that require one."""
    assert not dist.is_initialized(), "there is a process group already"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        destroy_process_group()


@contextmanager
def fake_mesh(rank_info: RankInfo, degrees: Degrees) -> Iterator[Mesh]:
    """Build the mesh of one rank without the other ranks: collectives do nothing (torch's fake backend)."""
    from xscale.mesh.torch_private import FakeStore, _clear_sharding_prop_cache

    assert not dist.is_initialized(), "there is a process group already"
    device, timeout = torch.device("cpu"), datetime.timedelta(minutes=10)
    if rank_info.is_single_process:
        yield Mesh(rank_info, degrees, device)
        return
    dist.init_process_group(
        "fake", rank=rank_info.rank, world_size=rank_info.world, store=FakeStore()
    )
    try:
        yield build_mesh(rank_info, degrees, device, timeout, "fake")
    finally:
        destroy_process_group()
        # Equal meshes are one key of torch's cache, whichever rank made them: the results of another rank's operators
        # would be DTensors with this rank's offsets.
        _clear_sharding_prop_cache()


def build_mesh(
    rank_info: RankInfo,
    degrees: Degrees,
    device: torch.device,
    timeout: datetime.timedelta,
    background_by: str = "gloo",
    io_timeout: datetime.timedelta | None = None,
) -> Mesh:
    """Build the mesh over the existing default process group. Collective."""
    groups = _AxisGroups(rank_info, timeout)
    dense, experts, replicas, expert_replicas = rank_grids(degrees)
    meshes = (
        groups.mesh(device.type, dense, DENSE_AXES),
        groups.mesh(device.type, experts, EXPERT_AXES),
        groups.mesh(device.type, replicas, DENSE_AXES),
        groups.mesh(device.type, expert_replicas, EXPERT_AXES),
    )
    background = dist.new_group(backend=background_by, timeout=io_timeout or timeout)
    context = groups.new_group(degrees.groups_along("cp"), "context") if degrees.cp > 1 else None
    pp_forward = pp_backward = None
    if degrees.pp > 1:
        pp_forward, pp_backward = (
            groups.new_group(degrees.groups_along("pp"), way) for way in ("forward", "backward")
        )
    return Mesh(
        rank_info, degrees, device, *meshes, background, context, timeout, pp_forward, pp_backward
    )


SHARED_GROUPS = {"expert_shard": "dp_shard"}
"""`expert_shard` reuses the process group of `dp_shard` when both contain the same ranks."""
RankLists = list[list[int]]
"""A partition of all ranks into groups."""


class _AxisGroups:
    """Creates the process groups for the axes of several meshes. Collective.

    DeviceMesh itself creates a group for every set of ranks along every axis, those of one rank too: twenty for each
    rank of a run, with three threads each under gloo, and thousands without the rank. Here axes of one name share a
    group when they contain the same ranks, all groups of one rank are one, and a rank creates only its own groups.
    Axes of different names do not share groups, since their messages may be in flight at the same time.
    """

    def __init__(self, rank_info: RankInfo, timeout: datetime.timedelta) -> None:
        self.rank_info, self.timeout = rank_info, timeout
        self.existing: dict[tuple[str, str], dist.ProcessGroup] = {}

    def mesh(self, device: str, grid: Tensor, names: tuple[str, ...]) -> DeviceMesh:
        """Build a DeviceMesh of all ranks with a group for each axis."""
        groups = [
            self._group_of(
                grid.movedim(dim, -1).flatten(0, -2).tolist(), SHARED_GROUPS.get(name, name)
            )
            for dim, name in enumerate(names)
        ]
        # Older versions of torch read the order of the ranks from the strides, also those of axes of one rank.
        in_order = grid.flatten().view(grid.shape)
        return DeviceMesh.from_group(groups, device, in_order, mesh_dim_names=names)

    def _group_of(self, groups: RankLists, name: str) -> dist.ProcessGroup:
        if len(groups) == 1:
            everyone = dist.group.WORLD
            assert everyone is not None
            return everyone
        key = ("single", "") if len(groups) == self.rank_info.world else (name, str(sorted(groups)))
        if key not in self.existing:
            self.existing[key] = self.new_group(groups, key[0])
        return self.existing[key]

    def new_group(self, groups: RankLists, name: str) -> dist.ProcessGroup:
        """Create the group with this rank; every rank creates one, so that all have created as many."""
        ranks_of_group = next(ranks for ranks in groups if self.rank_info.rank in ranks)
        group: dist.ProcessGroup = dist.new_group(
            ranks_of_group, self.timeout, use_local_synchronization=True, group_desc=f"mesh_{name}"
        )
        return group


def rank_grids(degrees: Degrees) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the ranks along the axes of `dense`, `experts`, `replicas` and `expert_replicas`.

    Ranks ascend along an axis into which others are folded, as they do within a process group.
    """
    pp = degrees.pp
    dp_replicate = degrees.dp_replicate
    tp = degrees.tp
    ep = degrees.ep
    shards = torch.tensor(degrees.groups_along("dp_shard", "cp")).view(pp, dp_replicate, tp, -1)
    dense = shards.transpose(2, 3).unsqueeze(3)
    folded = (
        shards
        if degrees.tp_in_experts
        else torch.tensor(degrees.groups_along("dp_shard", "cp", "tp"))
    )
    experts = folded.view(pp, dp_replicate, degrees.expert_tp, degrees.expert_shard, ep).permute(
        0, 1, 3, 4, 2
    )
    every = torch.tensor(degrees.groups_along("dp_replicate", "dp_shard", "cp")).view(pp, tp, -1)
    replicas = every.transpose(1, 2)[:, :, None, None]
    joint = experts.flatten(1, 2).sort(1).values
    return dense, experts, replicas, joint.unsqueeze(2)


def destroy_process_group() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def leave_process_group(*, failed: bool = False) -> None:
    """Destroy the process group that this rank joined, if it did; the rank that holds the store leaves last.

    Where srun, mpirun or a user started the ranks, that is rank 0: the others may still save or evaluate, which takes
    the store. After a failure it waits at the end of the process, once its message is printed, since a launcher
    may end it as soon as another rank has failed.
    """
    if not dist.is_initialized():
        return
    rank, world = dist.get_rank(), dist.get_world_size()
    store = (
        _get_default_store()
        if rendezvous_to_serve() is not None and dist.get_backend() != "fake"
        else None
    )
    dist.destroy_process_group()
    if store is None:
        return
    if rank:
        announce_leaving(store, rank)
    elif failed:
        atexit.register(leave_last, store, world, LEAVE_AFTER_FAILURE_SECONDS)
    else:
        leave_last(store, world, LEAVE_SECONDS)


ABORT_SECONDS = 30.0
"""Aborting a process group that takes longer hangs."""


@contextmanager
def leaving_process_group() -> Iterator[None]:
    """Destroy the process group at the end of the block; after a failure abort it, with the traceback printed first.

    NCCL's kernels in flight wait for this rank's peers, which may never come, and destroying waits for the kernels. The
    process ends if aborting takes longer than ABORT_SECONDS.
    """
    try:
        yield
    except BaseException:
        if dist.is_initialized() and dist.get_backend() == "nccl":
            traceback.print_exc()
            sys.stderr.flush()
            bound = threading.Timer(ABORT_SECONDS, os._exit, [1])
            bound.daemon = True
            bound.start()
            _abort_process_group()
            bound.cancel()
        else:
            leave_process_group(failed=True)
        raise
    leave_process_group()
