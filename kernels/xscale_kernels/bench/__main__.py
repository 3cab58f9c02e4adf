"""python -m xscale_kernels.bench OPERATOR [--device cpu] [--against eager,torch] [--record]"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from xscale_kernels.bench.report import OPERATORS, record, run, table


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table of one operator; with --record also writes it to kernels/results/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operator", choices=OPERATORS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--against", default="eager")
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args(arguments)
    rows = run(given.operator, given.device, given.against.split(","))
    print(table(rows))
    if given.record:
        print(record(rows, given.device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
