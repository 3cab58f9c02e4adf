"""Positions that are added to the input of each block, on layouts."""

from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.parallel.against_one import alone, asked, built, same
from tests.parallel.models import changed
from xscale.train.generate import generate, incremental

MODEL: dict[str, Any] = {
    "kind": "decoder",
    "width": 32,
    "position": "none",
    "stack": {
        "depth": 2,
        "block": {
            "mixer": {"kind": "attention", "heads": 4},
            "ffn": {"kind": "dense", "hidden": 24},
            "position": "learned",
            "dropout": 0.1,
        },
    },
}
FLOATER = changed(MODEL, stack__block__position={"kind": "floater", "hidden": 8, "interval": 0.05})
LAYOUTS: list[dict[str, Any]] = [
    {"mesh": {"tp": 2}, "recompute": {"every": 1}},
    {"mesh": {"tp": 2}, "tensor": {"sequence": True}},
    {"mesh": {"cp": 2}},
    {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
    {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}},
]


def test_a_layout_has_the_numbers_of_one_process(pool: Pool) -> None:
    expected = alone(pool, MODEL)
    for layout in LAYOUTS:
        same(pool, expected, 2, MODEL, layout)


@pytest.mark.long
def test_shared_dynamics_are_the_same_on_a_layout(pool: Pool) -> None:
    expected = alone(pool, FLOATER)
    assert sum("position_tables" in name for name in expected.ended) == 4
    for layout in LAYOUTS:
        same(pool, expected, 2, FLOATER, layout)


def written(parallel: dict[str, Any]) -> list[int]:
    network = built(FLOATER, parallel)[2]
    assert incremental(network)
    return generate(network, torch.tensor([20, 30, 40]), 9, end=1, temperature=0.8, seed=3).tolist()


def test_generation_on_two_stages_that_share_dynamics(pool: Pool) -> None:
    (expected,) = pool.run(written, 1, {})
    assert len(set(expected)) > 3
    assert pool.run(written, 2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}) == [expected, expected]


def test_two_stages_of_a_rank_cannot_share_dynamics() -> None:
    pipeline = {"schedule": "interleaved_1f1b", "stages_per_rank": 2}
    model = changed(FLOATER, stack__depth=8)
    problems = [str(problem) for problem in asked(model, {"mesh": {"pp": 2}, "pipeline": pipeline}).check(2)]
    assert any(
        "two copies of stack.position_tables." in problem and "Or take another stack.block.position." in problem
        for problem in problems
    ), problems
