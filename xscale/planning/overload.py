"""Overload of the busiest expert-parallel rank: the rows of its experts over the mean over the ranks."""

import math
from dataclasses import dataclass

from xscale.core.errors import ConfigError


@dataclass(frozen=True)
class Overload:
    """Overload factor of each mixture in a plan, and where it is from."""

    factor: float = 1.0
    """1: balanced; `ep`: all rows on one rank."""
    source: str | None = None
    """Words for the reader of the plan; None: a balanced load is assumed."""

    def check(self, option: str, ep: int) -> None:
        """ConfigError for the option's factor if no rank of `ep` can have it."""
        if not (math.isfinite(self.factor) and self.factor >= 1):
            what = f"must be at least 1, got {self.factor:g}: the busiest rank has no fewer rows than the mean"
            raise ConfigError(option, what, "1 is balanced, as without the option.")
        if self.factor > ep == 1:
            what = "parallel.mesh.ep is 1, so that no rank has more rows than another"
            raise ConfigError(option, what, f"Set parallel.mesh.ep above 1, or omit {option}.")
        if self.factor > ep:
            what = f"{self.factor:g} is more than ep={ep}, at which one rank has all rows"
            raise ConfigError(option, what, f"Take 1 to {ep}.")


BALANCED = Overload()
