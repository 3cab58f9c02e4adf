"""Pipeline parallelism gives the numbers of one process: losses, gradients' norms, evaluations and final weights."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import Found, alone, same

DENSE: dict[str, Any] = {
    "kind": "decoder",
    "width": 32,
    "dropout": 0.1,
    "position": {"kind": "learned"},
    "stack": {
        "depth": 4,
        "block": {
            "mixer": {"kind": "attention", "heads": 4, "kv_heads": 2, "bias": True},
            "ffn": {"kind": "gated", "hidden": 48, "bias": True},
            "dropout": 0.1,
        },
    },
}


@pytest.fixture(scope="module")
def dense(pool: Pool) -> Found:
    """A dense decoder on one process."""
    return alone(pool, DENSE)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_a_dense_decoder(schedule: str, dense: Found, pool: Pool) -> None:
    same(pool, dense, 2, DENSE, {"mesh": {"pp": 2}, "pipeline": {"schedule": schedule}})
