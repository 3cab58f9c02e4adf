"""Positions that are added to the input of each block, on layouts."""

from typing import Any

from tests.distributed import Pool
from tests.parallel.against_one import alone, same
from tests.parallel.test_tensor import refused

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
LAYOUTS: list[dict[str, Any]] = [
    {"mesh": {"tp": 2}, "recompute": {"every": 1}},
    {"mesh": {"cp": 2}},
    {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
    {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}},
]


def test_a_layout_has_the_numbers_of_one_process(pool: Pool) -> None:
    expected = alone(pool, MODEL)
    for layout in LAYOUTS:
        same(pool, expected, 2, MODEL, layout)


def test_sequence_parallelism_is_refused() -> None:
    (problem,) = refused(MODEL, 2, mesh={"tp": 2}, tensor={"sequence": True})
    assert "stack.block.position reads the tokens between the blocks" in problem
