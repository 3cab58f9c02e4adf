"""The cost of a recipe's plan, and what is said where it fails."""

from pathlib import Path

import pytest

from xscale.bench.plans import PlanCost, all_recipes, cost_of_plan, format_costs

SMALL = """
model: {kind: decoder, width: 32, stack: {depth: 1, block: {mixer: {kind: attention, heads: 2}}}}
data: {tokenizer: {kind: byte}, sequence_length: 32}
"""


def test_all_recipes_of_the_tree_are_planned() -> None:
    names = [file.stem for file in all_recipes()]
    assert {"quickstart", "gpt_oss_20b", "bigbird"} <= set(names)
    assert len(names) > 150


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "limit", "outcome"),
    [
        (SMALL, 300.0, "fits"),
        ("model: {kind: decodr}", 300.0, "decodr"),
        (SMALL, 0.01, "ended by signal 9 (the limit is 0.01 s)"),
    ],
    ids=["fits", "refused", "too-slow"],
)
def test_a_plan_is_measured_in_a_process_of_its_own(text: str, limit: float, outcome: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    cost = cost_of_plan(tmp_path / "recipe.yaml", "h100", limit)
    assert outcome in cost.outcome
    assert cost.failed is (outcome != "fits")
    assert (cost.planned is None) is cost.failed
    assert cost.memory > 0


def test_the_table_has_the_longest_first_and_counts_what_failed() -> None:
    costs = [PlanCost("a", 2.0, 3e8, "fits", 1.5e9), PlanCost("b", 7.0, 4e8, "no such part", None)]
    first, second, third, last = format_costs(costs).splitlines()
    assert first.split() == ["recipe", "processor", "resident", "planned", "outcome"]
    assert [second[0], third[0]] == ["b", "a"]
    assert last == "2 plans: 7.0 s of processor time and 0.40 GB at most; 1 failed"
