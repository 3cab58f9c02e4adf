"""Learned tokens before the text, on layouts that send, cut and shard what holds them."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, same

SECTIONS: dict[str, Any] = {"data": {"cross_documents": True}}
MODEL: dict[str, Any] = {
    "kind": "encoder",
    "width": 32,
    "dropout": 0.1,
    "global_tokens": 6,
    "global_mean": True,
    "stack": {
        "depth": 2,
        "block": {
            "mixer": {"kind": "attention", "heads": 4, "core": {"kind": "etc", "tokens": 6, "radius": 3}},
            "ffn": {"kind": "dense", "hidden": 48},
            "dropout": 0.1,
        },
    },
}


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}}),
        (4, {"mesh": {"pp": 2, "tp": 2}, "tensor": {"sequence": True}}),
    ],
    ids=["zero3", "pp2-sp2"],
)
def test_a_layout(ranks: int, parallel: dict[str, Any], pool: Pool) -> None:
    same(pool, alone(pool, MODEL, **SECTIONS), ranks, MODEL, parallel, **SECTIONS)
