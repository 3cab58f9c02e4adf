"""The parallel plan: the steps that turn a single-device model on meta into this rank's shards of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from xscale.core.errors import Problem
from xscale.mesh import axes
from xscale.mesh.mesh import Mesh
from xscale.nn.module import unmet_needs
from xscale.parallel.config import ParallelConfig, PrecisionConfig
from xscale.parallel.plan_step import DTYPES, FillParameters, StepSettings
from xscale.parallel.shard import zero
from xscale.parallel.steps import STEPS


@dataclass(frozen=True)
class ParallelPlan:
    """Parallelism and precision that a recipe configures."""

    parallel: ParallelConfig
    precision: PrecisionConfig
    length: int = 0
    """Tokens of a sequence, for the cost of pipeline stages. 0: unknown."""

    @property
    def compute(self) -> torch.dtype:
        return DTYPES[self.precision.compute]

    @property
    def master(self) -> torch.dtype:
        return DTYPES[self.precision.master]

    def check(self, model: nn.Module | None, world: int) -> list[Problem]:
        """Return every problem on `world` ranks; `model` is on meta, or None when it could not be built."""
        settings = self.settings(world)
        problems = axes.check(self.parallel.mesh, world)
        for step in STEPS:
            problems += step.check(None, settings)
        if model is not None:
            problems += unmet_needs(model, self)
            for step in STEPS:
                problems += step.check(model, settings)
        return problems

    def estimate(
        self, model: nn.Module, world: int, micro_batches: int = 1
    ) -> dict[str, dict[str, object]]:
        """Estimate the costs of each step for a full model on meta: step name -> values."""
        settings = self.settings(world, micro_batches)
        estimates = {step.name: step.estimate(model, settings) for step in STEPS}
        return {name: values for name, values in estimates.items() if values}

    def apply(
        self,
        model: nn.Module,
        mesh: Mesh,
        seed: int,
        log: Callable[[str], None] = lambda line: None,
        *,
        draw_weights: bool = True,
    ) -> nn.Module:
        """Apply all steps to a model on meta; the result is on the mesh's device, with its initial weights.

        `log` gets one line for each step that did something. Without `draw_weights` the weights are NaN until they are
        read from a checkpoint.
        """
        from xscale.parallel.shard import sharded

        def fill(stage: nn.Module) -> None:
            sharded.materialize(stage, seed, mesh.device, self.master, draw_weights=draw_weights)

        return self.shard(model, mesh, fill, log)

    def shard(
        self,
        model: nn.Module,
        mesh: Mesh,
        fill: FillParameters,
        log: Callable[[str], None] = lambda line: None,
    ) -> nn.Module:
        """Apply all steps; `fill` gives each pipeline stage's parameters their storage."""
        settings = self.settings(mesh.degrees.world)
        for step in STEPS:
            model, line = step.apply(model, settings, mesh, fill)
            if line is not None:
                log(line)
        return model

    def set_gradient_sync(self, model: nn.Module, *, last: bool) -> None:
        """Set up FSDP before a micro-batch; `last` says whether it is the step's last."""
        zero.set_gradient_sync(model, self.parallel, last=last)

    def settings(self, world: int, micro_batches: int = 1) -> StepSettings:
        """Return what every step gets on `world` ranks, else on the fewest that the mesh fits."""
        fitting = axes.checkable_world(self.parallel.mesh, world)
        degrees = None if fitting is None else axes.resolve(self.parallel.mesh, fitting)
        return StepSettings(self.parallel, self.precision, degrees, self.length, micro_batches)


__all__ = ["DTYPES", "STEPS", "ParallelPlan"]
