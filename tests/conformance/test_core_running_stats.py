"""Cores with `running_stats`: `update_state` moves parameters without a gradient. No core is named here."""

import pytest

from tests.conformance.checked import each_case
from xscale.conformance.attention import core_running_stats as suite
from xscale.conformance.check import Arguments, Check
from xscale.nn.attention.core import CORES, Core


@each_case(suite)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)


def test_a_core_that_forgets_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = next(entry for entry in CORES if entry.traits.running_stats)
    monkeypatch.setattr(entry.part, "update_state", Core.update_state)
    with pytest.raises(AssertionError, match="update_state changes nothing"):
        suite.the_state_follows_the_tokens(entry)
