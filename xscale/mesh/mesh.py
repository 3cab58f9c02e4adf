"""The mesh of processes: the one file that makes process groups."""

import datetime
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from xscale.core.errors import ConfigError
from xscale.mesh.axes import DENSE, EXPERTS, Degrees
from xscale.mesh.environment import Place


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run, laid out along named axes; one process alone has no groups at all."""

    place: Place
    degrees: Degrees
    device: torch.device
    dense: DeviceMesh | None = None
    """Axes pp, dp_replicate, dp_shard, cp, tp; None for one process. Parameters know of a sequence's ranks as copies
    only, so that those of cp stand on dp_shard and cp has one place."""
    experts: DeviceMesh | None = None
    """The same ranks for expert layers: pp, dp_replicate, expert_shard, ep, tp; None for one process. Its tp has one
    rank where tp stays out of experts."""
    replicas: DeviceMesh | None = None
    """As `dense`, with all data-parallel ranks on dp_replicate: for keeping whole copies (ZeRO stage 0)."""
    expert_replicas: DeviceMesh | None = None
    """As `experts`, with all ranks of expert_shard on dp_replicate."""
    background: dist.ProcessGroup | None = None
    """All ranks over gloo, for what goes on beside training; None for one process."""
    context: dist.ProcessGroup | None = None
    """The ranks that share this one's sequences; None where each has its own."""
    timeout: datetime.timedelta = field(default=datetime.timedelta(minutes=10))
    forth: dist.ProcessGroup | None = None
    """The ranks of pp, for what goes to a later one. A channel of its own for each way, because on NCCL a message
    waits for those of its channel that were begun before it; None for one stage."""
    back: dist.ProcessGroup | None = None
    """The same, for what goes to an earlier one."""

    @property
    def data_rank(self) -> int:
        """Place among the ranks that read different samples."""
        rank = self.place.rank
        replica = self.degrees.coordinate(rank, "dp_replicate")
        return replica * self.degrees.dp_shard + self.degrees.coordinate(rank, "dp_shard")


def start(place: Place, degrees: Degrees, device: torch.device, timeout_seconds: float) -> Mesh:
    """Join the run's process group and lay out its axes. Collective; ConfigError when the port is taken."""
    if place.alone:
        return Mesh(place, degrees, device)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        try:
            dist.init_process_group(backend, rank=place.rank, world_size=place.world, timeout=timeout)
        except (dist.DistNetworkError, RuntimeError) as error:
            if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
                raise
            fix = "Choose another with torchrun's --master-port, or leave it out and let the launcher find a free one."
            raise ConfigError("MASTER_PORT", "the port is in use by another program", fix) from None
    return lay_out(place, degrees, device, timeout)


def lay_out(place: Place, degrees: Degrees, device: torch.device, timeout: datetime.timedelta) -> Mesh:
    """The axes over a process group that is already there."""
    kind = device.type
    shape = (degrees.pp, degrees.dp_replicate, degrees.dp_shard * degrees.cp, 1, degrees.tp)
    dense = init_device_mesh(kind, shape, mesh_dim_names=DENSE)
    copies = (degrees.pp, degrees.dp * degrees.cp, 1, 1, degrees.tp)
    replicas = init_device_mesh(kind, copies, mesh_dim_names=DENSE)
    last = (degrees.ep, degrees.expert_tp)
    experts = init_device_mesh(
        kind, (degrees.pp, degrees.dp_replicate, degrees.expert_shard, *last), mesh_dim_names=EXPERTS
    )
    kept = degrees.dp_replicate * degrees.expert_shard
    expert_replicas = init_device_mesh(kind, (degrees.pp, kept, 1, *last), mesh_dim_names=EXPERTS)
    background = dist.new_group(backend="gloo", timeout=timeout)
    context = None
    if degrees.cp > 1:
        lines = torch.arange(degrees.world).view(-1, degrees.cp, degrees.tp).transpose(1, 2).flatten(0, 1).tolist()
        context = dist.new_subgroups_by_enumeration(lines, timeout=timeout)[0]  # type: ignore[no-untyped-call]
    forth = back = None
    if degrees.pp > 1:
        lines = dense.mesh.flatten(1).t().tolist()
        forth, back = (dist.new_subgroups_by_enumeration(lines, timeout)[0] for _ in range(2))  # type: ignore[no-untyped-call]
    meshes = (dense, experts, replicas, expert_replicas)
    return Mesh(place, degrees, device, *meshes, background, context, timeout, forth, back)


def leave() -> None:
    """Take the process group down, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
