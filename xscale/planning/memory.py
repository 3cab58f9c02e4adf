"""Peak memory of the ranks: simulated steps of the stages plus the allocator's overhead; formulae for DeepSpeed."""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from xscale.distill.teacher_source import find_teacher, teacher_degrees, teacher_run
from xscale.measure.device import Device
from xscale.measure.memory import model_state_bytes
from xscale.mesh import axes
from xscale.mesh.axes import Degrees
from xscale.optim.optimizer.optimizer import OPTIMIZERS, Optimizer
from xscale.parallel.config import ZeroConfig
from xscale.parallel.distillation import readers_of
from xscale.parallel.engine.deepspeed.settings import bucket_size
from xscale.parallel.engine.fsdp import optimizer_weights
from xscale.parallel.pipeline.schedule import schedule_of
from xscale.parallel.pipeline.simulate import simulate
from xscale.parallel.plan import DTYPES
from xscale.parallel.shard.sharded import sharded_parameters
from xscale.planning.simulate_step import SimulatedStep, simulate_step
from xscale.planning.speed import roofline
from xscale.settings.settings import Settings, build_on_meta

KINDS = (
    "parameters",
    "gathered_parameters",
    "gradients",
    "optimizer",
    "activations",
    "communication",
)
LONGEST = 16
"""Largest number of micro-batches of a simulated step: activations of further ones are extrapolated."""


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of one rank."""

    simulated: SimulatedStep
    activation_factor: float
    """Activations of the whole step over those of the simulated micro-batches."""
    device: Device | None
    teacher: int = 0
    """Bytes of the teacher of a distilled model, and of the soft loss."""

    @cached_property
    def kinds(self) -> dict[str, int]:
        """Bytes at the peak by kind."""
        sizes = {kind: self.simulated.peak.kinds.get(kind, 0) for kind in KINDS}
        sizes["activations"] = round(sizes["activations"] * self.activation_factor)
        if self.teacher:
            sizes["teacher"] = self.teacher
        if self.host_bytes and self.device is not None and self.device.name == "cpu":
            # The memory of a CPU is that of its processes.
            sizes["offloaded"] = self.host_bytes
        tensors = sum(sizes.values())
        sizes["slack"] = 0 if self.device is None else round(self.device.slack * tensors)
        sizes["runtime"] = 0 if self.device is None else round(self.device.runtime)
        sizes["communicators"] = (
            0 if self.device is None else round(self.device.communicator * self.communicators)
        )
        return sizes

    @property
    def host_bytes(self) -> int:
        """Bytes of activations in CPU memory."""
        return round(self.simulated.host_bytes * self.activation_factor)

    @property
    def communicators(self) -> int:
        """Number of NCCL communicators of the rank: of its groups, and of its pairs with other pipeline ranks."""
        groups = [group for group in self.simulated.groups.values() if len(group.ranks) > 1]
        pipeline = next((len(group.ranks) for group in groups if group.axis == "pp"), 1)
        # One each way to the rank before and the rank after, which of two ranks are the same one.
        return len(groups) + 2 * min(pipeline - 1, 2)

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


def memory_of_stages(
    settings: Settings,
    degrees: Degrees,
    micros: int,
    vocabulary: int,
    device: Device | None,
    overload: float = 1.0,
) -> list[RankMemory]:
    """Simulate one rank of the first, the second, the middle and the last stage; others are like one of these.

    It is the first rank of a stage, whose shards are never smaller than those of the other ranks. `overload`: as of
    `simulate_step`.
    """
    seconds = (
        None
        if device is None or not device.timed
        else roofline(device, DTYPES[settings.precision.compute])
    )
    pp, teacher = degrees.pp, teacher_bytes(settings, degrees.world, vocabulary)
    ranks: list[RankMemory] = []
    workspaces: dict[Hashable, int] = {}
    on_gpu = device is not None and device.name != "cpu"
    for at in sorted({0, min(1, pp - 1), pp // 2, pp - 1}):
        micro_batches, activation_factor = _simulated_micro_batches(settings, pp, at, micros)
        rank = degrees.groups_along("pp")[0][at]
        arguments = (settings, degrees, rank, micro_batches, vocabulary)
        step = simulate_step(*arguments, seconds, workspaces, on_gpu, overload)
        ranks.append(RankMemory(step, activation_factor, device, teacher))
    return ranks


SOFT_LOSS_COPIES = 4
"""Tensors of the shape of a micro-batch's logits, in float32 or wider, that the soft loss has at once."""


def teacher_bytes(settings: Settings, world: int, vocabulary: int) -> int:
    """Return a rank's bytes of the teacher's parameters and logits and of the soft loss; 0 without a teacher.

    The activations of one block of the teacher, which has no backward, are not counted. ConfigError where the teacher
    is not there.
    """
    if settings.distill is None:
        return 0
    of_teacher = teacher_run(settings) or find_teacher(settings).settings
    count = sum(
        parameter.numel() for parameter in build_on_meta(of_teacher, vocabulary).parameters()
    )
    _, degrees = teacher_degrees(settings, world)
    compute, master = DTYPES[settings.precision.compute], DTYPES[settings.precision.master]
    stored = count * master.itemsize // degrees.tp
    if settings.distill.zero == 3:
        stored = -(-stored // degrees.dp_shard)
    elif world > 1 and compute != master:
        # FSDP keeps what it has cast.
        stored += count * compute.itemsize // degrees.tp
    logits = settings.train.micro_batch_size * settings.data.target_length * vocabulary
    # The ranks of a group that read several micro-batches have the logits of two at once.
    student, together = axes.resolve(settings.parallel.mesh, world), degrees.groups_along("tp")[0]
    tensors = min(2, len(readers_of(student, together)))
    soft = logits // settings.parallel.mesh.tp * SOFT_LOSS_COPIES * max(compute.itemsize, 4)
    return stored + (
        tensors * logits * compute.itemsize + soft if settings.distill.soft_weight else 0
    )


def _simulated_micro_batches(
    settings: Settings, pp: int, at: int, micros: int
) -> tuple[int, float]:
    """Micro-batches after which a step's memory no longer grows, and the factor on activations if that is too many."""
    if pp == 1:
        # The second backward runs while the first one's gradients are allocated.
        return min(micros, 2), 1.0
    config = settings.parallel.pipeline
    schedule = schedule_of(config)

    def live(count: int) -> int:
        return simulate(schedule.table(config, pp, count)).peak_saved(at)

    wanted = live(micros)
    candidates = [
        count for count in range(2, micros) if count % pp == 0 or not schedule.interleaved
    ]
    for count in candidates:
        # pp more, which run while the first ones' gradients are allocated.
        if count > pp and live(count - pp) >= wanted:
            return count, 1.0
        if count >= LONGEST and count % pp == 0:
            return count, wanted / live(count)
    return micros, 1.0


def states_per_element(settings: Settings, model: nn.Module) -> dict[str, float]:
    """Return the optimizer's values per element of each trained parameter, by name, for a full model on meta.

    The moving average of the weights, if there is one, counts among them.
    """
    trained = [
        parameter for parameter in sharded_parameters(model) if parameter.parameter.requires_grad
    ]
    optimizer: Optimizer = OPTIMIZERS.build(settings.optimizer, optimizer_weights(trained))
    values = dict.fromkeys((parameter.name for parameter in trained), 0.0)
    for states in optimizer.states().values():
        for parameter, state in zip(trained, states, strict=True):
            # States may be narrower than the weights: 8-bit moments.
            weight_bytes = parameter.parameter.element_size()
            values[parameter.name] += (
                0 if state is None else state.numel() * state.element_size() / weight_bytes
            )
    averages = 0 if settings.train.ema_decay is None else 1
    return {
        parameter.name: values[parameter.name] / parameter.parameter.numel() + averages
        for parameter in trained
    }


FLOAT32_BYTES = 4
"""Bytes of a stored element: float32."""


@dataclass(frozen=True)
class DeepspeedMemory:
    """Bytes of a rank by kind, on each device."""

    device: Mapping[str, int]
    cpu: Mapping[str, int] = field(default_factory=dict)
    """In host memory."""
    nvme: Mapping[str, int] = field(default_factory=dict)
    """On local NVMe."""


def deepspeed_memory(
    model: nn.Module, zero: ZeroConfig, degrees: Degrees, states: int, *, overlap: bool
) -> DeepspeedMemory:
    """Compute a rank's bytes. `states`: optimizer values per parameter; `overlap`: two buckets, as on a GPU.

    The formulae follow DeepSpeed's code, since its step cannot be simulated. Included are parameters, gradients, the
    float32 copy, optimizer states and the gradient buckets; not included are activations, parameters that stage 3
    gathers, and NVMe prefetch buffers.
    """
    unsharded = model_state_bytes(model, degrees, 0, states, FLOAT32_BYTES).parameters
    shard = -(-unsharded // (degrees.dp_shard * degrees.cp))
    places: dict[str, Counter[str]] = {"none": Counter(), "cpu": Counter(), "nvme": Counter()}
    device, updated = places["none"], places[zero.offload.optimizer]
    offloaded = zero.offload.optimizer != "none"
    updated["optimizer"] += states * shard
    if zero.stage < 3:
        device["parameters"] += unsharded
        updated["parameters"] += shard
        device["gradients"] += 0 if offloaded else unsharded if zero.stage == 1 else shard
        # Gradients and updated parameters are staged there in full.
        places["cpu"]["gradients"] += 2 * shard if offloaded else 0
    else:
        places[zero.offload.parameters]["parameters"] += shard
        updated["parameters"] += shard
        places["cpu" if offloaded else "none"]["gradients"] += shard
    device["communication"] += (
        bucket_size(unsharded // FLOAT32_BYTES)
        * FLOAT32_BYTES
        * (2 if overlap and zero.stage < 3 else 1)
    )
    return DeepspeedMemory(
        *({kind: size for kind, size in sizes.items() if size} for sizes in places.values())
    )
