"""Simulate a step of one rank: the code of a run on fake tensors, under torch's fake process group.

The memory, FLOPs and messages of a rank are those of the code that will run, on a layout of any size. Since fake
tensors hold no data, the load over experts is balanced, or has a given overload factor; no token is dropped or ignored.
"""

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from xscale.measure.op_tracer import OpTracer
from xscale.measure.traced_costs import Message, Peak, PhaseCost, TraceSegment
from xscale.mesh.axes import Degrees
from xscale.mesh.environment import RankInfo
from xscale.mesh.mesh import fake_mesh
from xscale.mesh.rank_groups import RankGroup, groups_of
from xscale.mesh.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    _disable_current_modes,
)
from xscale.nn.attention.block_sparse import BlockSparse
from xscale.nn.attention.ops import gathered
from xscale.nn.blocks.stack import Stack
from xscale.nn.ffn.moe.moe import Moe
from xscale.nn.module import substitute
from xscale.objective.objective import Batch
from xscale.parallel import context
from xscale.parallel.plan import DTYPES, ParallelPlan
from xscale.parallel.precision import float8
from xscale.parallel.recompute.activation_checkpointing import CheckpointedBlocks
from xscale.parallel.recompute.activation_offload import ActivationOffload, HostCopy
from xscale.parallel.shard import zero
from xscale.parallel.shard.sharded import (
    ShardedParameter,
    empty_like_local,
    fill_parameters,
    sharded_parameters,
    to_local,
)
from xscale.planning.balanced_routing import balance_routing
from xscale.planning.repeated_layers import (
    LinearFigures,
    RepeatedLayers,
    drop_layers,
    extrapolate,
    find_repeated,
    mark_layers,
)
from xscale.planning.simulated_batches import fake_batches, full_batch, objective_of
from xscale.settings.settings import Settings, build_on_meta
from xscale.step.stepper import Stepper
from xscale.train.setup import make_engine
from xscale_kernels import rows

GLOO = ("reduce_scatter_base", "reduce_scatter_tensor")
"""Collectives for which gloo copies its input."""
ROW_BLOCKS = 4
"""Most row blocks of a CPU kernel in a micro-batch: more would only take time."""


@dataclass(frozen=True)
class SimulatedStep:
    """Memory, cost and messages of a rank in a step of `micro_batches`."""

    rank: int
    micro_batches: int
    state_bytes: Mapping[str, int]
    """Model state bytes by kind."""
    peak: Peak
    costs: Mapping[str, PhaseCost]
    """By phase: forward, backward, communicate, optimizer."""
    messages: list[Message]
    groups: Mapping[str, RankGroup]
    """By the name of the process group."""
    parameters: int
    """Parameters of this rank's shards."""
    active: int
    """Mean active parameters per token on this rank: experts count by the fraction that a token uses."""
    host_bytes: int = 0
    """Peak bytes of activations in CPU memory (`parallel.recompute.offload`)."""
    segments: Mapping[Hashable, TraceSegment] = field(default_factory=dict)
    """Memory and work between the marks of the layers; empty where they are not marked."""
    repeated: Mapping[int, RepeatedLayers] = field(default_factory=dict)
    """The repeated layers that were simulated, by the number of their stack."""
    left_out: int = 0
    """Periods of layers of each of these stacks that were not simulated."""


class UncountedOffload(ActivationOffload):
    """Activation offload of fake tensors, of whose copies the device's memory has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts = weakref.WeakKeyDictionary[HostCopy, tuple[Any, ...]]()
        """Shape and strides of what each copy stands for."""

    def copy_out(self, x: Tensor) -> HostCopy:
        copy = HostCopy(x.new_empty(0), None)
        self.layouts[copy] = x.shape, x.stride()
        self.count(copy, x.numel() * x.element_size())
        return copy

    def copy_back(self, copy: HostCopy) -> Tensor:
        return copy.tensor.new_empty_strided(*self.layouts[copy])


def substitute_offload(model: nn.Module) -> UncountedOffload:
    """Substitute the activation offload of all stacks, if they have one; it counts the bytes of CPU memory."""
    offload = UncountedOffload()
    for stack in [module for module in model.modules() if isinstance(module, Stack)]:
        if isinstance(stack.run_block, CheckpointedBlocks) and stack.run_block.offload is not None:
            stack.run_block.offload = offload
    return offload


def plan_blocks_of_tokens(model: nn.Module) -> None:
    """Have block-sparse attention read its patterns as in a run: they depend on the sizes alone, and are no tensors of
    the step."""
    for core in [module for module in model.modules() if isinstance(module, BlockSparse)]:
        substitute(core, "build_plan", BuiltOutside(core.build_plan))


@dataclass(frozen=True)
class BuiltOutside:
    """Substitute for `BlockSparse.build_plan`: the plan has real tensors, whatever mode the step is simulated in."""

    inner: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        """Return the plan of a layout."""
        with _disable_current_modes():
            return self.inner(*arguments)


class CannotSimulateError(Exception):
    """The step cannot be simulated: its sizes depend on data, or its engine needs real tensors."""


def simulate_step(
    settings: Settings,
    degrees: Degrees,
    rank: int,
    micro_batches: int,
    vocabulary: int,
    seconds: Callable[[float, float], float] | None = None,
    workspaces: dict[Hashable, int] | None = None,
    on_gpu: bool = False,
    overload: float = 1.0,
) -> SimulatedStep:
    """Simulate a step of `rank`, of layers that are equal only a few, from which the others follow.

    `seconds`: roofline, (FLOPs, bytes) -> seconds of an operator. `workspaces`: as those of `OpTracer`.
    `on_gpu`: whether scores are computed in chunks as large as on a GPU. `overload`: rows of its experts over the mean
    over the expert-parallel ranks.
    """
    known = {} if workspaces is None else workspaces
    arguments = (
        settings,
        degrees,
        rank,
        micro_batches,
        vocabulary,
        seconds,
        known,
        on_gpu,
        overload,
    )
    fewer = simulate_layers(*arguments, leave_out=None)
    if not fewer.left_out:
        return fewer
    more = simulate_layers(*arguments, leave_out=fewer.left_out - 1)
    figures = extrapolate(LinearFigures.of(fewer), LinearFigures.of(more), fewer.left_out)
    if figures is None:
        return simulate_layers(*arguments, leave_out=0)
    return replace(more, left_out=0, **figures)


def simulate_layers(
    settings: Settings,
    degrees: Degrees,
    rank: int,
    micro_batches: int,
    vocabulary: int,
    seconds: Callable[[float, float], float] | None = None,
    workspaces: dict[Hashable, int] | None = None,
    on_gpu: bool = False,
    overload: float = 1.0,
    *,
    leave_out: int | None,
) -> SimulatedStep:
    """Simulate a step of `rank` without that many periods of each stack's repeated layers; None: without most."""
    if settings.parallel.zero.engine != "torch":
        raise CannotSimulateError(f"the {settings.parallel.zero.engine} engine needs real tensors")
    parallel = settings.parallel.model_copy(update={"compile": False})
    plan = ParallelPlan(parallel, settings.precision, settings.data.sequence_length)
    tracer = OpTracer(seconds, copying=() if seconds else GLOO, workspaces=workspaces)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_mesh(RankInfo(rank, degrees.world), degrees) as mesh:
        model = build_on_meta(settings, vocabulary)
        sharding = context.sequence_sharding_of(model, mesh, parallel)
        model = plan.shard(model, mesh, lambda stage: _fill(stage, plan.master, fake, tracer))
        offload = _substitute(model, overload)
        repeated, left_out = _leave_out_layers(model, settings, degrees, leave_out, tracer)
        objective = objective_of(settings, vocabulary)
        global_batches = [full_batch(settings, objective) for _ in range(micro_batches)]
        sharded_tensors = sharded_parameters(model)
        tracer.gradient_shapes = set().union(*map(_shapes, model.parameters()))
        with (
            fake,
            tracer,
            tracer.watching_resizes("gathered_parameters"),
            _few_row_blocks(settings),
            _chunks_of_scores(on_gpu),
        ):
            with tracer.labelled(kind="optimizer"):
                engine = make_engine(settings, model, sharded_tensors, mesh)
            state_bytes = dict(tracer.live)
            repeats = degrees.tp * degrees.pp
            stepper = Stepper(engine, objective, torch.device("cpu"), repeats=repeats)
            stepper.timer.phase = _phases(tracer, marked=left_out > 0)  # type: ignore[method-assign, assignment]
            _take_step(stepper, fake_batches(global_batches, fake, sharding, model, plan.compute))
        parameters, active = _count(model, sharded_tensors)
        return SimulatedStep(
            rank=rank,
            micro_batches=micro_batches,
            state_bytes=state_bytes,
            peak=tracer.peak,
            costs=tracer.costs,
            messages=tracer.messages,
            groups=groups_of(mesh),
            parameters=parameters,
            active=active,
            host_bytes=offload.peak_bytes,
            segments=tracer.segments,
            repeated={number: layers.without(left_out) for number, layers in repeated.items()},
            left_out=left_out,
        )


def _substitute(model: nn.Module, overload: float) -> UncountedOffload:
    """Substitute what a step on fake tensors cannot do, or need not; return what counts the bytes of CPU memory."""
    balance_routing(model, overload)
    float8.take_torch_kernel(model)
    plan_blocks_of_tokens(model)
    return substitute_offload(model)


def _count(model: nn.Module, tensors: list[ShardedParameter]) -> tuple[int, int]:
    """Return the parameters of this rank's shards, and how many of them a token meets on average."""
    shares = _shares(model)
    sizes = [(x.local.numel(), shares.get(x.name, 1.0)) for x in tensors]
    return sum(count for count, _ in sizes), round(sum(count * share for count, share in sizes))


def _phases(tracer: OpTracer, *, marked: bool) -> Callable[[str], Any]:
    """Return the timer's `phase`, by which each phase of the step is labelled and, if marked, begins a segment."""
    counts: Counter[str] = Counter()

    def phase(name: str) -> Any:
        if marked:
            tracer.mark((name, counts[name]))
            counts[name] += 1
        return tracer.labelled(phase=name)

    return phase


def _leave_out_layers(
    model: nn.Module, settings: Settings, degrees: Degrees, periods: int | None, tracer: OpTracer
) -> tuple[dict[int, RepeatedLayers], int]:
    """Remove that many periods of each stack's repeated layers, None: most, and have the others mark their passes.

    Return the repeated layers of the whole stacks, and how many periods were removed.
    """
    if periods == 0:
        return {}, 0
    parallel = settings.parallel
    repeated = find_repeated(model, parallel, degrees, settings.data.sequence_length)
    most = min((layers.periods - layers.fewest for layers in repeated.values()), default=0)
    periods = most if periods is None else periods
    drop_layers(model, repeated, periods)
    zero.set_prefetch(model, zero.prefetched_blocks(parallel, degrees))
    mark_layers(model, tracer)
    return repeated, periods


def _take_step(stepper: Stepper, batches: list[Batch]) -> None:
    """Compute gradients and apply them. CannotSimulateError where a shape depends on data."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stepper.apply(stepper.compute_gradients(batches), 1e-3)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CannotSimulateError(f"a tensor size depends on data: {error}") from error


def _shares(model: nn.Module) -> dict[str, float]:
    """Name of each expert parameter -> the share of the experts that a token visits."""
    return {
        f"{experts.path}.{name}": mixture.active_fraction()
        for mixture in model.modules()
        if isinstance(mixture, Moe)
        for experts in (mixture.experts,)
        for name in experts.axes
    }


def _fill(model: nn.Module, master: torch.dtype, fake: FakeTensorMode, tracer: OpTracer) -> None:
    """Materialize the parameters as fake tensors."""
    with fake, tracer, tracer.labelled(kind="parameters"):
        fill_parameters(
            model, lambda _, parameter: empty_like_local(parameter, torch.device("cpu"), master)
        )


@contextmanager
def _few_row_blocks(settings: Settings) -> Iterator[None]:
    """Let kernels process long inputs in larger row blocks; their temporaries stay small."""
    tokens = settings.train.micro_batch_size * settings.data.sequence_length
    total_bytes = tokens * settings.model.width * DTYPES[settings.precision.compute].itemsize
    before = rows.CACHE_BYTES
    rows.CACHE_BYTES = max(before, total_bytes // ROW_BLOCKS)
    try:
        yield
    finally:
        rows.CACHE_BYTES = before


@contextmanager
def _chunks_of_scores(on_gpu: bool) -> Iterator[None]:
    """Let gathered attention compute as many scores at once as on the device that is planned for."""
    before = gathered.CHUNK_SCORES
    gathered.CHUNK_SCORES = gathered.CHUNK_SCORES_CUDA if on_gpu else before
    try:
        yield
    finally:
        gathered.CHUNK_SCORES = before


def _shapes(parameter: Tensor) -> set[tuple[int, ...]]:
    return (
        {tuple(parameter.shape), tuple(to_local(parameter).shape)} if parameter.dim() > 1 else set()
    )
