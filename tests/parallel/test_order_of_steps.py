"""The page on the order of the parallel steps says what the code does, and another order gives other numbers."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import nn

from tests.distributed import Pool, RankError
from tests.parallel.against_one import Found, alone, built, compare, trained
from tests.parallel.models import MIXTURE
from tests.parallel.test_outside_parts import MODEL, plugin
from xscale.nn.module import Module, seams_of
from xscale.parallel import plan
from xscale.parallel.plan_step import Step
from xscale.parallel.steps import STEPS

PAGE = (Path(__file__).parents[2] / "docs/architecture/order-of-steps.md").read_text(encoding="utf-8")
BOTH = {
    "mesh": {"tp": 2, "cp": 2, "ep": 2, "tp_in_experts": False},
    "tensor": {"sequence": True},
    "context": {"style": "ulysses"},
}


def rows(marker: str) -> dict[str, str]:
    """The two columns of a table of the page."""
    match = re.search(rf"<!-- {marker} -->\n(.*?)<!-- /{marker} -->", PAGE, re.DOTALL)
    assert match
    return dict([cell.strip(" `") for cell in line.strip("|").split("|")] for line in match[1].splitlines()[2:])


def test_the_page_has_the_steps_in_their_order() -> None:
    assert list(rows("order")) == [step.name for step in STEPS]


def substituted() -> dict[str, list[str]]:
    """Seam -> the steps that substitute there, the last first, of those at which more than one does."""
    seen: dict[str, list[str]] = {}
    step = ""

    def set_attribute(module: Module, name: str, value: Any) -> None:
        if step and name in seams_of(module) and step not in seen.setdefault(name, []):
            seen[name].insert(0, step)
        nn.Module.__setattr__(module, name, value)

    class Watched:
        def __init__(self, of: Step) -> None:
            self.of = of

        def __getattr__(self, name: str) -> Any:
            return getattr(self.of, name)

        def apply(self, *inputs: Any) -> Any:
            nonlocal step
            step = self.of.name
            try:
                return self.of.apply(*inputs)
            finally:
                step = ""

    watched = tuple(Watched(of) for of in STEPS)
    with plugin(), patch.object(Module, "__setattr__", set_attribute), patch.object(plan, "STEPS", watched):
        built(MODEL, BOTH)
    return {name: steps for name, steps in seen.items() if len(steps) > 1}


def test_the_page_says_which_substitutes_stand_in_which(pool: Pool) -> None:
    found = pool.run(substituted, 4)[0]
    assert {name: ", ".join(steps) for name, steps in found.items()} == rows("nesting")


def trained_in_order(first: str, second: str, parallel: dict[str, Any]) -> Found:
    """Train with two steps in each other's place."""
    names = [step.name for step in STEPS]
    at, behind = names.index(first), names.index(second)
    swapped = list(STEPS)
    swapped[at], swapped[behind] = swapped[behind], swapped[at]
    with patch.object(plan, "STEPS", tuple(swapped)):
        return trained(MIXTURE, parallel)


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "second", "parallel"),
    [
        ("precision", "tensor", {"mesh": {"tp": 2}}),
        ("sharding", "tensor", {"mesh": {"tp": 2}}),
        ("context", "tensor", BOTH),
        ("expert", "tensor", {"mesh": {"tp": 2, "ep": 2, "tp_in_experts": False}}),
    ],
    ids=["precision", "sharding", "context", "expert"],
)
def test_another_order_gives_other_numbers_or_none(
    first: str, second: str, parallel: dict[str, Any], pool: Pool
) -> None:
    ranks = parallel["mesh"]["tp"] * parallel["mesh"].get("cp", 1)
    one = alone(pool, MIXTURE)
    with pytest.raises((AssertionError, RankError)):
        compare(one, pool.run(trained_in_order, ranks, first, second, parallel))
