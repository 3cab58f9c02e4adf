"""Mixers on large inputs in low precision: finite wherever float64 is, and as near to it as rounding allows."""

import pytest

from tests.conformance.checked import Marks, each_case
from xscale.conformance.attention import mixer_extremes as suite
from xscale.conformance.check import Arguments, Check


def marks(check: Check, arguments: Arguments) -> Marks:
    return [pytest.mark.sampled(4) if check is suite.large_inputs_are_near_float64 else pytest.mark.nightly]


@each_case(suite, marks=marks)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)
