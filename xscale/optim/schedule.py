"""Learning-rate schedules, pure functions of the step: `constant`, `inverse_sqrt`, `cosine` and `wsd`."""

import math
from dataclasses import dataclass
from typing import Any

from xscale.core import config as schema
from xscale.core.config import Fraction, NonNegativeInt
from xscale.core.errors import Problem
from xscale.core.registry import Family
from xscale.core.requirements import at_most


@dataclass(frozen=True)
class ScheduleTraits:
    """Properties of a schedule."""

    bounded: bool
    """Depends on the total number of steps; otherwise training can be extended at will."""


class Schedule:
    """Built as `Schedule(config, steps)`."""

    class Config(schema.Config):
        warmup_steps: NonNegativeInt = 100
        """Steps over which the learning rate rises linearly from 0."""

    def __init__(self, config: Any, steps: int) -> None:
        self.config = config
        self.steps = steps

    @classmethod
    def check(cls, config: Any, steps: int, path: str) -> list[Problem]:
        """List the problems of the schedule over `steps` steps."""
        return []

    def factor(self, step: int) -> float:
        """Multiplier of the peak learning rate at `step`, counted from 1."""
        warmup = self.config.warmup_steps
        return min(1.0, step / warmup) if step < warmup else self.after_warmup(step)

    def after_warmup(self, step: int) -> float:
        """Multiplier after warm-up."""
        raise NotImplementedError


def fitting_warmup(warmup_steps: int, steps: int) -> int:
    """Return the warm-up of a run that was shortened to `steps`: a tenth of it where `warmup_steps` do not fit.

    A run of one step is a trial of something else and keeps its warm-up.
    """
    return warmup_steps if warmup_steps < steps or steps <= 1 else max(1, steps // 10)


SCHEDULES = Family("schedule", ScheduleTraits, Schedule)


@SCHEDULES.register("constant", traits=ScheduleTraits(bounded=False))
class Constant(Schedule):
    """Warm-up, then the peak learning rate."""

    def after_warmup(self, step: int) -> float:
        return 1.0


@SCHEDULES.register("inverse_sqrt", traits=ScheduleTraits(bounded=False))
class InverseSqrt(Schedule):
    """Vaswani et al. 2017, equation 3: after warm-up, the inverse square root of the step."""

    def after_warmup(self, step: int) -> float:
        return float((max(1, self.config.warmup_steps) / max(1, step)) ** 0.5)


@SCHEDULES.register("cosine", traits=ScheduleTraits(bounded=True))
class Cosine(Schedule):
    """Loshchilov and Hutter 2017: after warm-up, a half cosine down to `min_lr_ratio` of the peak."""

    class Config(Schedule.Config):
        renamed = {"floor": "min_lr_ratio"}
        min_lr_ratio: Fraction = 0.1
        """Learning rate of the last step over the peak learning rate."""

    def after_warmup(self, step: int) -> float:
        warmup, floor = self.config.warmup_steps, self.config.min_lr_ratio
        done = min(1.0, (step - warmup) / max(1, self.steps - warmup))
        return float(floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))


@SCHEDULES.register("wsd", traits=ScheduleTraits(bounded=True))
class Wsd(Schedule):
    """Hu et al. 2024 (MiniCPM): warm-up, a stable plateau, and a decay at the end."""

    class Config(Schedule.Config):
        renamed = {"floor": "min_lr_ratio"}
        decay_steps: NonNegativeInt = 1000
        """Steps of the linear decay at the end."""
        min_lr_ratio: Fraction = 0.0
        """Learning rate of the last step over the peak learning rate."""

    @classmethod
    def check(cls, config: Config, steps: int, path: str) -> list[Problem]:
        problems = super().check(config, steps, path)
        if config.warmup_steps + config.decay_steps > steps:
            what = f"warmup_steps={config.warmup_steps} + decay_steps={config.decay_steps} exceeds train.steps={steps}"
            longest = max(0, steps - config.warmup_steps)
            problems.append(at_most(f"{path}.decay_steps", what, longest))
        return problems

    def after_warmup(self, step: int) -> float:
        left = max(0, self.steps - step)
        decay, floor = self.config.decay_steps, self.config.min_lr_ratio
        return 1.0 if left >= decay else float(floor + (1 - floor) * left / decay)
