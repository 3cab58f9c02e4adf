"""Cores that say they drop attention weights do, and the others are not asked to: no core is named here."""

import pytest

from tests.conformance.checked import Marks, each_case
from xscale.conformance.attention import core_dropout as suite
from xscale.conformance.check import Arguments, Check


def marks(check: Check, arguments: Arguments) -> Marks:
    return [pytest.mark.sampled(2)] if check is suite.what_is_kept_makes_up_for_what_is_dropped else []


@each_case(suite, marks=marks)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)
