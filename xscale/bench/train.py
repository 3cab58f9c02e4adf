"""Benchmark of a training step against plain PyTorch with the same modules, and against the dense twin of an MoE."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from xscale.mesh.environment import read_rank_info
from xscale.mesh.mesh import leave_process_group
from xscale.nn.ffn.moe import Moe
from xscale.nn.init import materialize
from xscale.nn.tokens import Stats
from xscale.objective.objective import Batch
from xscale.optim.optimizer.adamw import AdamW
from xscale.parallel import precision
from xscale.parallel.plan import DTYPES
from xscale.train.settings import Settings, build_on_meta
from xscale.train.setup import RunParts, set_up
from xscale_kernels.bench.timing import Sample, Timings, alternate, host_clock


@dataclass(frozen=True)
class TrainingSide:
    """A training loop that is benchmarked."""

    name: str
    step: Callable[[int], dict[str, float]]
    """Takes the step with that number; returns its seconds by phase, or nothing."""
    tokens: int
    """Tokens of a step."""
    flops: float
    """Model FLOPs of a step."""

    def row(self, timings: Timings, peak: float | None) -> dict[str, Any]:
        """Plain values of the printed row; `split` has the seconds by phase of the median step."""
        median = timings.median(self.name)
        return {
            "name": self.name,
            "tokens_per_second": self.tokens / median,
            "mfu": None if peak is None else self.flops / median / peak,
            "step_seconds": median,
            "fastest_seconds": timings.fastest(self.name),
            "split": _median_sample(timings, self.name).result,
        }


def bench_train(settings: Settings, steps: int, *, dense: bool = True) -> dict[str, Any]:
    """Time training steps of xscale, of plain PyTorch and of the dense twin, which alternate; ratios over pairs."""
    parts = set_up(settings, read_rank_info())
    try:
        batches = collect(parts, steps + 1)
        sides = [_xscale_side("xscale", parts, batches), _torch_side(parts, batches)]
        if dense and any(isinstance(module, Moe) for module in parts.model.modules()):
            sides.append(_xscale_side("xscale, dense", set_up(dense_twin(settings), read_rank_info()), batches))
        timings = time_steps(sides, steps)
    finally:
        leave_process_group()
    rows = [side.row(timings, parts.peak) for side in sides]
    ratios = {f"xscale / {other.name}": speed_ratio(timings, sides[0], other) for other in sides[1:]}
    return {"rows": rows, "tokens_per_second_ratios": ratios, "steps": steps, "device": str(parts.mesh.device)}


@dataclass(frozen=True)
class TrainingSpeed:
    """Training speed of one variant: medians of steps that alternate with those of the other variants."""

    tokens_per_second: float
    tokens_per_processor_second: float | None
    """Tokens per second of CPU time; None on a GPU."""


def training_speeds(variants: Mapping[str, Settings], steps: int) -> dict[str, TrainingSpeed]:
    """Time `steps` training steps of each variant."""
    sides = []
    try:
        for name, settings in variants.items():
            parts = set_up(settings, read_rank_info())
            sides.append(_xscale_side(name, parts, collect(parts, steps + 1)))
        timings = time_steps(sides, steps)
    finally:
        leave_process_group()
    on_cpu = parts.mesh.device.type == "cpu"
    return {
        side.name: TrainingSpeed(
            side.tokens / timings.median(side.name),
            side.tokens / timings.median(side.name, "processor_seconds") if on_cpu else None,
        )
        for side in sides
    }


def time_steps(sides: Sequence[TrainingSide], steps: int) -> Timings:
    """Time one step of each side in turn, `steps` times after one warm-up step."""
    numbered = {side.name: partial(_next_step, side, itertools.count()) for side in sides}
    return alternate(numbered, host_clock(), steps)


def _next_step(side: TrainingSide, numbers: Iterator[int]) -> dict[str, float]:
    return side.step(next(numbers))


def speed_ratio(timings: Timings, side: TrainingSide, other: TrainingSide) -> float:
    """Tokens per second of `side` over those of `other`: the median over the pairs of steps of one round."""
    return side.tokens / other.tokens * timings.ratio(other.name, side.name)


def _median_sample(timings: Timings, name: str) -> Sample:
    samples = sorted(timings.samples[name], key=lambda sample: sample.seconds)
    return samples[len(samples) // 2]


def collect(parts: RunParts, steps: int) -> list[list[Batch]]:
    """Read the micro-batches of the first steps, before anything is timed."""
    size = parts.settings.train.batch_size
    count = size // (parts.training.micro_batch * parts.training.ranks)
    stream = parts.training.loader.stream(parts.training.requests(0, size, steps))
    return [[parts.training.make(next(stream), step, size, Stats()) for _ in range(count)] for step in range(steps)]


def dense_twin(settings: Settings) -> Settings:
    """The same model with each MoE layer replaced by one dense FFN of equal active FLOPs."""
    from xscale.core.config import decode, encode

    data = encode(settings)
    return decode(type(settings), _without_experts(data))


def _without_experts(data: Any) -> Any:
    if isinstance(data, dict):
        if data.get("kind") == "moe":
            return _widened(data)
        return {key: _without_experts(item) for key, item in data.items()}
    if isinstance(data, list):
        return [_without_experts(item) for item in data]
    return data


def _widened(moe: dict[str, Any]) -> dict[str, Any]:
    """The config of one expert that is as wide as the top_k experts of a token together."""
    expert = dict(moe["expert"])
    top_k = moe["router"].get("top_k", 1)
    if expert.get("hidden") is not None:
        expert["hidden"] *= top_k
    return expert


def _xscale_side(name: str, parts: RunParts, batches: list[list[Batch]]) -> TrainingSide:
    def step(number: int) -> dict[str, float]:
        parts.stepper.step(batches[number], parts.settings.optimizer.lr)
        if parts.mesh.device.type == "cuda":
            torch.cuda.synchronize(parts.mesh.device)
        return parts.stepper.timer.flush()

    return _side(name, parts, step)


def _torch_side(parts: RunParts, batches: list[list[Batch]]) -> TrainingSide:
    """A hand-written loop: the same modules and torch's fused AdamW, without the engine."""
    settings, device = parts.settings, parts.mesh.device
    model: nn.Module = build_on_meta(settings, parts.corpus.tokenizer.vocabulary)
    materialize(model, settings.run.seed, str(device), DTYPES[settings.precision.master])
    precision.apply(model, DTYPES[settings.precision.compute], DTYPES[settings.precision.master])
    config = settings.optimizer
    betas = (config.beta1, config.beta2) if isinstance(config, AdamW.Config) else (0.9, 0.95)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=betas, weight_decay=config.weight_decay, fused=True
    )
    model.train()

    def step(number: int) -> dict[str, float]:
        targets = sum(int(batch.weight) for batch in batches[number])
        for batch in batches[number]:
            loss = model(batch.tokens, batch.targets, batch.source)
            (loss / targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.train.clip_grad_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return {}

    return _side("plain PyTorch", parts, step)


def _side(name: str, parts: RunParts, step: Callable[[int], dict[str, float]]) -> TrainingSide:
    size = parts.settings.train.batch_size
    return TrainingSide(name, step, size * parts.settings.sample_tokens, size * parts.flops_per_sample)


def format_result(result: dict[str, Any]) -> str:
    """Format the result of `bench_train` as text: one line per side, then the ratios."""
    lines: list[str] = []
    for row in result["rows"]:
        mfu = "" if row["mfu"] is None else f"  MFU {row['mfu']:.1%}"
        split = "  ".join(f"{phase} {seconds:.3f}s" for phase, seconds in row["split"].items())
        speed = f"{row['tokens_per_second']:>10,.0f} tokens/s{mfu}  {row['step_seconds']:.3f} s per step"
        lines.append(f"{row['name']:<16} {speed}")
        if split:
            lines.append(f"{'':<16} {split}")
    for name, value in result["tokens_per_second_ratios"].items():
        side, _, baseline = name.partition(" / ")
        lines.append(f"{side} runs at {value:.3f}x of {baseline} (tokens/s)")
    return "\n".join(lines)
