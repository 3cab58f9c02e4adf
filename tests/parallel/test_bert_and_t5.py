"""Parts of BERT and T5 on layouts: token types, a transform and a bias in the head, shared biases."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import Found, alone, same
from tests.train.tiny import recipe

DENSE = {"kind": "dense", "hidden": 64, "bias": True}
BERT: dict[str, Any] = {
    "kind": "encoder",
    "width": 32,
    "position": "relative",
    "embedding_norm": "layer",
    "transform": "gelu",
    "head_bias": True,
    "token_types": 2,
    "stack": {
        "depth": 2,
        "block": {"mixer": {"kind": "attention", "heads": 4, "bias": True}, "ffn": DENSE, "residual": "post"},
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


MIXER = {"kind": "attention", "heads": 4, "scale": 1.0}
BLOCK = {"mixer": MIXER, "ffn": {"kind": "gated", "gate": "geglu_tanh", "hidden": 48}}
T5: dict[str, Any] = {
    "kind": "encoder_decoder",
    "width": 32,
    "position": {"kind": "relative", "buckets": 10, "distance": 12, "shared": True},
    "scale_head": True,
    "encoder": {"depth": 2, "block": BLOCK},
    "decoder": {"depth": 3, "block": BLOCK},
}


@pytest.fixture(scope="module")
def t5(pool: Pool) -> Found:
    return alone(pool, T5, objective={"kind": "span"})


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, {"mesh": {"tp": 2}, "tensor": {"sequence": True}, "recompute": {"every": 1}}),
        (2, {"mesh": {"cp": 2}}),
        (2, {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}}),
        (2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "zero_bubble", "blocks_per_stage": [3, 2]}}),
        (4, {"mesh": {"pp": 4}, "pipeline": {"schedule": "1f1b"}}),
    ],
    ids=["sp2-recompute", "cp2", "zero3", "in-decoder", "pp4"],
)
@pytest.mark.sampled(3)
def test_one_table_for_all_blocks(ranks: int, parallel: dict[str, Any], t5: Found, pool: Pool) -> None:
    """Each stage of a pipeline with blocks of a stack has a copy of its table, and they stay the same."""
    same(pool, t5, ranks, T5, parallel, objective={"kind": "span"})


def test_two_copies_of_a_table_on_one_rank_are_refused() -> None:
    decoder = {"kind": "decoder", "width": 32, "position": T5["position"], "tied": False}
    parallel = {"mesh": {"pp": 2}, "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2}}
    made = recipe(Path("nowhere"), model={**decoder, "stack": {"depth": 4, "block": BLOCK}}, parallel=parallel)
    (problem,) = made.check(2)
    assert "stack.position.weight" in problem.what
    assert "model.position.shared=false" in problem.advice
