"""The checks of a suite as cases of a test: each with every part of its family that it is for."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.families import family
from xscale.conformance.check import Arguments, Check, checks_of

Marks = list[pytest.MarkDecorator]


def each_case(
    *suites: ModuleType, marks: Callable[[Check, Arguments], Marks] = lambda check, arguments: []
) -> pytest.MarkDecorator:
    """Run a test once for each case of the suites, as its arguments `check` and `arguments`."""
    cases: list[Any] = [
        pytest.param(check, arguments, id=f"{check.__name__}-{name}", marks=marks(check, arguments))
        for suite in suites
        for check in checks_of(suite)
        for entry in family(check.family)
        for name, arguments in check.cases(entry)
    ]
    assert cases, "no part of the family has a case"
    return pytest.mark.parametrize(("check", "arguments"), cases)
