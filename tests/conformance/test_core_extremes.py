"""Cores on large queries and keys in low precision: finite wherever float64 is, and as near to it as rounding allows.

The bound is a multiple of what float64 changes by when its inputs are rounded differently, so that it holds for cores
that choose keys too, whose choice a rounding may turn.
"""

import pytest

from tests.conformance.checked import Marks, each_case
from xscale.conformance.attention import core_extremes as suite
from xscale.conformance.check import Arguments, Check


def marks(check: Check, arguments: Arguments) -> Marks:
    return [pytest.mark.sampled(4) if check is suite.large_scores_are_near_float64 else pytest.mark.nightly]


@each_case(suite, marks=marks)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)
