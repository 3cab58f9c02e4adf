"""DeLighT on layouts: the transformation is of one token, and its one head is not sharded."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, asked, same

BLOCK: dict[str, Any] = {
    "mixer": {"kind": "delight", "min_layers": 2, "max_layers": 4, "max_groups": 4},
    "ffn": {"kind": "dense", "hidden": 8},
    "dropout": 0.1,
}
MODEL: dict[str, Any] = {"kind": "decoder", "width": 32, "stack": {"depth": 2, "block": BLOCK}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "cp": {"mesh": {"cp": 2}, "recompute": {"every": 1}},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
    "zero 3": {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}},
}


@pytest.mark.parametrize("names", [["cp"], pytest.param(["pp", "zero 3"], marks=pytest.mark.long)], ids=" and ".join)
def test_a_layout_trains_as_one_process(names: list[str], pool: Pool) -> None:
    expected = alone(pool, MODEL)
    for name in names:
        same(pool, expected, 2, MODEL, LAYOUTS[name])


def test_one_head_is_not_sharded() -> None:
    problems = [str(problem) for problem in asked(MODEL, {"mesh": {"tp": 2}}).check(2)]
    assert any("tp=2 does not divide heads=1. Take 1." in problem for problem in problems), problems
