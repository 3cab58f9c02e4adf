"""Groups with limits of their own: clipped by literal norms on one process, and by the same numbers on every layout."""

import math
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.parallel.against_one import alone, asked, same
from tests.parallel.models import SHALLOW
from tests.train.tiny import metrics, recipe, run
from xscale.core.errors import EXIT_DONE
from xscale.optim.groups import OTHERS, ParameterGroup, clip_groups

LIMIT = 0.05
GROUPS = [
    {"match": "*.router.*", "clip_grad_norm": 1e-3},
    {"match": "embed.*", "lr_factor": 0.5},
    {"match": "*.ffn.*", "clip_grad_norm": 0.02},
    {"match": "*.norm*", "clip_grad_norm": 1e3},
]
SECTIONS: dict[str, Any] = {"optimizer": {"kind": "adamw", "groups": GROUPS}, "train": {"clip_grad_norm": LIMIT}}


def clipped(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Scale the gradients of each group down to its limit, by loops."""
    square: dict[str, float] = {}
    group_of: dict[str, str] = {}
    limits = {"": LIMIT}
    for name, gradient in gradients.items():
        label = ""
        for group in GROUPS:
            if fnmatchcase(name, str(group["match"])):
                if "clip_grad_norm" in group:
                    label = str(group["match"])
                    limits[label] = float(group["clip_grad_norm"])
                break
        group_of[name] = label
        for value in gradient.flatten().tolist():
            square[label] = square.get(label, 0.0) + value * value
    return {
        name: gradient * min(1.0, limits[group_of[name]] / math.sqrt(square[group_of[name]]))
        for name, gradient in gradients.items()
    }


def test_each_group_is_scaled_to_its_limit(pool: Pool) -> None:
    plain = alone(pool, SHALLOW["mixture"], steps=1, train={"clip_grad_norm": None})
    by_group = alone(pool, SHALLOW["mixture"], steps=1, **SECTIONS)
    expected = clipped({name: value for name, (_, value) in plain.gradients.items()})
    assert expected.keys() == by_group.gradients.keys()
    changed = {name for name in expected if not torch.equal(expected[name], plain.gradients[name][1])}
    assert 0 < len(changed) < len(expected)
    for name, value in expected.items():
        assert torch.allclose(by_group.gradients[name][1], value, rtol=1e-12, atol=0), name
    assert by_group.numbers[1] == pytest.approx(plain.numbers[1], rel=1e-12)


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"mesh": {"dp_shard": 2, "tp": 2}, "zero": {"stage": 3}}, id="tp-zero3"),
        pytest.param({"mesh": {"dp_shard": 2, "pp": 2, "ep": 2}, "zero": {"stage": 1}}, id="pp-ep-zero1"),
        pytest.param(
            {"mesh": {"dp_replicate": 2, "cp": 2}, "zero": {"stage": 2}}, id="cp-hybrid", marks=pytest.mark.long
        ),
    ],
)
def test_layouts_clip_alike(parallel: dict[str, Any], pool: Pool) -> None:
    same(pool, alone(pool, SHALLOW["mixture"], **SECTIONS), 4, SHALLOW["mixture"], parallel, **SECTIONS)


def test_a_run_logs_the_norm_of_each_group(tmp_path: Path) -> None:
    train = {"steps": 3, "batch_size": 4, "micro_batch_size": 2, "eval_every": 0, "baseline": False}
    made = recipe(tmp_path, model=SHALLOW["mixture"], optimizer=SECTIONS["optimizer"], train=train)
    assert run(made) == EXIT_DONE
    steps = [line for line in metrics(tmp_path) if "loss" in line]
    assert len(steps) == 3
    labels = [OTHERS, "optimizer.groups.0", "optimizer.groups.2", "optimizer.groups.3"]
    for step in steps:
        norms = [step[f"{label}/grad_norm"] for label in labels]
        assert math.hypot(*norms) == pytest.approx(step["grad_norm"], rel=1e-6)
        assert min(norms) > 0
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "optimizer group '*.router.*' (lr_factor 1, clip_grad_norm 0.001)" in log


def test_all_ranks_have_as_many_groups_and_the_first_match_wins() -> None:
    groups = [ParameterGroup(match="a.*", clip_grad_norm=1.0), ParameterGroup(match="b.*"), ParameterGroup(match="*.w")]
    split = clip_groups(["b.w", "c.b", "a.w"], groups, 2.0)
    assert [(group.label, group.limit, group.members) for group in split] == [
        (OTHERS, 2.0, (0, 1)),
        ("optimizer.groups.0", 1.0, (2,)),
    ]
    assert [len(group.members) for group in clip_groups(["b.w"], groups, None)] == [1, 0]


def test_deepspeed_refuses_them() -> None:
    parallel = {"mesh": {"dp_shard": 2}, "zero": {"engine": "deepspeed"}}
    problems = asked(SHALLOW["mixture"], parallel, optimizer=SECTIONS["optimizer"]).check(2)
    (problem,) = [problem for problem in problems if problem.path.startswith("optimizer")]
    assert problem.path == "optimizer.groups"
    assert "clipped" in problem.what
    assert "parallel.zero.engine=torch" in problem.advice


@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_a_limit_is_positive(limit: float) -> None:
    with pytest.raises(ValueError, match="clip_grad_norm"):
        ParameterGroup(match="*", clip_grad_norm=limit)
