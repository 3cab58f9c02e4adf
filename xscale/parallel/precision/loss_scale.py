"""Dynamic loss scaling (Micikevicius et al. 2018, section 3.2; Ott et al. 2019): float16 holds no small gradients.

The loss is multiplied by a scale before backward, so that gradients below 2^-24, the least number of float16, are not
rounded to zero. A step whose gradients overflow is skipped and lowers the scale; a number of steps without an overflow
doubles it. Scales are powers of 2: multiplying by one and dividing by it again changes no gradient in float32.
"""

import math
from dataclasses import dataclass

from xscale.core.errors import Problem
from xscale.core.requirements import at_least, change, take
from xscale.parallel.config import LossScaleConfig, PrecisionConfig

LARGEST = 2.0**40
"""The scale grows no further: gradients in master precision would overflow next."""


@dataclass(frozen=True)
class LossScale:
    """The scale of a step, a function of the overflows before it."""

    scale: float
    steps: int = 0
    """Steps without an overflow since the scale last changed."""

    def after(self, config: LossScaleConfig, *, overflow: bool) -> "LossScale":
        """Return the scale of the next step."""
        if overflow:
            return LossScale(max(self.scale / 2.0**config.backoff, config.minimum))
        if self.steps + 1 < config.growth_interval:
            return LossScale(self.scale, self.steps + 1)
        return LossScale(min(self.scale * 2, LARGEST))

    def overflows(self, config: LossScaleConfig, loss: float, grad_norm: float) -> bool:
        """Whether a step has an overflow that a lower scale may prevent. A loss is not scaled, so that one which is not
        finite is no such overflow."""
        return math.isfinite(loss) and not math.isfinite(grad_norm) and self.scale > config.minimum


def check(config: PrecisionConfig, path: str) -> list[Problem]:
    """List the problems of section `precision`."""
    scaling, where, problems = config.loss_scale, f"{path}.loss_scale", []
    if config.compute != "float16":
        if scaling == LossScaleConfig():
            return []
        what = f"{config.compute} has the range of float32, and its loss is not scaled"
        default = LossScaleConfig()
        changed = [
            key
            for key in LossScaleConfig.model_fields
            if getattr(scaling, key) != getattr(default, key)
        ]
        without = change(*[(f"{where}.{key}", getattr(default, key)) for key in changed])
        choices = without + take("float16", key=f"{path}.compute")
        return [Problem(where, what, choices=choices)]
    for key in ("initial", "minimum"):
        value = getattr(scaling, key)
        if math.frexp(value)[0] != 0.5 or value > LARGEST:
            what = f"{value:g} is no power of 2 up to 2^40"
            nearest = 2.0 ** min(round(math.log2(value)), 40)
            problems.append(Problem(f"{where}.{key}", what, choices=take(nearest)))
    if scaling.minimum > scaling.initial:
        what = f"the scale begins at {scaling.initial:g}, below its minimum of {scaling.minimum:g}"
        problems.append(at_least(f"{where}.initial", what, scaling.minimum))
    return problems
