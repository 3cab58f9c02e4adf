"""Every source: what its traits promise, and what all of them do."""

from pathlib import Path

import pytest

from tests.conformance.checked import Marks, each_case
from xscale.conformance import source as suite
from xscale.conformance.check import Arguments, Check


def marks(check: Check, arguments: Arguments) -> Marks:
    return [pytest.mark.long, pytest.mark.sampled(3)] if check is suite.what_is_bounded_never_holds_the_corpus else []


@each_case(suite, marks=marks)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments, tmp_path: Path) -> None:
    check.run(arguments, tmp_path)
