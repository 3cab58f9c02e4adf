"""The operators that there are, found by their folders, and the implementations of each."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

from xscale_kernels.select import Implementation

FOLDER = Path(__file__).parent


def operators() -> tuple[str, ...]:
    """Names of the folders that have an op.py, in the order of the alphabet."""
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/op.py")))


def implementations(operator: str) -> tuple[Implementation, ...]:
    """What computes an operator, in the order in which they are tried."""
    found: tuple[Implementation, ...] = importlib.import_module(f"xscale_kernels.{operator}.op").IMPLEMENTATIONS
    return found


def unknown(named: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """What of `named` (operator -> implementation) is not there: operator -> (what is wrong, what there is)."""
    wrong = {}
    for operator, name in named.items():
        if operator not in operators():
            wrong[operator] = (f"there is no operator '{operator}'", f"There are: {', '.join(operators())}.")
            continue
        there = [each.name for each in implementations(operator)]
        if name not in there:
            wrong[operator] = (f"{operator} has no implementation '{name}'", f"There are: {', '.join(there)}.")
    return wrong
