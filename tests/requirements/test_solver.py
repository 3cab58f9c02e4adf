"""The solver of requirements: what it advises is accepted, with what else it takes, and circles are not advised."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from xscale.core.errors import Problem
from xscale.core.requirements import UNKNOWN, Facts, KeyNeed, RequirementSet, change, reads, take
from xscale.requirements.solver import NOTHING, solve

ROOTS = ("settings", "order", "mask", "width", "heads")
GIVEN: dict[str, Any] = {"order": "causal", "mask": True, "width": 6, "heads": 4, "settings": None}


def heads_divide(width: int, heads: int) -> Iterator[Problem]:
    if width % heads:
        fitting = [number for number in range(1, width + 1) if width % number == 0]
        yield Problem("heads", f"{heads} does not divide {width}", choices=take(*fitting, 5) + take(8, key="width"))


def order_has_a_mask(order: str, mask: bool) -> Iterator[Problem]:
    if order == "causal" and not mask:
        yield Problem("order", "a causal order needs a mask", choices=take("both") + take(True, key="mask"))


def few_heads_have_no_mask(heads: int, mask: bool) -> Iterator[Problem]:
    if heads == 2 and mask:
        yield Problem("mask", "two heads have none", choices=take(False) + take(4, key="heads"))


def solved(*requirements: Callable[..., Any], **values: Any) -> list[Problem]:
    rules = RequirementSet(ROOTS, (), requirements)
    given = {**GIVEN, **values}
    before = rules.facts(given)

    def changed(edits: tuple[tuple[str, Any], ...]) -> Facts | None:
        return None if ("width", 0) in edits else before.changed({**given, **dict(edits)})

    return solve(before, changed)


def test_a_value_that_is_refused_is_not_advised() -> None:
    (problem,) = solved(heads_divide)
    assert problem.advice == "Take 1, 2, 3 or 6, or width=8."
    assert problem.choices[0].edits == (("heads", 1),)


def test_a_change_is_named_with_what_else_it_takes() -> None:
    """Two heads may have no mask, and a causal order without one is refused: both orders go with it."""
    (problem,) = solved(heads_divide, few_heads_have_no_mask, order_has_a_mask, width=2)
    assert problem.advice == "Take 1, or width=8."
    (problem,) = solved(few_heads_have_no_mask, order_has_a_mask, heads=2)
    assert problem.advice == "Take false with order=both, or heads=4."


def test_a_circle_is_not_advised() -> None:
    def needs_a(mask: bool) -> Iterator[Problem]:
        if mask:
            yield Problem("mask", "a", choices=take(False))

    def needs_b(mask: bool) -> Iterator[Problem]:
        if not mask:
            yield Problem("mask", "b", choices=take(True))

    for mask in (True, False):
        (problem,) = solved(needs_a, needs_b, mask=mask)
        assert (problem.choices, problem.advice) == ((), NOTHING)


def test_a_value_that_the_schema_refuses_is_not_advised() -> None:
    def narrow(width: int) -> Iterator[Problem]:
        if width > 4:
            yield Problem("width", "is wide", "See the paper.", choices=take(0, 2))

    (problem,) = solved(narrow)
    assert str(problem) == "width: is wide. Take 2. See the paper."


def test_what_reads_a_refused_section_is_not_required() -> None:
    assert solved(heads_divide, width=UNKNOWN) == []
    assert len(solved(heads_divide, few_heads_have_no_mask, width=UNKNOWN, heads=2)) == 1


def test_only_what_reads_a_changed_section_is_computed_again() -> None:
    calls: list[str] = []

    def double(width: int) -> int:
        calls.append("double")
        return 2 * width

    @reads("mask")
    def wide(settings: Any, double: int) -> list[Problem]:
        calls.append("wide")
        return []

    rules = RequirementSet(ROOTS, (double,), (wide,))
    facts = rules.facts(GIVEN)
    assert facts.problems() == {"wide": ()}
    assert facts.changed({**GIVEN, "settings": 1, "heads": 8}).problems() == {"wide": ()}
    assert calls == ["double", "wide"]
    facts.changed({**GIVEN, "settings": 1, "mask": False}).problems()
    assert calls == ["double", "wide", "wide"]


def test_a_choice_of_several_keys_is_said_with_all_of_them() -> None:
    def tall(heads: int, width: int) -> Iterator[Problem]:
        if heads > width // 2:
            choices = change(("heads", 1), ("width", 4)) + change(("heads", 2), ("width", 8))
            yield Problem("heads", "is tall", choices=choices)

    (problem,) = solved(tall)
    assert problem.advice == "Take heads=1 and width=4, or heads=2 and width=8."


@pytest.mark.parametrize(
    ("instead", "key"), [((".norm", None), "model.stack.norm"), ((".", None), "model.stack"), (("width", 8), "width")]
)
def test_a_need_is_met_by_a_value_or_by_leaving_out_the_part(instead: tuple[str, Any], key: str) -> None:
    class Settings:
        heads = 4

    (problem,) = KeyNeed("heads", (1,), "why", (instead,)).problems(Settings(), "model.stack")
    assert [choice.edits[0] for choice in problem.choices] == [("", 1), (key, instead[1])]
    assert KeyNeed("heads", (4,), "why").problems(Settings(), "model.stack") == []
