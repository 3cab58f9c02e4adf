"""python -m xscale_kernels.bench OPERATOR|ops [--device cpu] [--against eager,torch] [--plot DIR] [--record]"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from xscale_kernels.bench.plot import plot
from xscale_kernels.bench.report import ROOT, NotGreenError, name_of, record, run, table
from xscale_kernels.operators import operators

FAULT, USER = 1, 2


def parser() -> argparse.ArgumentParser:
    """What may be asked for."""
    asked = argparse.ArgumentParser("xscale bench", description="Operators beside their baselines, after their tests.")
    asked.add_argument("operator", choices=[*operators(), "ops"], metavar="OPERATOR", help=", ".join(operators()) + "; "
                       "ops: each in turn")  # fmt: skip
    asked.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    asked.add_argument(
        "--against",
        default="eager",
        help="baselines, the first of which speed-ups are given over: eager, torch, apex, sdpa, flex, or any other way",
    )
    asked.add_argument("--plot", metavar="DIR", type=Path, help="write plots of time, memory and share of the ceiling")
    asked.add_argument("--record", action="store_true", help="write the numbers to kernels/results")
    asked.add_argument("--into", metavar="DIR", type=Path, default=ROOT / "kernels/results", help="another folder")
    return asked


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table for each operator. Status 1 where an operator's tests are red, 2 for what cannot be asked."""
    asked = parser().parse_args(arguments)
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: this machine has no GPU that torch can use. Take cpu.", file=sys.stderr)
        return USER
    status = 0
    for operator in operators() if asked.operator == "ops" else (asked.operator,):
        try:
            _one(operator, asked)
        except NotGreenError as error:
            print(error, file=sys.stderr)
            status = status or FAULT
        except ValueError as error:
            print(f"--against: {error}", file=sys.stderr)
            return USER
    return status


def _one(operator: str, asked: argparse.Namespace) -> None:
    rows = run(operator, asked.device, asked.against.split(","))
    against = ", ".join(dict.fromkeys(row.against for row in rows))
    print(f"{operator} on {name_of(asked.device)}, forward and backward, against {against}")
    print(table(rows), flush=True)
    if asked.record:
        print(record(rows, asked.device, asked.into))
    if asked.plot is not None:
        for file in plot(rows, asked.plot, name_of(asked.device)):
            print(file)


if __name__ == "__main__":
    sys.exit(main())
