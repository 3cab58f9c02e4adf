"""`xscale bench parallel`: checks that both sides have equal losses and gradients, then times alternating steps."""

import os
import platform
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xscale.bench.harness.timing import Sample, alternate, host_clock
from xscale.bench.parallel import torch_side as torch_sides
from xscale.bench.parallel.sizes import RANKS, SEED, BenchBatch, ParallelSizes, batch_slice
from xscale.bench.torchrun import relaunch_under_torchrun, report_from_rank0
from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.mesh import axes
from xscale.mesh.collectives import all_gather_object, barrier, sum_scalars
from xscale.mesh.environment import read_rank_info
from xscale.mesh.mesh import Mesh, init_mesh, leave_process_group
from xscale.nn.model.model import MODELS
from xscale.parallel import context
from xscale.parallel.config import ContextConfig, ParallelConfig, PipelineConfig, PrecisionConfig
from xscale.parallel.pipeline.executor import Pipeline
from xscale.parallel.plan import ParallelPlan
from xscale.parallel.shard.sharded import sharded_parameters


class XscaleSide:
    """Forward and backward of a step; gradients are where an optimizer reads them."""

    def __init__(
        self,
        sizes: ParallelSizes,
        config: ParallelConfig,
        mesh: Mesh,
        *,
        experts: bool,
        micros: int,
    ) -> None:
        """`micros`: micro-batches per rank and step."""
        self.plan = ParallelPlan(config, PrecisionConfig(), sizes.length)
        with torch.device("meta"):
            model = MODELS.build(sizes.model(experts=experts), sizes.vocabulary, sizes.length)
        sharding = context.sequence_sharding_of(model, mesh, config)
        self.model = self.plan.apply(model, mesh, SEED)
        self.model.train()
        self.weight = float(sizes.targets)
        local = batch_slice(sizes.batch(), mesh.data_rank, mesh.degrees.dp)
        self.batches = [batch_slice(local, micro, micros) for micro in range(micros)]
        if sharding is not None:
            self.batches = [
                BenchBatch(
                    context.shard_tokens(batch.tokens, sharding), sharding.shard(batch.targets)
                )
                for batch in self.batches
            ]

    def step(self) -> Tensor:
        """This rank's part of the step's summed loss."""
        if isinstance(self.model, Pipeline):
            return self.model.step(self.batches, _loss, self.weight, lambda _: nullcontext())
        total = torch.zeros((), dtype=torch.float64)
        for number, batch in enumerate(self.batches):
            self.plan.set_gradient_sync(self.model, last=number == len(self.batches) - 1)
            loss = _loss(self.model, batch)
            (loss / self.weight).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by parameter name, as local shards or DTensors."""
        gradients: dict[str, Any] = {
            sharded.name: sharded.parameter.grad for sharded in sharded_parameters(self.model)
        }
        return gradients

    def clear(self) -> None:
        """Discard the gradients."""
        self.model.zero_grad(set_to_none=True)


def _loss(model: nn.Module, batch: BenchBatch) -> Tensor:
    loss: Tensor = model(batch.tokens, batch.targets)
    return loss


LARGEST_RATIO = 1.25
"""Ratio of xscale's step time to torch's above which the table flags a case."""
TOLERANCE = 1e-4
"""Tolerance of float32 differences between the sides, relative to the largest element."""


class Side(Protocol):
    """xscale or torch."""

    @property
    def step(self) -> Callable[[], Tensor]: ...
    def gradients(self) -> dict[str, Tensor]: ...
    def clear(self) -> None: ...


@dataclass(frozen=True)
class ParallelCase:
    """One kind of parallelism."""

    torch_side: Callable[[ParallelSizes, Mesh], torch_sides.TorchSide]
    torch_api: str
    """The API of the torch side."""
    mesh: axes.MeshConfig
    context: Literal["auto", "ring", "ulysses"] = "auto"
    experts: bool = False
    repeats: int = 1
    """Ranks that compute the same loss."""
    pipeline: bool = False

    def config(self, sizes: ParallelSizes) -> ParallelConfig:
        """Parallel section of a recipe for this case."""
        half = sizes.depth // RANKS
        pipeline = PipelineConfig(
            schedule="1f1b", blocks_per_stage=(half,) * RANKS if self.pipeline else None
        )
        return ParallelConfig(
            mesh=self.mesh, context=ContextConfig(style=self.context), pipeline=pipeline
        )


CASES = {
    "tp": ParallelCase(
        torch_sides.tensor,
        "parallelize_module, loss_parallel",
        axes.MeshConfig(tp=RANKS),
        repeats=RANKS,
    ),
    "pp": ParallelCase(
        torch_sides.pipeline,
        "PipelineStage, Schedule1F1B",
        axes.MeshConfig(pp=RANKS),
        pipeline=True,
    ),
    "cp-ring": ParallelCase(
        torch_sides.ring, "keys and values gathered, SDPA", axes.MeshConfig(cp=RANKS), "ring"
    ),
    "cp-ulysses": ParallelCase(
        torch_sides.ulysses, "all_to_all_single, SDPA", axes.MeshConfig(cp=RANKS), "ulysses"
    ),
    "ep": ParallelCase(
        torch_sides.experts,
        "all_to_all_single, fully_shard",
        axes.MeshConfig(dp_shard=RANKS, ep=RANKS),
        experts=True,
    ),
}


def bench_parallel(names: Sequence[str], sizes: ParallelSizes, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of both sides and their ratio for each case, as plain values. Collective."""
    rank_info = read_rank_info()
    device, results = torch.device("cpu"), []
    try:
        for name in names:
            case = CASES[name]
            mesh = init_mesh(rank_info, axes.resolve(case.mesh, rank_info.world), device, 300.0)
            results.append(
                {
                    "name": name,
                    "torch": case.torch_api,
                    **_bench_case(case, name, sizes, mesh, rounds),
                }
            )
    finally:
        leave_process_group()
    return {
        "cases": results,
        "sizes": asdict(sizes),
        "rounds": rounds,
        "processes": rank_info.world,
        "first": rank_info.is_rank0,
        "bar": LARGEST_RATIO,
        "version": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": list(os.getloadavg()),
    }


def _bench_case(
    case: ParallelCase, name: str, sizes: ParallelSizes, mesh: Mesh, rounds: int
) -> dict[str, Any]:
    micros = sizes.sequences // 2 if case.pipeline else 1
    xscale = XscaleSide(sizes, case.config(sizes), mesh, experts=case.experts, micros=micros)
    torch_side = case.torch_side(sizes, mesh)
    check_same_numbers(name, xscale, torch_side, case.repeats)
    sides: dict[str, Side] = {"xscale": xscale, "torch": torch_side}
    timings = alternate(sides, barrier_clock, rounds, swap=True)
    processor = {side: sum(timings.values(side, "processor_seconds")) for side in sides}
    return {
        "xscale_milliseconds": timings.median("xscale") * 1e3,
        "torch_milliseconds": timings.median("torch") * 1e3,
        "ratio": timings.ratio("xscale", "torch"),
        "processor_ratio": processor["xscale"] / processor["torch"],
    }


def barrier_clock(side: Side) -> Sample:
    """Measure one step from a barrier to a barrier, with the CPU time of all ranks; discard its gradients."""
    barrier()
    sample = host_clock(barrier)(side.step)
    side.clear()
    return Sample(sample.seconds, sum_scalars([sample.processor_seconds], torch.device("cpu"))[0])


def check_same_numbers(name: str, xscale: Side, other: Side, repeats: int) -> None:
    """Raise ConfigError if losses or gradients of the sides differ. Collective."""
    losses = [
        sum_scalars([float(side.step().detach()) / repeats], torch.device("cpu"))[0]
        for side in (xscale, other)
    ]
    first, second = xscale.gradients(), other.gradients()
    differences = (
        []
        if abs(losses[0] - losses[1]) <= TOLERANCE * abs(losses[1])
        else [f"losses {losses[0]} and {losses[1]}"]
    )
    if first.keys() != second.keys():
        differences.append(f"gradients of {sorted(first.keys() ^ second.keys())} on one side only")
    for key in sorted(first.keys() & second.keys()):
        difference = _relative_difference(first[key], second[key])
        if not difference <= TOLERANCE:
            differences.append(f"gradient of {key} off by {difference:.2g}")
    xscale.clear()
    other.clear()
    if reported := [
        difference for of_rank in all_gather_object(differences) for difference in of_rank
    ]:
        raise ConfigError(
            "bench parallel", f"{name}: the two sides differ: {'; '.join(reported[:5])}"
        )


def _relative_difference(first: Tensor, second: Tensor) -> float:
    """Largest difference over the largest element. Collective if a gradient is a DTensor."""
    if (
        isinstance(first, DTensor)
        and not isinstance(second, DTensor)
        and first.shape != second.shape
    ):
        # The torch side has local experts only.
        first = first.to_local()
    full, other = (
        tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for tensor in (first, second)
    )
    return float((full - other).abs().max() / other.abs().max())


def format_table(results: dict[str, Any]) -> str:
    """Format the results as text."""
    sizes = results["sizes"]
    lines = [
        f"{results['processes']} processes of {results['threads']} thread on {results['cores']} cores, load "
        f"{results['load'][0]:.1f}; torch {results['version']}, Python {results['python']}; "
        f"medians of {results['rounds']} alternating rounds",
        f"width {sizes['width']}, {sizes['depth']} blocks, {sizes['sequences']} sequences of {sizes['length']} tokens; "
        "forward and backward",
        f"{'':<12}{'xscale':>11}{'torch':>13}   ratio  CPU time ratio",
    ]
    for case in results["cases"]:
        verdict = "" if case["ratio"] <= results["bar"] else f"  above {results['bar']}"
        lines.append(
            f"{case['name']:<12}{case['xscale_milliseconds']:>8.1f} ms{case['torch_milliseconds']:>10.1f} ms"
            f"{case['ratio']:>8.2f}{case['processor_ratio']:>16.2f}   {case['torch']}{verdict}"
        )
    return "\n".join(lines)


def bench(
    names: Sequence[str], sizes: ParallelSizes, rounds: int, *, as_json: bool, record: Path | None
) -> int:
    """Run the benchmark; return the exit status. ConfigError for an unknown name, and if the sides' numbers differ."""
    rank_info = read_rank_info()
    known = ", ".join(CASES)
    for name in names:
        if name not in CASES:
            raise ConfigError(
                "bench parallel", f"there is no '{name}'", f"Take some of {known}; none: all."
            )
    if problems := sizes.check():
        raise ConfigError(problems)
    if rounds < 1:
        raise ConfigError("--rounds", f"must be at least 1, got {rounds}", "Take 1 or more.")
    if rank_info.is_single_process:
        return relaunch_under_torchrun(RANKS)
    if rank_info.world != RANKS:
        raise ConfigError(
            "bench parallel",
            f"needs {RANKS} processes, got {rank_info.world}",
            "Start one process.",
        )
    results = bench_parallel(names or list(CASES), sizes, rounds)
    report_from_rank0(results, format_table, as_json=as_json, record=record)
    return EXIT_DONE
