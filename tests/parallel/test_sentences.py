"""BERT's pairs of texts on layouts: token types, and the class of a sequence beside the masked tokens."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import Found, alone, same

MODEL: dict[str, Any] = {
    "kind": "encoder",
    "width": 32,
    "position": "learned",
    "embedding_norm": "layer",
    "transform": "gelu",
    "head_bias": True,
    "token_types": 2,
    "sentence_head": {"classes": 3},
    "stack": {
        "depth": 2,
        "block": {
            "mixer": {"kind": "attention", "heads": 4, "bias": True},
            "ffn": {"kind": "dense", "hidden": 48, "bias": True},
            "norm": "layer",
            "residual": "post",
            "dropout": 0.1,
        },
    },
}
SECTIONS: dict[str, Any] = {
    "objective": {"kind": "masked_sentences", "task": "three_way", "shuffled_trigrams": 0.2, "ngrams": 2},
    "data": {"split_sentences": True},
}


@pytest.fixture(scope="module")
def one(pool: Pool) -> Found:
    return alone(pool, MODEL, **SECTIONS)


@pytest.mark.parametrize(
    "layout",
    [
        {"mesh": {"dp_shard": 2}},
        {"mesh": {"tp": 2}},
        {"mesh": {"tp": 2}, "tensor": {"sequence": True}, "recompute": {"every": 1}},
        {"mesh": {"cp": 2}},
        {"mesh": {"cp": 2}, "context": {"style": "ulysses"}},
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
        {"zero": {"stage": 3}},
    ],
    ids=["dp", "tp", "sp", "ring", "ulysses", "pp", "zero3"],
)
@pytest.mark.sampled(3)
def test_a_layout_has_the_numbers_of_one_process(pool: Pool, one: Found, layout: dict[str, Any]) -> None:
    assert {"head.sentence/loss", "head.sentence/accuracy"} <= one.statistics.keys()
    assert one.gradients["head.sentence.pooler.dense.weight"][1].abs().max() > 0
    assert one.gradients["embed.types"][1].abs().min(1).values.max() > 0
    same(pool, one, 2, MODEL, layout, **SECTIONS)


@pytest.mark.long
def test_layouts_compose(pool: Pool, one: Found) -> None:
    for layout in (
        {"mesh": {"tp": 2, "cp": 2}, "tensor": {"sequence": True}},
        {"mesh": {"pp": 2, "cp": 2}},
        {"mesh": {"tp": 2, "dp_shard": 2}, "zero": {"stage": 3}},
    ):
        same(pool, one, 4, MODEL, layout, **SECTIONS)
