"""xscale bench OPERATOR|ops|parts [--device cpu] [--against eager,torch] [--plot DIR] [--record]"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from xscale.bench.harness.machine import ROOT, BenchDevice
from xscale.bench.operators.parts import part_times
from xscale.bench.operators.plot import plot
from xscale.bench.operators.report import FailedTestsError, name_of, record, run, table
from xscale.core.errors import EXIT_DONE, EXIT_FAULT
from xscale_kernels.select import operators


def parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    built = argparse.ArgumentParser(
        "xscale bench", description="Operators against baselines, tests first."
    )
    choices = [*operators(), "ops", "parts"]
    meaning = "ops: all of them; parts: parts of operators that no case shows by itself, as JSON"
    built.add_argument(
        "operator", choices=choices, metavar="OPERATOR", help=f"{', '.join(operators())}; {meaning}"
    )
    built.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    built.add_argument(
        "--against",
        default="eager",
        help="baselines: eager, torch, apex, sdpa, flex or an implementation; speed-ups are over the first",
    )
    built.add_argument(
        "--plot", metavar="DIR", type=Path, help="plot time, memory and fraction of the ceiling"
    )
    built.add_argument("--record", action="store_true", help="write the numbers to kernels/results")
    built.add_argument(
        "--into",
        metavar="DIR",
        type=Path,
        default=ROOT / "kernels/results",
        help="folder of --record",
    )
    return built


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each operator. Return 1 if an operator's tests fail; ConfigError for invalid arguments."""
    arguments = parser().parse_args(argv)
    if arguments.operator == "parts":
        print(json.dumps(part_times()))
        return EXIT_DONE
    BenchDevice.of(arguments.device, "float32")
    status = EXIT_DONE
    for operator in operators() if arguments.operator == "ops" else (arguments.operator,):
        try:
            _bench_operator(operator, arguments)
        except FailedTestsError as error:
            print(error, file=sys.stderr)
            status = EXIT_FAULT
    return status


def _bench_operator(operator: str, arguments: argparse.Namespace) -> None:
    rows = run(operator, arguments.device, arguments.against.split(","))
    against = ", ".join(dict.fromkeys(row.against for row in rows))
    print(f"{operator} on {name_of(arguments.device)}, forward and backward, against {against}")
    print(table(rows), flush=True)
    if arguments.record:
        print(record(rows, arguments.device, arguments.into))
    if arguments.plot is not None:
        for file in plot(rows, arguments.plot, name_of(arguments.device)):
            print(file)
