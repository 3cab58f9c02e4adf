"""What `xscale plan` takes for each recipe: `xscale bench plan`."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xscale.core.compose import configs_folder
from xscale.core.errors import EXIT_DONE, EXIT_TOO_LARGE

FOLDERS = ("run", "xformer")
"""Folders of the recipes that are planned where none is named."""


@dataclass(frozen=True)
class PlanCost:
    """Cost of the plan of a recipe, in a process of its own."""

    recipe: str
    seconds: float
    """On processors, start and imports included."""
    memory: float
    """Bytes that the process had resident at most."""
    outcome: str
    """`fits`, `does not fit`, `memory unknown`, or the end of what it said where it failed."""
    planned: float | None
    """Bytes of the rank that needs most, by the plan."""

    @property
    def failed(self) -> bool:
        return self.outcome not in OUTCOMES.values()


OUTCOMES = {True: "fits", False: "does not fit", None: "memory unknown"}


def all_recipes() -> list[Path]:
    """Return the files of all recipes of the tree."""
    return [
        file for folder in FOLDERS for file in sorted((configs_folder() / folder).glob("*.yaml"))
    ]


def cost_of_plan(recipe: Path, device: str, limit_seconds: float) -> PlanCost:
    """Plan a recipe in a process of its own, which ends after `limit_seconds` at the latest."""
    words = (sys.executable, "-m", "xscale", "plan", str(recipe), "--device", device, "--json")
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(words, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
        ends = threading.Timer(limit_seconds, process.kill)
        ends.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        finally:
            ends.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        answer, said = out.read(), err.read().decode(errors="replace").strip().splitlines()
    outcome, planned = said[-1] if said else f"exit status {process.returncode}", None
    if process.returncode < 0:
        outcome = f"ended by signal {-process.returncode} (the limit is {limit_seconds:g} s)"
    if process.returncode in (EXIT_DONE, EXIT_TOO_LARGE):
        plan = json.loads(answer)
        outcome = OUTCOMES[plan["fits"]]
        planned = plan.get("memory_bytes", {}).get("total")
    seconds = usage.ru_utime + usage.ru_stime
    return PlanCost(recipe.stem, seconds, usage.ru_maxrss * 1024.0, outcome, planned)


def format_costs(costs: Sequence[PlanCost]) -> str:
    """Format a table of the recipes, those that took longest first, and what most of them took."""
    lines = [f"{'recipe':<40}{'processor':>12}{'resident':>12}{'planned':>12}  outcome"]
    for cost in sorted(costs, key=lambda cost: -cost.seconds):
        planned = "" if cost.planned is None else f"{cost.planned / 1e9:.2f} GB"
        lines.append(
            f"{cost.recipe:<40}{cost.seconds:>10.1f} s{cost.memory / 1e9:>9.2f} GB{planned:>12}  {cost.outcome}"
        )
    failed = sum(cost.failed for cost in costs)
    if costs:
        lines.append(
            f"{len(costs)} plans: {max(cost.seconds for cost in costs):.1f} s of processor time and "
            f"{max(cost.memory for cost in costs) / 1e9:.2f} GB at most; {failed} failed"
        )
    return "\n".join(lines)
