"""Plan of a run: memory, compute, traffic and time of its ranks, from simulated steps of a few ranks."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from xscale.core.config import encode
from xscale.core.errors import ConfigError, counted
from xscale.data.tokenizer.tokenizer import TOKENIZERS
from xscale.measure.device import (
    DEVICES,
    GIVEN,
    Device,
    device_named,
    device_of_memory,
    stated_device,
)
from xscale.measure.flops import size, training_flops
from xscale.measure.memory import model_state_bytes
from xscale.mesh import axes
from xscale.mesh.axes import Degrees
from xscale.optim.optimizer.optimizer import OPTIMIZERS
from xscale.parallel import context
from xscale.parallel.plan import DTYPES, ParallelPlan
from xscale.planning.memory import (
    KINDS,
    RankMemory,
    deepspeed_memory,
    memory_of_stages,
    states_per_element,
)
from xscale.planning.overload import BALANCED, Overload
from xscale.planning.simulate_step import CannotSimulateError
from xscale.planning.speed import (
    compute_flops,
    compute_seconds,
    predict_step,
    traffic,
    with_seconds,
)
from xscale.settings.settings import Settings, build_on_meta

FIGURES = ("memory", "node", "link", "network", "flops", "bandwidth")
"""Figures of a device that the command line may change."""


@dataclass(frozen=True)
class Hardware:
    """Machines of a plan; None: the figure of the device table."""

    device: str | None = None
    memory: float | None = None
    """Bytes per device."""
    node: int | None = None
    """Devices per node."""
    link: float | None = None
    """Bytes/s between devices of a node, in one direction."""
    network: float | None = None
    """Bytes/s between nodes, per device."""
    flops: float | None = None
    """FLOP/s of dense matmuls in bfloat16."""
    bandwidth: float | None = None
    """Bytes/s between a device and its memory."""

    def resolve(self, settings: Settings) -> Device | None:
        """Return the device, or None if none was named; ConfigError for an unknown one whose figures are not stated."""
        if self.device is None:
            return None if self.memory is None else device_of_memory(self.memory)
        named = {name: value for name in FIGURES if (value := getattr(self, name)) is not None}
        if self.device == "cpu" or self.device in DEVICES:
            device = device_named(self.device, DTYPES[settings.precision.compute])
        else:
            device = self._stated(self.device)
        tf32 = settings.precision.float32_matmul != "highest"
        return replace(
            device, tf32=tf32, **named, sources={**device.sources, **dict.fromkeys(named, GIVEN)}
        )

    def _stated(self, name: str) -> Device:
        """Return a device that the table has not, by its figures."""
        if self.flops is not None and self.memory is not None and self.bandwidth is not None:
            return stated_device(name, self.flops, self.memory, self.bandwidth)
        known = ", ".join([*DEVICES, "cpu"])
        raise ConfigError(
            "--device",
            f"'{name}' is not in the table of devices",
            f"Take one of {known}, or state another one by all of --flops (TFLOP/s of dense matmuls in bfloat16), "
            "--memory (GB) and --bandwidth (GB/s of its memory).",
        )


def plan(
    settings: Settings,
    world: int,
    hardware: Hardware = Hardware(),
    overload: Overload = BALANCED,
) -> dict[str, Any]:
    """Return the plan as plain values (see docs/how-to/plan.md). The settings must have passed the check."""
    degrees = axes.resolve(settings.parallel.mesh, world)
    vocabulary, length = vocabulary_of(settings), settings.data.sequence_length
    model = build_on_meta(settings, vocabulary)
    counted = size(model)
    micros = settings.train.batch_size // (settings.train.micro_batch_size * degrees.dp)
    device = hardware.resolve(settings)
    parallel = ParallelPlan(settings.parallel, settings.precision, length)
    estimates = parallel.estimate(model, world, micros)
    schedule: Any = estimates.pop("pipeline", None)
    totals: dict[str, Any] = {
        "world": world,
        "degrees": asdict(degrees),
        "parameters": counted.parameters,
        "active_parameters": counted.active,
        "vocabulary": vocabulary,
        "flops_per_token": _flops_per_token(model, settings),
        "tokens_per_step": settings.train.batch_size * settings.sample_tokens,
        "micro_batches_per_rank": micros,
        "pipeline": schedule,
        "bubble": 0.0 if schedule is None else schedule["bubble"],
        "elements_per_sequence": estimates,
        "context_styles": context.styles_of_modules(model, settings.parallel),
        **_model_states(settings, model, degrees, device),
        "parallel": encode(settings.parallel),
        "overload": asdict(overload),
        "assumptions": _assumptions(overload),
        "unknown": None,
        "problems": [],
    }
    try:
        stages = memory_of_stages(settings, degrees, micros, vocabulary, device, overload.factor)
    except CannotSimulateError as error:
        return totals | {"unknown": str(error), **_at_least(totals, settings, degrees, device)}
    return totals | _simulated_figures(stages, totals, settings, degrees, device)


def _assumptions(overload: Overload) -> list[str]:
    """Return sentences on what the figures assume."""
    load = "the load over experts is balanced and no token is dropped"
    if overload.factor > 1:
        load = (
            f"the busiest expert-parallel rank gets {overload.factor:.3g} times the mean rows in each mixture, or "
            "what the capacity of its experts admits if that is less"
        )
    return [load, "activations and temporaries are those of the CPU implementations"]


def vocabulary_of(settings: Settings) -> int:
    """Rows of the vocabulary that the configured tokenizer has, or will have once it is trained."""
    config = settings.data.tokenizer
    planned: int | None = TOKENIZERS.of(config).part.planned_vocabulary(config)
    return (
        TOKENIZERS.build(config, Path(settings.data.folder)).vocabulary
        if planned is None
        else planned
    )


def _model_states(
    settings: Settings, model: nn.Module, degrees: Degrees, device: Device | None
) -> dict[str, Any]:
    """Model state memory: on the device by kind, and offloaded by place."""
    zero = settings.parallel.zero
    if zero.engine == "deepspeed":
        states = OPTIMIZERS.of(settings.optimizer).traits.states_per_parameter
        placed = deepspeed_memory(
            model, zero, degrees, states, overlap=device is None or device.name != "cpu"
        )
        offloaded = {"cpu": sum(placed.cpu.values()), "nvme": sum(placed.nvme.values())}
        on_device = {**placed.device, "total": sum(placed.device.values())}
        return {"memory_at_rest_bytes": on_device, "memory_offloaded_bytes": offloaded}
    per_element, itemsize = (
        states_per_element(settings, model),
        DTYPES[settings.precision.master].itemsize,
    )
    memory = model_state_bytes(model, degrees, zero.stage, per_element, itemsize)
    return {
        "memory_at_rest_bytes": {**asdict(memory), "total": memory.total},
        "memory_offloaded_bytes": None,
    }


def _simulated_figures(
    stages: Sequence[RankMemory],
    totals: dict[str, Any],
    settings: Settings,
    degrees: Degrees,
    device: Device | None,
) -> dict[str, Any]:
    """Figures of the simulated steps."""
    micros, zero = totals["micro_batches_per_rank"], settings.parallel.zero.stage
    largest_rank = max(stages, key=lambda stage: stage.total)
    node = 8 if device is None else device.node
    sent = [traffic(stage.simulated, micros, zero, node) for stage in stages]
    figures: dict[str, Any] = {"device": None, "step_seconds": None, "mfu": None, "fits": None}
    if device is not None:
        figures |= {
            "device": asdict(device),
            "fits": _needed(largest_rank.total, device, degrees) <= device.memory,
        }
    if device is not None and device.timed:
        compute = [compute_seconds(stage.simulated, micros) for stage in stages]
        sent = [
            with_seconds(entries, device, seconds, micros, zero)
            for entries, seconds in zip(sent, compute, strict=True)
        ]
        step = predict_step(compute, sent, totals["bubble"])
        work = totals["flops_per_token"] * totals["tokens_per_step"]
        peak = device.flops_in(DTYPES[settings.precision.compute])
        figures |= {
            "step_seconds": step.seconds,
            "compute_seconds": step.compute,
            "exposed_seconds": step.exposed,
            "tokens_per_second": totals["tokens_per_step"] / step.seconds,
            "mfu": work / (step.seconds * peak * degrees.world),
        }
    return {
        "parameters_per_rank": {
            "total": max(stage.simulated.parameters for stage in stages),
            "active": max(stage.simulated.active for stage in stages),
        },
        "memory_bytes": {**largest_rank.kinds, "total": largest_rank.total},
        "memory_peak": {
            "rank": largest_rank.simulated.rank,
            "phase": largest_rank.simulated.peak.phase,
        },
        "memory_host_bytes": max(stage.host_bytes for stage in stages),
        "memory_of_ranks": {str(stage.simulated.rank): stage.total for stage in stages},
        "flops_per_step_per_rank": [compute_flops(stage.simulated, micros) for stage in stages],
        "traffic": [asdict(entry) for entry in sent[stages.index(largest_rank)]],
        **figures,
        "problems": []
        if figures["fits"] is not False
        else [_too_large(largest_rank, device, settings, degrees)],
    }


def _flops_per_token(model: nn.Module, settings: Settings) -> float:
    data = settings.data
    return training_flops(model, data.target_length, data.source_length) / settings.sample_tokens


def _at_least(
    totals: dict[str, Any], settings: Settings, degrees: Degrees, device: Device | None
) -> dict[str, Any]:
    """Without a simulated step: whether the model states alone already exceed the memory."""
    total, offloaded = totals["memory_at_rest_bytes"]["total"], totals["memory_offloaded_bytes"]
    if device is not None and device.name == "cpu" and offloaded is not None:
        total += offloaded["cpu"]
    if device is None or _needed(total, device, degrees) <= device.memory:
        return {"device": None if device is None else asdict(device), "fits": None}
    where = "the machine" if device.name == "cpu" else f"one {device.name}"
    what = (
        f"a rank stores {total / 1e9:.2f} GB of parameters, gradients and optimizer states, "
        f"and {where} has {device.memory / 1e9:.1f} GB"
    )
    zero = settings.parallel.zero
    options = [f"parallel.zero.stage above {zero.stage}"] if zero.stage < 3 else []
    if zero.engine == "deepspeed" and device.name != "cpu" and zero.offload.optimizer == "none":
        options.append("parallel.zero.offload.optimizer=cpu")
    fix = f"Take {', or '.join([*options, 'a higher pp, tp or ep', 'more devices'])}."
    problem = {"path": "parallel", "what": what, "fix": fix}
    return {"device": asdict(device), "fits": False, "problems": [problem]}


def _needed(total: float, device: Device, degrees: Degrees) -> float:
    """Bytes needed of one device; the processes of a CPU share its memory."""
    return total * degrees.world if device.name == "cpu" else total


def _too_large(
    largest_rank: RankMemory, device: Device | None, settings: Settings, degrees: Degrees
) -> dict[str, str]:
    assert device is not None
    largest_kind = max(KINDS, key=lambda kind: largest_rank.kinds[kind])
    parallel, train = settings.parallel, settings.train
    options = []
    if largest_kind in ("activations", "gathered_parameters") and train.micro_batch_size > 1:
        options.append(f"train.micro_batch_size below {train.micro_batch_size}")
    if largest_kind == "activations":
        options.append("parallel.recompute (activation checkpointing)")
        options.append(
            "a higher parallel.mesh.tp with parallel.tensor.sequence=true, or a higher cp"
        )
    if largest_kind != "activations" and parallel.zero.stage < 3:
        options.append(f"parallel.zero.stage above {parallel.zero.stage}")
    options += ["a higher pp, tp or ep", "more devices"]
    kind = largest_kind.replace("_", " ")
    where = "the machine" if device.name == "cpu" else f"one {device.name}"
    what = (
        f"rank {largest_rank.simulated.rank} needs {largest_rank.total / 1e9:.2f} GB at its peak ({kind}: "
        f"{largest_rank.kinds[largest_kind] / 1e9:.2f} GB of it), and {where} has {device.memory / 1e9:.1f} GB"
    )
    if device.name == "cpu":
        what += f" for {counted(degrees.world, 'process')}"
    return {"path": "parallel", "what": what, "fix": f"Take {', or '.join(options)}."}
