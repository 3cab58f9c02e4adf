"""Conformance of attention cores: each trait, held on every core that declares it. No core is named here."""

from tests.conformance.checked import each_case
from xscale.conformance.attention import core as suite
from xscale.conformance.check import Arguments, Check


@each_case(suite)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)
