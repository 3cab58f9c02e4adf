"""Benchmarks in several processes: relaunch under torchrun, and a report from rank 0."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def relaunch_under_torchrun(processes: int) -> int:
    """Run this command again in `processes` processes; return the exit status."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
    ]
    return subprocess.run([*torchrun, "-m", "xscale", *sys.argv[1:]], check=False).returncode


def report_from_rank0(
    results: dict[str, Any],
    format_table: Callable[[dict[str, Any]], str],
    *,
    as_json: bool,
    record: Path | None,
) -> None:
    """Print the results as JSON or as a table, and write them to `record`; only on the rank with `first` true."""
    if not results.pop("first"):
        return
    if record is not None:
        record.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results) if as_json else format_table(results), flush=True)
