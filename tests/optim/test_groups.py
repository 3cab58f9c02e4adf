"""Parameter groups by name: which group a name is in, what is refused, and what the log says."""

from typing import Any

import pytest

from tests.parallel.against_one import asked
from tests.parallel.models import SHALLOW
from tests.train.tiny import MIXTURE, recipe
from xscale.optim.groups import ParameterGroup, check_groups, describe_groups, group_of

NAMES = ("embed.table.weight", "stack.blocks.0.ffn.part.up.weight", "stack.blocks.1.ffn.part.router.weight")


def test_the_first_match_wins() -> None:
    groups = (ParameterGroup(match="*.router.*"), ParameterGroup(match="stack.*"))
    assert [group_of(name, groups) for name in NAMES] == [None, 1, 0]


def problems(*matches: str) -> list[str]:
    return [str(problem) for problem in check_groups([ParameterGroup(match=match) for match in matches], NAMES, "g")]


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names() -> None:
    (problem,) = problems("*.rooter.*")
    assert problem.startswith("g.0.match: no trained parameter has a name that matches '*.rooter.*'. Take ")
    assert problem.split(" Take ")[1].startswith("stack.blocks.*.ffn.part.router.weight, ")
    assert problems("*.router.*", "embed.*") == []


def test_a_pattern_whose_names_are_all_taken_is_refused() -> None:
    (problem,) = problems("stack.*", "*.router.*")
    assert problem.startswith("g.1.match: '*.router.*' matches only parameters of earlier groups, such as 'stack.*'")
    assert problems("*.router.*", "stack.*") == []


def test_the_recipe_refuses_it_with_its_key(tmp_path: Any) -> None:
    optimizer = {"kind": "adamw", "groups": [{"match": "*.router.*"}, {"match": "*.rooter.*"}]}
    found = recipe(tmp_path, model=MIXTURE, optimizer=optimizer).check()
    assert [problem.path for problem in found] == ["optimizer.groups.1.match"]


def test_deepspeed_refuses_groups() -> None:
    parallel = {"mesh": {"dp_shard": 2}, "zero": {"engine": "deepspeed"}}
    for optimizer in ({"kind": "lion", "groups": [{"match": "*"}]}, {"kind": "muon"}):
        problems = asked(SHALLOW["mixture"], parallel, optimizer=optimizer).check(2)
        found = [problem for problem in problems if problem.path.startswith("optimizer")]
        assert len(found) == 1
        assert "parallel.zero.engine=torch" in found[0].advice


def test_the_log_counts_each_group() -> None:
    groups = (ParameterGroup(match="*.router.*", lr_factor=0.5, weight_decay=0.0), ParameterGroup(match="embed.*"))
    assert describe_groups(groups, dict(zip(NAMES, (5000, 60, 7), strict=True))) == [
        "optimizer group '*.router.*' (lr_factor 0.5, weight_decay 0): 1 tensors, 7 parameters",
        "optimizer group 'embed.*' (lr_factor 1): 1 tensors, 5,000 parameters",
        "optimizer group of all others: 1 tensors, 60 parameters",
    ]
    assert describe_groups((), {"a": 1}) == []


@pytest.mark.parametrize("value", [{"match": ""}, {"match": "*", "lr_factor": -1.0}, {"match": "*", "rate": 1.0}, {}])
def test_what_is_no_group_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"match|lr_factor|rate"):
        ParameterGroup.model_validate(value)
