"""Conformance of routers: who chooses, what it looks at, whether experts overflow, and what evens the load."""

from tests.conformance.checked import each_case
from xscale.conformance import router as suite
from xscale.conformance.check import Arguments, Check


@each_case(suite)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)
