"""The sides of `xscale bench train`: xscale's step, plain loops, and models of other sources on the same batches."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from xscale.bench.harness.timing import Sample, Timings
from xscale.bench.llama import LlamaSizes, PlainLlama, TransformersLlama, llama_sizes
from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError
from xscale.mesh.environment import read_rank_info
from xscale.nn.ffn.moe.statistics import load_stats
from xscale.nn.forward import Stats
from xscale.nn.materialize import materialize
from xscale.nn.mixer.attention import Attention
from xscale.objective.objective import Batch
from xscale.optim.optimizer.adamw import AdamW
from xscale.parallel.plan import DTYPES
from xscale.parallel.precision import precision
from xscale.planning.plan import vocabulary_of
from xscale.run.parts import RunParts
from xscale.settings.settings import Settings, build_on_meta
from xscale.train.setup import set_up

XSCALE = "xscale"


@dataclass(frozen=True)
class TrainingSide:
    """A training loop that is benchmarked."""

    name: str
    step: Callable[[int], dict[str, float]]
    """Takes the step with that number; returns its seconds by phase, or nothing."""
    tokens: int
    """Tokens of a step."""
    flops: float
    """Model FLOPs of a step: of causal attention the half that is not masked."""
    flops_6n: float = 0.0
    """The usual estimate: 6 for each parameter and token, embeddings left out, and attention without its mask."""
    peak: float | None = None
    """FLOP/s of the device; None when not known."""
    last_loss: Callable[[], float | None] = lambda: None
    """Mean loss of the last step; None: not kept."""
    overload: Callable[[], float | None] = lambda: None
    """Tokens of the busiest expert over the mean, the worst of the layers; None: no mixture."""

    def row(self, timings: Timings) -> dict[str, Any]:
        """Plain values of the printed row; `split` has the seconds by phase of the median step."""
        median, rates = timings.median(self.name), {}
        if self.peak is not None:
            rates = {
                "mfu": self.flops / median / self.peak,
                "mfu_6n": self.flops_6n / median / self.peak,
            }
        return {
            "name": self.name,
            "tokens_per_second": self.tokens / median,
            "mfu": None,
            "mfu_6n": None,
            **rates,
            "tflops": self.flops / median / 1e12,
            "step_seconds": median,
            "fastest_seconds": timings.fastest(self.name),
            "split": _median_sample(timings, self.name).result,
            "loss": self.last_loss(),
            "overload": self.overload(),
        }


def _median_sample(timings: Timings, name: str) -> Sample:
    samples = sorted(timings.samples[name], key=lambda sample: sample.seconds)
    return samples[len(samples) // 2]


@dataclass(frozen=True)
class Workload:
    """The batches of some steps on their device, and the counts of one step, without the model."""

    settings: Settings
    device: torch.device
    batches: list[list[Batch]]
    tokens: int
    flops: float
    flops_6n: float
    peak: float | None

    @classmethod
    def of_parts(cls, parts: RunParts, steps: int) -> "Workload":
        """Read the batches of a run."""
        size = parts.settings.train.batch_size
        counts = (
            size * parts.settings.sample_tokens,
            size * parts.flops_per_sample,
            size * flops_6n(parts),
        )
        return cls(parts.settings, parts.mesh.device, collect(parts, steps), *counts, parts.peak)

    @classmethod
    def of(cls, settings: Settings, steps: int) -> "Workload":
        """Read the batches of a run whose model is freed again."""
        workload = cls.of_parts(set_up(settings, read_rank_info()), steps)
        gc.collect()
        if workload.device.type == "cuda":
            torch.cuda.empty_cache()
        return workload

    def side(self, name: str, step: Callable[[int], dict[str, float]]) -> TrainingSide:
        """Return the side that takes these steps."""
        return TrainingSide(name, step, self.tokens, self.flops, self.flops_6n, self.peak)


SideBuilder = Callable[[int], TrainingSide]
"""Builds a side with the data of so many steps."""


def training_sides(settings: Settings) -> dict[str, SideBuilder]:
    """Name -> builder of each side; a side that the model has not says so when it is built.

    xscale trains as configured; with balanced routing (each expert gets equally many tokens); and with the dense twin.
    "same modules" is a plain loop over xscale's modules, not compiled. "plain PyTorch" and "transformers" are the
    model as their users write it, under torch.compile with SDPA and the fused AdamW, in autocast; documents are not
    kept apart there.
    """
    sides: dict[str, SideBuilder] = {XSCALE: partial(xscale_side, XSCALE, settings)}
    if _has_experts(encode(settings)):
        sides["xscale, balanced"] = partial(
            xscale_side, "xscale, balanced", balanced_routing(settings)
        )
        sides["xscale, dense"] = partial(xscale_side, "xscale, dense", dense_twin(settings))
    sides["same modules"] = partial(_same_modules_side, settings)
    sides["plain PyTorch"] = partial(_baseline_side, "plain PyTorch", PlainLlama, settings)
    sides["transformers"] = partial(_baseline_side, "transformers", TransformersLlama, settings)
    return sides


def _has_experts(data: Any) -> bool:
    if isinstance(data, dict):
        return data.get("kind") == "moe" or any(map(_has_experts, data.values()))
    return isinstance(data, list) and any(map(_has_experts, data))


def balanced_routing(settings: Settings) -> Settings:
    """The same model with experts assigned round-robin, so that each gets equally many tokens."""
    return decode(type(settings), _with_round_robin(encode(settings)))


def _with_round_robin(data: Any) -> Any:
    if isinstance(data, dict):
        if data.get("kind") == "moe":
            router = {"kind": "round_robin", "top_k": data["router"].get("top_k", 1)}
            return {**data, "router": router}
        return {key: _with_round_robin(item) for key, item in data.items()}
    return [_with_round_robin(item) for item in data] if isinstance(data, list) else data


def xscale_side(name: str, settings: Settings, steps: int) -> TrainingSide:
    """Training by xscale, as these settings have it."""
    parts = set_up(settings, read_rank_info())
    workload = Workload.of_parts(parts, steps)
    batches, losses = workload.batches, list[float]()

    def step(number: int) -> dict[str, float]:
        losses[:] = [parts.stepper.step(batches[number], parts.settings.optimizer.lr).loss]
        if parts.mesh.device.type == "cuda":
            torch.cuda.synchronize(parts.mesh.device)
        return parts.stepper.timer.flush()

    side = workload.side(name, step)
    return replace(
        side, last_loss=lambda: losses[-1] if losses else None, overload=lambda: overload(batches)
    )


def overload(batches: Sequence[Sequence[Batch]]) -> float | None:
    """Assignments of the busiest expert over the mean in the batches that were computed, the worst of the layers."""
    loads = [
        load_stats(value)["max"]
        for micro_batches in batches
        for batch in micro_batches
        if batch.tokens.forward.stats is not None
        for name, value in batch.tokens.forward.stats.means().items()
        if name.endswith("/load")
    ]
    return max(loads, default=None)


def collect(parts: RunParts, steps: int) -> list[list[Batch]]:
    """Read the micro-batches of the first steps, before anything is timed."""
    size = parts.settings.train.batch_size
    count = size // (parts.training.micro_batch * parts.training.ranks)
    stream = parts.training.loader.stream(parts.training.requests(0, size, steps))
    return [
        [parts.training.make(next(stream), step, size, Stats()) for _ in range(count)]
        for step in range(steps)
    ]


def dense_twin(settings: Settings) -> Settings:
    """The same model with each MoE layer replaced by one dense FFN of equal active FLOPs."""
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


def _same_modules_side(settings: Settings, steps: int) -> TrainingSide:
    """A hand-written loop: the same modules and torch's fused AdamW, without the engine."""
    workload = Workload.of(settings, steps)
    model: nn.Module = build_on_meta(settings, vocabulary_of(settings))
    materialize(model, settings.run.seed, str(workload.device), DTYPES[settings.precision.master])
    precision.apply(model, DTYPES[settings.precision.compute], DTYPES[settings.precision.master])

    def loss_of(batch: Batch) -> Tensor:
        loss: Tensor = model(batch.tokens, batch.targets, batch.source)
        return loss

    return _plain_side("same modules", workload, model, loss_of)


def _baseline_side(
    name: str, build: Callable[[LlamaSizes], nn.Module], settings: Settings, steps: int
) -> TrainingSide:
    """A model of another source, in float32 with autocast to the run's precision, compiled as a whole on a GPU."""
    sizes = llama_sizes(settings, vocabulary_of(settings))
    if name == "transformers" and find_spec("transformers") is None:
        raise ConfigError(
            "bench train", "transformers is not installed", "Run: pip install 'transformers>=5.0'"
        )
    workload = Workload.of(settings, steps)
    device = workload.device
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(settings.run.seed)
        model = build(sizes)
    model.to(device=device, dtype=DTYPES[settings.precision.master])
    compute = DTYPES[settings.precision.compute]
    call = torch.compile(model, dynamic=False) if device.type == "cuda" else model

    def loss_of(batch: Batch) -> Tensor:
        with torch.autocast(device.type, compute, enabled=compute != torch.float32):
            loss: Tensor = call(batch.tokens.ids, batch.targets)
        return loss

    return _plain_side(name, workload, model, loss_of)


def _plain_side(
    name: str, workload: Workload, model: nn.Module, loss_of: Callable[[Batch], Tensor]
) -> TrainingSide:
    """The loop of a plain PyTorch program: losses, backward, clipping, and torch's fused AdamW."""
    settings, device = workload.settings, workload.device
    config, losses = settings.optimizer, list[Tensor]()
    betas = (config.beta1, config.beta2) if isinstance(config, AdamW.Config) else (0.9, 0.95)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=betas, weight_decay=config.weight_decay, fused=True
    )
    model.train()

    def step(number: int) -> dict[str, float]:
        micro_batches = workload.batches[number]
        targets = sum(int(batch.weight) for batch in micro_batches)
        losses.clear()
        for batch in micro_batches:
            loss = loss_of(batch)
            (loss / targets).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach() / targets)
        torch.nn.utils.clip_grad_norm_(
            model.parameters(), settings.train.clip_grad_norm or float("inf")
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return {}

    return replace(
        workload.side(name, step), last_loss=lambda: float(sum(losses)) if losses else None
    )


def flops_6n(parts: RunParts) -> float:
    """FLOPs of a sample by the usual formula, 6 N T + 12 L H K T^2 (Chowdhery et al. 2022, appendix B).

    N is the number of active parameters in matmuls, and no key is taken for masked.
    """
    length = parts.settings.sample_tokens
    attention = sum(
        12.0 * module.query_channels * length * length
        for module in parts.model.modules()
        if isinstance(module, Attention)
    )
    return 6.0 * parts.model_size.multiplied * length + attention
