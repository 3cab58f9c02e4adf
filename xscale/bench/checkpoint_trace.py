"""Step times of a real run through its asynchronous saves: what a save costs the steps beside it."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xscale.core.config import decode, encode
from xscale.core.errors import EXIT_DONE, ConfigError, FaultError
from xscale.observe.metrics import METRICS_FILE, read
from xscale.settings.settings import Settings
from xscale.train.run import train

WARMUP = 3
"""First steps, which compile and connect."""


@dataclass(frozen=True)
class StepTrace:
    """Seconds between the ends of consecutive steps."""

    seconds: tuple[float, ...]
    """All steps but the first ones."""
    before_save: tuple[float, ...]
    """Those before the first save."""
    through_saves: tuple[float, ...]
    """Those from the first save on, while the tensors are copied and written."""

    @property
    def median(self) -> float:
        """Median without a save."""
        return statistics.median(self.before_save)

    @property
    def longest(self) -> float:
        """Longest step through the saves."""
        return max(self.through_saves)

    @property
    def longest_ratio(self) -> float:
        """The longest step through the saves over the median without one."""
        return self.longest / self.median

    @property
    def overhead(self) -> float:
        """Fraction that the saves add to a step on average."""
        return statistics.mean(self.through_saves) / statistics.mean(self.before_save) - 1


def trace_steps(settings: Settings, steps: int, every: int) -> StepTrace:
    """Train for `steps` steps with a save each `every` steps; return the times. ConfigError for too few of them."""
    if every < WARMUP + 3 or steps < 2 * every:
        what = f"{steps} steps with a save each {every} do not show steps before and after one"
        raise ConfigError(
            "--steps", what, f"Take {WARMUP + 3} or more for --every, and twice that for --steps."
        )
    data = encode(settings)
    data["train"] |= {
        "steps": steps + every,
        "stop_after": steps,
        "eval_every": 0,
        "baseline": False,
    }
    data["checkpoint"] |= {"every_steps": every, "keep_last": 1}
    data["observe"] |= {"every_steps": 1}
    data["run"] |= {"fresh": True}
    status = train(decode(type(settings), data))
    rows = [row for row in read(Path(settings.run.dir) / METRICS_FILE) if "step_seconds" in row]
    if len(rows) < steps:
        raise FaultError(
            f"the run ended with status {status} (not {EXIT_DONE}) after {len(rows)} of {steps} steps"
        )
    return trace_of([row["seconds"] for row in rows], every)


def trace_of(ends: Sequence[float], every: int) -> StepTrace:
    """Return the trace of steps that ended at these seconds."""
    seconds = tuple(end - begin for begin, end in itertools.pairwise(ends))
    # The first difference is that of step 2. The save after step `every` begins within the step that follows it.
    first_save = every - 1
    return StepTrace(seconds[WARMUP:], seconds[WARMUP:first_save], seconds[first_save:])


def show_trace(trace: StepTrace, every: int) -> str:
    """Format the trace as text."""
    through = sorted(trace.through_saves)
    return "\n".join(
        [
            f"step times, a save each {every} steps",
            f"  without a save: p50 {trace.median:.3f} s, max {max(trace.before_save):.3f} s",
            f"  through saves:  p50 {statistics.median(through):.3f} s, max {trace.longest:.3f} s "
            f"({trace.longest_ratio:.2f}x of the p50 without one), {trace.overhead:+.1%} on average",
            "  steps: " + " ".join(f"{seconds:.3f}" for seconds in trace.seconds),
        ]
    )
