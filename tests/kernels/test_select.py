"""select: the first usable implementation, or the named one, and the log of the choice."""

import logging
import re
from pathlib import Path

import pytest

from xscale_kernels.select import Implementation, LogOnce, UnusableError, choose, implementations, operators

FAST = Implementation("fast", "nowhere.fast", lambda width: None if width % 8 == 0 else "width is no multiple of 8")
SLOW = Implementation("slow", "nowhere.slow", lambda width: None)


def test_first_usable_in_order() -> None:
    assert choose("op", (FAST, SLOW), None, 16).implementation is FAST
    choice = choose("op", (FAST, SLOW), None, 3)
    assert choice.implementation is SLOW
    assert choice.refused == (("fast", "width is no multiple of 8"),)
    assert str(choice) == "op: slow (first usable; fast refused: width is no multiple of 8)"


def test_the_named_implementation_or_an_error_with_the_usable_ones() -> None:
    assert choose("op", (FAST, SLOW), "slow", 16).implementation is SLOW
    with pytest.raises(UnusableError, match=r"'fast' cannot run this call: width is no multiple of 8.*These can: slow"):
        choose("op", (FAST, SLOW), "fast", 3)
    with pytest.raises(UnusableError, match="no implementation 'apex'; there are: fast, slow"):
        choose("op", (FAST, SLOW), "apex", 3)
    with pytest.raises(UnusableError, match="no implementation can run"):
        choose("op", (FAST,), None, 3)


def test_the_documented_order_is_that_of_the_code() -> None:
    text = (Path(__file__).parents[2] / "kernels/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE)
    documented = {operator: re.findall(r"\w+", names) for operator, names in rows}
    assert documented == {each: [entry.name for entry in implementations(each)] for each in operators()}


def test_a_choice_is_logged_and_the_filter_passes_it_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="xscale_kernels"):
        choose("op", (FAST, SLOW), None, 3)
        choose("op", (FAST, SLOW), None, 3)
        choose("op", (FAST, SLOW), None, 8)
    assert [record.getMessage()[:8] for record in caplog.records] == ["op: slow", "op: slow", "op: fast"]
    once = LogOnce()
    assert [once.filter(record) for record in caplog.records] == [True, False, True]
