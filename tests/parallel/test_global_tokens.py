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


GATHER = {"context": {"gather": True}}
SOFTMAX = {
    **MODEL,
    "token_types": 2,
    "stack": {**MODEL["stack"], "block": {**MODEL["stack"]["block"], "mixer": {"kind": "attention", "heads": 4}}},
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "model", "parallel"),
    [
        (2, MODEL, {"mesh": {"cp": 2}, **GATHER}),
        (2, SOFTMAX, {"mesh": {"cp": 2}, "context": {"style": "ulysses"}}),
        (3, SOFTMAX, {"mesh": {"cp": 3}, "context": {"style": "ring"}, "zero": {"stage": 3}}),
        (4, SOFTMAX, {"mesh": {"cp": 2, "tp": 2}, "tensor": {"sequence": True}}),
        (4, SOFTMAX, {"mesh": {"cp": 2, "pp": 2}}),
    ],
    ids=["gather", "ulysses", "ring", "cp2-sp2", "cp2-pp2"],
)
def test_a_sharded_sequence_has_the_numbers_of_one_process(
    ranks: int, model: dict[str, Any], parallel: dict[str, Any], pool: Pool
) -> None:
    same(pool, alone(pool, model, **SECTIONS), ranks, model, parallel, **SECTIONS)


BOUNDARIES = {"objective": {"kind": "span_boundary"}, **SECTIONS}
SENTENCES = {
    "objective": {"kind": "masked_sentences", "task": "three_way"},
    "data": {"split_sentences": True, "cross_documents": True},
}
HEADS = [
    ({**SOFTMAX, "boundary_head": {"max_span": 10}}, BOUNDARIES, "head.boundary/loss"),
    ({**SOFTMAX, "sentence_head": {"classes": 3}}, SENTENCES, "head.sentence/loss"),
]


@pytest.mark.parametrize(("model", "sections", "statistic"), HEADS, ids=["boundary", "sentence"])
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {"mesh": {"cp": 2}, "context": {"style": "ulysses"}}),
        pytest.param(3, {"mesh": {"cp": 3}, "context": {"style": "ring"}}, marks=pytest.mark.long),
        pytest.param(4, {"mesh": {"cp": 2, "tp": 2}, "tensor": {"sequence": True}}, marks=pytest.mark.long),
        pytest.param(4, {"mesh": {"cp": 2, "pp": 2}}, marks=pytest.mark.long),
    ],
    ids=["ulysses", "ring", "cp2-sp2", "cp2-pp2"],
)
def test_heads_that_find_tokens_by_index(
    ranks: int, layout: dict[str, Any], model: dict[str, Any], sections: dict[str, Any], statistic: str, pool: Pool
) -> None:
    """On 3 ranks a chunk is shorter than the global tokens, so that the first one has no token of the text."""
    one = alone(pool, model, **sections)
    assert statistic in one.statistics
    same(pool, one, ranks, model, layout, **sections)
