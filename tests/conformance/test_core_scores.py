"""Conformance of attention cores that hand their scores to the next block. No core is named here."""

from tests.conformance.checked import each_case
from xscale.conformance.attention import core_scores as suite
from xscale.conformance.check import Arguments, Check


@each_case(suite)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)
