"""How long a step takes: operators by their roofline, traffic by link bandwidth, bubbles by the pipeline schedule."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from xscale.measure.device import Device
from xscale.measure.traced_costs import Message
from xscale.mesh.rank_groups import RankGroup
from xscale.planning.simulate_step import SimulatedStep

BLOCKS = "compute of neighbouring blocks"
MICRO_BATCHES = "compute of other micro-batches"
SEQUENCE_SHARDS = "attention of the local sequence shard"


@dataclass(frozen=True)
class Traffic:
    """Traffic of one rank along a mesh axis in a step."""

    axis: str
    bytes: float
    messages: float
    node: bool
    """Whether the group is within one node."""
    overlaps: str | None
    """Compute that hides it; None: ranks wait for it."""
    seconds: float | None = None
    exposed: float | None = None
    """Seconds that are not hidden."""


@dataclass(frozen=True)
class PredictedStep:
    """A predicted step."""

    seconds: float
    compute: float
    """Compute seconds of a rank."""
    exposed: float
    """Seconds in which a rank waits for traffic."""


def roofline(device: Device, dtype: torch.dtype) -> Callable[[float, float], float]:
    """Return the roofline model: (FLOPs, bytes read and written) -> seconds."""
    flops, bandwidth = device.flops_in(dtype) * device.reach, 0.8 * device.bandwidth
    return lambda work, moved: max(work / flops, moved / bandwidth)


def traffic(simulated: SimulatedStep, micro_batches: int, zero: int, node: int) -> list[Traffic]:
    """Traffic of one rank by axis and overlap. `zero`: ZeRO stage. `node`: devices of a node."""
    totals: dict[tuple[str, bool, str | None], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for message in simulated.messages:
        group = simulated.groups[message.group]
        if message.bytes and len(group.ranks) > 1:
            repeats = _repeats(message, zero, micro_batches / simulated.micro_batches)
            axis = _axis(message, group)
            entry = totals[axis, group.within(node), _overlaps(message, axis)]
            entry[0] += message.bytes * repeats
            entry[1] += repeats
    return [
        Traffic(axis, size, count, within_node, overlaps)
        for (axis, within_node, overlaps), (size, count) in totals.items()
    ]


def _axis(message: Message, group: RankGroup) -> str:
    """Mesh axis of a message, if its ranks belong to several: all-to-alls dispatch rows to experts."""
    return "ep" if message.operator.startswith("alltoall") and "ep" in group.axes else group.axis


def _repeats(message: Message, zero: int, ratio: float) -> float:
    """Count of a simulated message in the whole step, which has `ratio` times the micro-batches."""
    if message.operator == "allgather_base":
        return ratio if zero == 3 else 1.0
    if message.operator == "reduce_scatter_base" or (
        message.operator == "allreduce" and message.phase == "backward"
    ):
        return ratio if zero >= 2 else 1.0
    return 1.0 if message.phase == "communicate" and message.operator == "allreduce" else ratio


def _overlaps(message: Message, axis: str) -> str | None:
    if message.operator == "send":
        return MICRO_BATCHES if axis == "pp" else SEQUENCE_SHARDS
    return BLOCKS if message.operator in ("allgather_base", "reduce_scatter_base") else None


def with_seconds(
    traffic: Sequence[Traffic], device: Device, compute: float, micro_batches: int, zero: int
) -> list[Traffic]:
    """Add seconds to the traffic; overlapped traffic is exposed where it outlasts the compute that hides it."""
    timed = []
    for entry in traffic:
        seconds = entry.bytes / (device.link if entry.node else device.network)
        # Without ZeRO 2 or 3 parameters and gradients are sent once a step, during one micro-batch.
        window = compute / micro_batches if entry.overlaps == BLOCKS and zero < 2 else compute
        exposed = seconds if entry.overlaps is None else max(0.0, seconds - window)
        timed.append(replace(entry, seconds=seconds, exposed=exposed))
    return timed


def compute_seconds(simulated: SimulatedStep, micro_batches: int) -> float:
    """Compute seconds of the whole step on the simulated rank."""
    ratio = micro_batches / simulated.micro_batches
    once = {"optimizer", "communicate"}
    return sum(
        cost.seconds * (1.0 if phase in once else ratio) for phase, cost in simulated.costs.items()
    )


def compute_flops(simulated: SimulatedStep, micro_batches: int) -> float:
    """FLOPs of the simulated rank in a step, including recomputation."""
    return (
        sum(cost.flops for cost in simulated.costs.values())
        * micro_batches
        / simulated.micro_batches
    )


def predict_step(
    compute: Sequence[float], traffic: Sequence[Sequence[Traffic]], bubble: float
) -> PredictedStep:
    """Predict a step from the mean over the simulated ranks, stretched by the pipeline bubble."""
    exposed = [sum(entry.exposed or 0.0 for entry in of_rank) for of_rank in traffic]
    busy = sum(compute) / len(compute)
    waiting = sum(exposed) / len(exposed)
    return PredictedStep((busy + waiting) / (1 - bubble), busy, waiting)
