"""A step of a parallel plan: what it checks, estimates and applies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from xscale.core.errors import Problem
from xscale.mesh.axes import Degrees
from xscale.mesh.mesh import Mesh
from xscale.parallel.config import ParallelConfig, PrecisionConfig

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class StepSettings:
    """Settings that every step gets."""

    parallel: ParallelConfig
    precision: PrecisionConfig
    degrees: Degrees | None
    """None: the mesh has problems, so that nothing is known of its axes."""
    length: int = 0
    """Tokens of a sequence; 0: unknown."""
    micro_batches: int = 1
    """Micro-batches of a step on each rank, for estimates."""

    @property
    def compute(self) -> torch.dtype:
        return DTYPES[self.precision.compute]

    @property
    def master(self) -> torch.dtype:
        return DTYPES[self.precision.master]


FillParameters = Callable[[nn.Module], None]
"""Gives the parameters of a model on meta their storage."""


class Step(Protocol):
    """One step of a plan."""

    name: str

    @property
    def checks(self) -> bool:
        """Whether the step has a check of its own."""
        ...

    def check(self, model: nn.Module | None, settings: StepSettings) -> list[Problem]:
        """Return the problems of the settings (`model` None), or those with a model on meta."""
        ...

    def estimate(self, model: nn.Module, settings: StepSettings) -> dict[str, object]:
        """Estimate the step's costs for a full model on meta; empty where it has none or they are unknown."""
        ...

    def apply(
        self, model: nn.Module, settings: StepSettings, mesh: Mesh, fill: FillParameters
    ) -> tuple[nn.Module, str | None]:
        """Apply the step; return the model and the line to log, None when there was nothing to do."""
        ...


class _Step:
    """A step that checks and estimates nothing."""

    @property
    def checks(self) -> bool:
        return type(self).check is not _Step.check

    def check(self, model: nn.Module | None, settings: StepSettings) -> list[Problem]:
        return []

    def estimate(self, model: nn.Module, settings: StepSettings) -> dict[str, object]:
        return {}
