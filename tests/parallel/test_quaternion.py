"""Quaternion linear maps on layouts that shard the sequence, the layers and the weights."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.nn.test_quaternion import MODEL
from tests.parallel.against_one import Found, alone, same

LAYOUTS: dict[str, dict[str, Any]] = {
    "cp": {"mesh": {"cp": 2}, "recompute": {"every": 1}},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
    "zero3": {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}},
}


@pytest.fixture(scope="module")
def one() -> dict[str, Found]:
    """The run of one process, made once."""
    return {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_as_one_process(layout: str, one: dict[str, Found], pool: Pool) -> None:
    one["run"] = one.get("run") or alone(pool, MODEL)
    same(pool, one["run"], 2, MODEL, LAYOUTS[layout])
