"""Learned tokens before the text, on layouts that send, cut and shard what holds them."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, asked, same

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


def test_heads_that_find_tokens_by_index_are_refused_with_cp() -> None:
    given = {"objective": {"kind": "span_boundary"}, "parallel": {"mesh": {"cp": 2}, **GATHER}, **SECTIONS}
    recipe = asked({**SOFTMAX, "boundary_head": {"max_span": 10}}, given.pop("parallel"), **given)
    assert [(problem.path, problem.what) for problem in recipe.check(2)] == [
        (
            "parallel.mesh.cp",
            "model.boundary_head finds the tokens of a shard by their index, which 6 global tokens change",
        )
    ]
