"""Peak memory of training steps beside the plan's prediction: `xscale bench memory`."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from xscale.bench.harness.timing import peak_bytes
from xscale.bench.train_sides import collect
from xscale.core.errors import ConfigError
from xscale.measure.device import DEVICES
from xscale.mesh.environment import read_rank_info
from xscale.mesh.mesh import leave_process_group
from xscale.planning.plan import Hardware, plan
from xscale.run.parts import device_of
from xscale.settings.settings import Settings
from xscale.train.setup import set_up

STEPS = 2
"""The second step has the optimizer's states from its beginning."""


@dataclass(frozen=True)
class MemoryComparison:
    """Bytes of tensors at the peak of a training step."""

    predicted: float
    """By the plan, without its allowances for the allocator and the CUDA context."""
    measured: float
    """Allocated by torch."""
    reserved: float | None
    """Reserved by torch's allocator, on a GPU."""
    of_driver: float | None
    """Memory in use by the driver's count beyond that, on a GPU: the context, cuBLAS and compiled code."""
    predicted_total: float
    """By the plan with its allowances."""

    @property
    def ratio(self) -> float:
        """Predicted over measured; below 1 a run may not fit that was said to."""
        return self.predicted / self.measured


def device_name(device: torch.device) -> str:
    """Return the name of this device in the plan's table; ConfigError for a GPU that is not in it."""
    if device.type == "cpu":
        return "cpu"
    full_name = torch.cuda.get_device_name(device).lower()
    for name in DEVICES:
        if name in full_name:
            return name
    raise ConfigError(
        "bench memory",
        f"{full_name} is not in the table of devices",
        f"It has {', '.join(DEVICES)}.",
    )


def compare_memory(settings: Settings) -> MemoryComparison:
    """Plan the run on one device, train two steps of it there, and return both peaks."""
    device = device_of(settings, read_rank_info())
    planned = plan(settings, 1, Hardware(device=device_name(device)))
    if planned.get("unknown"):
        raise ConfigError("bench memory", f"the plan cannot simulate a step: {planned['unknown']}")
    kinds = planned["memory_bytes"]
    allowances = sum(kinds[name] for name in ("slack", "runtime", "communicators"))
    predicted = kinds["total"] - allowances
    free_before = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    measured = peak_bytes(lambda: _train(settings), device.type)
    reserved = of_driver = None
    if device.type == "cuda":
        reserved = float(torch.cuda.max_memory_reserved(device))
        in_use = free_before - torch.cuda.mem_get_info(device)[0]
        of_driver = float(in_use - torch.cuda.memory_reserved(device))
        torch.cuda.empty_cache()
    return MemoryComparison(predicted, float(measured), reserved, of_driver, kinds["total"])


def _train(settings: Settings) -> None:
    """Set up and take the steps; nothing stays."""
    try:
        parts = set_up(settings, read_rank_info())
        for batches in collect(parts, STEPS):
            parts.stepper.step(batches, settings.optimizer.lr)
        if parts.mesh.device.type == "cuda":
            torch.cuda.synchronize(parts.mesh.device)
        del parts
    finally:
        leave_process_group()
        gc.collect()


def show(comparisons: Sequence[tuple[str, MemoryComparison]]) -> str:
    """Format the comparisons, with the spread of their ratios."""
    lines = [f"{'':<40}{'predicted':>12}{'measured':>12}{'ratio':>8}"]
    for name, row in comparisons:
        lines.append(
            f"{name:<40}{row.predicted / 1e9:>9.2f} GB{row.measured / 1e9:>9.2f} GB{row.ratio:>8.3f}"
        )
    ratios = sorted(row.ratio for _, row in comparisons)
    if ratios:
        below = sum(ratio < 1 for ratio in ratios)
        middle = ratios[len(ratios) // 2]
        lines.append(
            f"predicted / measured: min {ratios[0]:.3f}, median {middle:.3f}, max {ratios[-1]:.3f}; "
            f"{below} of {len(ratios)} below 1.0"
        )
    return "\n".join(lines)
