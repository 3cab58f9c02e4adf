"""BART on layouts: sources of other lengths than their texts, two norms of embeddings, all corruptions at once."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import Found, alone, same

BLOCK = {
    "mixer": {"kind": "attention", "heads": 4, "bias": True, "dropout": 0.1},
    "ffn": {"kind": "dense", "hidden": 24, "activation": "gelu", "bias": True},
    "norm": "layer",
    "placement": "post",
    "dropout": 0.1,
}
MODEL: dict[str, Any] = {
    "kind": "encoder_decoder",
    "width": 32,
    "position": "learned",
    "embedding_norm": "layer",
    "dropout": 0.1,
    "encoder": {"depth": 2, "block": BLOCK},
    "decoder": {"depth": 2, "block": BLOCK},
}
OBJECTIVE = {"kind": "denoising", "masked_tokens": 0.1, "deleted_tokens": 0.2, "rotated_documents": 0.5}


@pytest.fixture(scope="module")
def one(pool: Pool) -> Found:
    return alone(pool, MODEL, objective=OBJECTIVE)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        {"mesh": {"dp_shard": 2}},
        {"mesh": {"tp": 2}},
        {"mesh": {"tp": 2}, "tensor": {"sequence": True}},
        {"mesh": {"cp": 2}},
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
        {"zero": {"stage": 3}},
    ],
    ids=["dp", "tp", "sp", "ring", "pp", "zero3"],
)
def test_a_layout_has_the_numbers_of_one_process(pool: Pool, one: Found, layout: dict[str, Any]) -> None:
    same(pool, one, 2, MODEL, layout, objective=OBJECTIVE)
