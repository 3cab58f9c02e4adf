"""What BERT and T5 have besides, under tp: a transform and a bias in the head, and tables of relative positions."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, same

DENSE = {"kind": "dense", "hidden": 64, "bias": True}
BERT: dict[str, Any] = {
    "kind": "encoder",
    "width": 32,
    "position": "relative",
    "embedding_norm": "layer",
    "transform": "gelu",
    "head_bias": True,
    "stack": {
        "depth": 2,
        "block": {"mixer": {"kind": "attention", "heads": 4, "bias": True}, "ffn": DENSE, "placement": "post"},
    },
}


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, {"mesh": {"tp": 2}}),
        (2, {"mesh": {"tp": 2}, "tensor": {"sequence": True}}),
        (2, {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}}),
    ],
    ids=["tp2", "sp2", "zero3"],
)
def test_an_encoder(ranks: int, parallel: dict[str, Any], pool: Pool) -> None:
    objective = {"kind": "masked"}
    same(pool, alone(pool, BERT, objective=objective), ranks, BERT, parallel, objective=objective)
