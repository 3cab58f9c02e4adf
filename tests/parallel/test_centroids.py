"""Centroids that follow the tokens by a running mean: on every layout those of one process, after each step."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import Found, alone, asked, same

SECTIONS: dict[str, Any] = {"data": {"cross_documents": True}}
MODEL: dict[str, Any] = {
    "kind": "decoder",
    "width": 32,
    "stack": {
        "depth": 2,
        "block": {
            "mixer": {
                "kind": "attention",
                "heads": 4,
                "kv_heads": 2,
                "core": {"kind": "routing_transformer", "clusters": 3, "reach": 8, "decay": 0.5},
            },
            "ffn": {"kind": "dense", "hidden": 48},
        },
    },
}

SPLIT: dict[str, Any] = {
    **MODEL,
    "stack": {
        "depth": 2,
        "block": {
            "mixer": {
                "kind": "attention",
                "heads": 8,
                "kv_heads": 4,
                "core": {
                    "kind": "split_heads",
                    "cores": [
                        {"kind": "block_sparse", "block": 4, "pattern": {"kind": "random"}},
                        {"kind": "routing_transformer", "clusters": 3, "window": 8, "decay": 0.5},
                    ],
                },
            },
            "ffn": {"kind": "dense", "hidden": 48},
        },
    },
}

CLUSTER_FORMER: dict[str, Any] = {
    "kind": "encoder",
    "width": 32,
    "position": "learned",
    "stack": {
        "depth": 2,
        "block": {
            "mixer": {
                "kind": "cluster_former",
                "heads": 4,
                "core": {"kind": "cluster_former", "clusters": 3, "chunk_length": 8, "update_every": 2},
            },
            "ffn": {"kind": "dense", "hidden": 48},
        },
        "rules": [
            {
                "first": 1,
                "mixer": {
                    "kind": "attention",
                    "heads": 4,
                    "core": {"kind": "cluster_former", "clusters": 3, "chunk_length": 8, "update_every": 2},
                },
            }
        ],
    },
}
"""A layer that clusters hidden states, and one in which each head clusters its keys."""


@pytest.fixture(scope="module")
def one(pool: Pool) -> Found:
    """A run of one process, whose centroids move."""
    found = alone(pool, MODEL, **SECTIONS)
    name = "stack.blocks.1.mixer.part.core.centroids"
    assert (found.ended[name][1] - found.started[name][1]).abs().max() > 0.1
    assert name not in found.gradients
    return found


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (4, {"mesh": {"tp": 2, "cp": 2}, "context": {"style": "ulysses"}}),
        (4, {"mesh": {"dp_shard": 2, "tp": 2}, "zero": {"stage": 3}}),
        (2, {"mesh": {"pp": 2}}),
    ],
    ids=["tp2-ulysses2", "tp2-zero3", "pp2"],
)
def test_a_layout(ranks: int, parallel: dict[str, Any], one: Found, pool: Pool) -> None:
    same(pool, one, ranks, MODEL, parallel, **SECTIONS)


def test_half_of_the_heads_local_and_half_routed(pool: Pool) -> None:
    """Each rank has heads of both cores: those with the random blocks and the centroids of one process."""
    parallel = {"mesh": {"tp": 2, "cp": 2}, "context": {"style": "ulysses"}}
    same(pool, alone(pool, SPLIT, **SECTIONS), 4, SPLIT, parallel, **SECTIONS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(4, {"mesh": {"dp_shard": 2, "tp": 2}, "zero": {"stage": 3}}), (2, {"mesh": {"pp": 2}})],
    ids=["tp2-zero3", "pp2"],
)
def test_cluster_formers_memory(ranks: int, parallel: dict[str, Any], pool: Pool) -> None:
    one = alone(pool, CLUSTER_FORMER, steps=3, **SECTIONS)  # the memory empties after each second step
    for layer in range(2):
        name = f"stack.blocks.{layer}.mixer.part.core.centroids"
        assert (one.ended[name][1] - one.started[name][1]).abs().max() > 0.1
        assert one.ended[name.replace("centroids", "memory.sums")][1].abs().max() > 0.1
    same(pool, one, ranks, CLUSTER_FORMER, parallel, steps=3, **SECTIONS)


def test_a_rank_without_heads_of_both_cores_is_refused() -> None:
    (problem,) = asked(SPLIT, {"mesh": {"tp": 8}}, **SECTIONS).check(8)
    assert problem.path == "parallel.mesh.tp"
    assert "Take 1, 2 or 4." in problem.advice
    (problem,) = asked(SPLIT, {"mesh": {"cp": 8}}, **SECTIONS).check(8)
    assert "a rank needs a multiple of 2 heads" in problem.what
