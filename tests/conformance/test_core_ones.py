"""Values of ones give ones, by cores whose weights sum to 1: at all lengths, also where blocks are not full."""

from tests.conformance.checked import each_case
from xscale.conformance.attention import core_ones as suite
from xscale.conformance.check import Arguments, Check


@each_case(suite)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)
