"""Cost model of layouts: closed-form estimates in microseconds, which select the layouts that are worth simulating.

The formulae for dense blocks (Korthikanti et al. 2022, table 2; Narayanan et al. 2021, section 3) are applied to every
model by its active parameters, so an estimate only orders layouts; the figures of `xscale plan` are simulated.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from xscale.measure.device import Device
from xscale.measure.flops import size, training_flops
from xscale.measure.memory import ModelStateBytes, model_state_bytes
from xscale.mesh.axes import Degrees
from xscale.nn.blocks.block import Block
from xscale.nn.module import parameter_axes
from xscale.parallel.pipeline.schedule import schedule_of
from xscale.parallel.pipeline.split import balance, block_costs
from xscale.parallel.plan import DTYPES
from xscale.planning.memory import states_per_element
from xscale.settings.settings import Settings

SAVED_ACTIVATIONS = 17 / 12
"""Activations that a dense block saves per token (17 width), over its parameters (12 width^2), times width."""
MATMUL_OUTPUTS = 10 / 17
"""Fraction of these that are matmul outputs: q, k, v, attention and its output (5 width), and those of the FFN (5)."""
ALL_TO_ALLS = 4
"""All-to-alls of an MoE layer per micro-batch: dispatch, combine, and their gradients."""
COMMUNICATORS = 8
"""NCCL communicators of a rank: what most layouts have; a simulated layout counts its own."""
TP_COLLECTIVES = 8
"""All-gathers and reduce-scatters of a block over tp per micro-batch: around two regions, forward and backward."""


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of a layout."""

    seconds: float
    """Step time."""
    memory: float
    """Bytes of the rank that needs most."""


@dataclass(frozen=True)
class CostModel:
    """Quantities of a model and its run that the formulae use."""

    model: nn.Module
    settings: Settings
    device: Device
    state_bytes_cache: dict[tuple[Degrees, int], ModelStateBytes] = field(
        default_factory=dict, compare=False
    )
    """Results of `state_bytes`, which visits every parameter: thousands of estimates share few layouts."""

    imbalance_cache: dict[tuple[int, str, int], float] = field(default_factory=dict, compare=False)
    """Results of `imbalance`."""

    def imbalance(self, pp: int, schedule: str, chunks: int) -> float:
        """Work of the busiest pipeline rank over the mean: blocks are indivisible, and one stage has the head.

        Infinite if there are fewer blocks than stages.
        """
        key = (pp, schedule, chunks)
        if key not in self.imbalance_cache:
            config = self.settings.parallel.pipeline.model_copy(
                update={"schedule": schedule, "chunks": chunks}
            )
            schedule_kind, (blocks, head) = schedule_of(config), self.costs
            count, work = schedule_kind.stages(config, pp), [0.0] * pp
            if count <= len(blocks):
                at = 0
                for stage, size_of_stage in enumerate(balance(blocks, head, count)):
                    work[schedule_kind.rank_of(stage, pp)] += sum(
                        blocks[at : at + size_of_stage]
                    ) + head * (stage == count - 1)
                    at += size_of_stage
            self.imbalance_cache[key] = max(work) * pp / sum(work) if sum(work) else math.inf
        return self.imbalance_cache[key]

    @cached_property
    def costs(self) -> tuple[list[float], float]:
        """Cost of each block, and of the head."""
        return block_costs(self.model, self.settings.data.sequence_length)

    def state_bytes(self, degrees: Degrees, stage: int) -> ModelStateBytes:
        """Model state bytes of a rank; with stage 0, of unsharded parameters in compute precision."""
        if (degrees, stage) not in self.state_bytes_cache:
            stored_dtype = self.compute if stage == 0 else DTYPES[self.settings.precision.master]
            self.state_bytes_cache[degrees, stage] = model_state_bytes(
                self.model, degrees, stage, self.states_per_element, stored_dtype.itemsize
            )
        return self.state_bytes_cache[degrees, stage]

    @cached_property
    def states_per_element(self) -> dict[str, float]:
        """Optimizer values per element of each parameter."""
        return states_per_element(self.settings, self.model)

    @cached_property
    def blocks(self) -> int:
        return sum(isinstance(module, Block) for module in self.model.modules())

    @cached_property
    def experts(self) -> int:
        """Experts of the largest MoE layer; 1 without any."""
        axes, most = parameter_axes(self.model), 1
        for name, parameter in self.model.named_parameters():
            if "experts" in axes[name]:
                most = max(most, parameter.shape[axes[name].index("experts")])
        return most

    @cached_property
    def width(self) -> int:
        """Model width."""
        width: int = self.settings.model.width
        return width

    @cached_property
    def active(self) -> int:
        """Active parameters per token."""
        return size(self.model).active

    @cached_property
    def flops(self) -> float:
        """FLOPs of a step, without recomputation."""
        data = self.settings.data
        return (
            training_flops(self.model, data.target_length, data.source_length)
            * self.settings.train.batch_size
        )

    @cached_property
    def compute(self) -> torch.dtype:
        return DTYPES[self.settings.precision.compute]


@dataclass(frozen=True)
class LayoutChoice:
    """Parameters of a layout that the formulae use."""

    degrees: Degrees
    stage: int
    schedule: str
    chunks: int
    every: int
    micro_batch_size: int
    """Sequences of one forward on one rank."""
    granularity: str = "full"

    def micro_batches(self, cost_model: CostModel) -> int:
        return cost_model.settings.train.batch_size // (self.micro_batch_size * self.degrees.dp)


def estimate(cost_model: CostModel, choice: LayoutChoice) -> Estimate:
    """Estimate the step's time and the largest rank's memory."""
    state_and_activations = _state_bytes(cost_model, choice) + _activations(cost_model, choice)
    device = cost_model.device
    memory = (
        state_and_activations * (1 + device.slack)
        + device.runtime
        + COMMUNICATORS * device.communicator
    )
    return Estimate(_seconds(cost_model, choice), memory)


def _state_bytes(cost_model: CostModel, choice: LayoutChoice) -> float:
    """Bytes of model states, plus gathered parameters."""
    degrees = choice.degrees
    state_bytes, used = (
        cost_model.state_bytes(degrees, choice.stage).total,
        cost_model.state_bytes(degrees, 0).parameters,
    )
    # Stage 3 gathers a block or two at a time.
    return state_bytes + (
        used if choice.stage < 3 else 2 * used / max(1, cost_model.blocks // degrees.pp)
    )


def _activations(cost_model: CostModel, choice: LayoutChoice) -> float:
    degrees, itemsize = choice.degrees, cost_model.compute.itemsize
    tokens = (
        choice.micro_batch_size
        * cost_model.settings.data.sequence_length
        / (degrees.cp * degrees.tp)
    )
    saved = (
        SAVED_ACTIVATIONS
        * cost_model.active
        / max(1, cost_model.blocks)
        / cost_model.width
        * itemsize
    )
    recomputed = 0.0 if not choice.every else 1 / choice.every
    matmul_outputs = saved * MATMUL_OUTPUTS if choice.granularity == "selective" else 0.0
    per_block = (
        saved * (1 - recomputed) + (cost_model.width * itemsize + matmul_outputs) * recomputed
    )
    in_flight = 1.0
    if degrees.pp > 1:
        started = min(choice.micro_batches(cost_model), degrees.pp)
        in_flight = started + (
            (degrees.pp - 1) / choice.chunks if choice.schedule == "interleaved_1f1b" else 0
        )
    return tokens * (
        per_block * cost_model.blocks / degrees.pp * in_flight + (saved if choice.every else 0)
    )


def bubble(choice: LayoutChoice, micro_batches: int) -> float:
    """Fraction of the ranks' time that the pipeline idles."""
    gap = choice.degrees.pp - 1.0
    if choice.schedule == "interleaved_1f1b":
        gap /= choice.chunks
    if choice.schedule == "zero_bubble":
        gap /= 3
    return gap / (micro_batches + gap)


def _seconds(cost_model: CostModel, choice: LayoutChoice) -> float:
    degrees = choice.degrees
    device = cost_model.device
    micro_batches = choice.micro_batches(cost_model)
    recomputation = 1 + (
        1 / (3 * choice.every) if choice.every and choice.granularity == "full" else 0
    )
    compute = (
        cost_model.flops
        * recomputation
        / degrees.world
        / (device.flops_in(cost_model.compute) * device.reach)
    )
    exposed = _layer_traffic_seconds(cost_model, choice, micro_batches) + max(
        0.0, _data_parallel_seconds(cost_model, choice, micro_batches) - compute / micro_batches
    )
    imbalance = (
        cost_model.imbalance(degrees.pp, choice.schedule, choice.chunks) if degrees.pp > 1 else 1.0
    )
    return (compute + exposed) * imbalance / (1 - bubble(choice, micro_batches))


def _rate(cost_model: CostModel, ranks: int) -> float:
    """Bandwidth in bytes/s of a group of `ranks` neighbouring ranks."""
    return cost_model.device.link if ranks <= cost_model.device.node else cost_model.device.network


def _layer_traffic_seconds(
    cost_model: CostModel, choice: LayoutChoice, micro_batches: int
) -> float:
    """Exposed seconds inside the blocks of a rank: tp collectives, all-to-alls of experts, keys and values of cp."""
    degrees = choice.degrees
    tokens = choice.micro_batch_size * cost_model.settings.data.sequence_length / degrees.cp
    rows = tokens * cost_model.width * cost_model.compute.itemsize
    layer_seconds = (
        TP_COLLECTIVES * rows * (degrees.tp - 1) / degrees.tp / _rate(cost_model, degrees.tp)
    )
    if degrees.ep > 1:
        layer_seconds += (
            ALL_TO_ALLS
            * rows
            * (degrees.ep - 1)
            / degrees.ep
            / _rate(cost_model, degrees.tp * degrees.ep)
        )
    if degrees.cp > 1:
        layer_seconds += 2 * rows * (degrees.cp - 1) / _rate(cost_model, degrees.tp * degrees.cp)
    return layer_seconds * cost_model.blocks / degrees.pp * micro_batches


def _data_parallel_seconds(
    cost_model: CostModel, choice: LayoutChoice, micro_batches: int
) -> float:
    """Seconds of data-parallel collectives of parameters and gradients."""
    degrees = choice.degrees
    if degrees.dp * degrees.cp == 1:
        return 0.0
    used = cost_model.state_bytes(degrees, 0).parameters
    all_gathers, reduce_scatters = (
        (2 * micro_batches, micro_batches)
        if choice.stage == 3
        else (1, micro_batches if choice.stage == 2 else 1)
    )
    return (
        used
        * (all_gathers + reduce_scatters)
        / _rate(cost_model, degrees.tp * degrees.cp * degrees.dp)
    )
