"""Tensor parallelism gives the numbers of one process: losses, gradients' norms, evaluations and final weights."""

from typing import Any

import pytest

from tests.distributed import Pool, RankError
from tests.families import example
from tests.parallel.against_one import Found, alone, compare, same, trained
from xscale.core.config import encode
from xscale.nn.attention import CORES

DENSE: dict[str, Any] = {
    "kind": "decoder",
    "width": 32,
    "dropout": 0.1,
    "stack": {
        "depth": 2,
        "block": {
            "mixer": {"kind": "attention", "heads": 4, "kv_heads": 1, "bias": True, "qk_norm": {"kind": "rms"}},
            "ffn": {"kind": "gated", "hidden": 48, "bias": True},
            "norm": {"kind": "layer"},
            "dropout": 0.1,
        },
        "rules": [{"every": 2, "at": 1, "ffn": {"kind": "dense", "hidden": 64, "bias": True}}],
    },
}
MIXTURE: dict[str, Any] = {
    "kind": "decoder",
    "width": 32,
    "tied": False,
    "position": {"kind": "learned"},
    "stack": {
        "depth": 2,
        "block": {
            "mixer": {"kind": "attention", "heads": 4, "kv_heads": 2},
            "ffn": {"kind": "gated", "hidden": 48},
            "placement": "sandwich",
            "dropout": 0.1,
        },
        "rules": [
            {
                "every": 2,
                "at": 1,
                "mixer": {
                    "kind": "attention",
                    "heads": 4,
                    "core": {"kind": "block_sparse", "block": 4, "pattern": {"kind": "bigbird"}},
                },
                "ffn": {
                    "kind": "moe",
                    "experts": 4,
                    "capacity_factor": 1.25,
                    "router": {"kind": "topk", "jitter": 0.05, "z": 0.01, "balance": 0.1},
                    "expert": {"kind": "dense", "hidden": 16, "bias": True},
                    "shared": {"kind": "gated", "hidden": 16},
                    "mix": "softmax",
                },
            }
        ],
    },
}
PAIR: dict[str, Any] = {
    "kind": "encoder_decoder",
    "width": 32,
    "position": {"kind": "alibi"},
    "encoder": {"depth": 1, "block": {"mixer": {"kind": "attention", "heads": 4}, "ffn": {"kind": "dense"}}},
    "decoder": {
        "depth": 1,
        "block": {
            "mixer": {"kind": "attention", "heads": 4, "kv_heads": 2},
            "cross": {"kind": "attention", "heads": 4, "bias": True},
            "ffn": {"kind": "dense"},
            "placement": "post",
        },
    },
}


@pytest.fixture(scope="module")
def dense(pool: Pool) -> Found:
    """A dense decoder on one process."""
    return alone(pool, DENSE)


@pytest.fixture(scope="module")
def mixture(pool: Pool) -> Found:
    """A mixture of experts on one process."""
    return alone(pool, MIXTURE)


@pytest.fixture(scope="module")
def pair(pool: Pool) -> Found:
    """An encoder-decoder on one process."""
    return alone(pool, PAIR, objective={"kind": "span"})


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, {"mesh": {"tp": 2}}),
        (4, {"mesh": {"tp": 4}}),
        (4, {"mesh": {"tp": 2}, "zero": {"stage": 0}}),
        (4, {"mesh": {"tp": 2}, "zero": {"stage": 3}, "recompute": {"every": 1}}),
        (2, {"mesh": {"tp": 2}, "tensor": {"sequence": True}, "recompute": {"every": 1}}),
        (4, {"mesh": {"tp": 2}, "tensor": {"sequence": True}, "zero": {"stage": 3}}),
    ],
    ids=["tp2", "tp4", "tp2-dp2-zero0", "tp2-dp2-zero3", "sp2", "sp2-dp2-zero3"],
)
def test_a_dense_decoder(ranks: int, parallel: dict[str, Any], dense: Found, pool: Pool) -> None:
    same(pool, dense, ranks, DENSE, parallel)


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, {"mesh": {"tp": 2}}),
        (4, {"mesh": {"tp": 2, "ep": 2}}),
        (4, {"mesh": {"tp": 2, "ep": 2}, "zero": {"stage": 3}}),
        (4, {"mesh": {"tp": 2}, "zero": {"stage": 3}}),
        (4, {"mesh": {"tp": 2, "ep": 2}, "tensor": {"sequence": True}}),
    ],
    ids=["tp2", "tp2-ep2-zero1", "tp2-ep2-zero3", "tp2-dp2-zero3", "sp2-ep2"],
)
def test_a_mixture_of_experts(ranks: int, parallel: dict[str, Any], mixture: Found, pool: Pool) -> None:
    same(pool, mixture, ranks, MIXTURE, parallel)


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(2, {"mesh": {"tp": 2}}), (4, {"mesh": {"tp": 2}}), (2, {"mesh": {"tp": 2}, "tensor": {"sequence": True}})],
    ids=["tp2", "tp2-dp2", "sp2"],
)
def test_an_encoder_decoder(ranks: int, parallel: dict[str, Any], pair: Found, pool: Pool) -> None:
    same(pool, pair, ranks, PAIR, parallel, objective={"kind": "span"})


def with_core(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model of one block around that core, and the objective it can learn by."""
    entry = CORES.get(name)
    mixer = {"kind": "attention", "heads": 4, "kv_heads": 2, "core": encode(example(entry))}
    block = {"mixer": mixer, "ffn": {"kind": "dense", "hidden": 16}}
    model = {
        "kind": "decoder" if entry.traits.causal else "encoder",
        "width": 32,
        "stack": {"depth": 1, "block": block},
    }
    return model, {"kind": "causal" if entry.traits.causal else "masked"}


def every_core(parallel: dict[str, Any]) -> dict[str, Found]:
    """Train each core whose heads are computed apart."""
    models = {name: with_core(name) for name in CORES.able(per_head=True)}
    return {name: trained(model, parallel, steps=1, objective=objective) for name, (model, objective) in models.items()}


def test_every_core_that_promises_heads_apart(pool: Pool) -> None:
    one = pool.run(every_core, 1, {})[0]
    ranks = pool.run(every_core, 2, {"mesh": {"tp": 2}})
    assert len(one) > 5
    wrong = {}
    for name, found in one.items():
        try:
            compare(found, [rank[name] for rank in ranks])
        except AssertionError as error:
            wrong[name] = str(error)[:300]
    assert wrong == {}


@pytest.mark.parametrize(
    ("name", "sequence"),
    [
        ("guard.copy_in", False),
        ("guard.sum_out", False),
        ("vocabulary.sum_out", False),
        ("sequence.guard_weights", True),
    ],
)
def test_the_comparison_fails_without_one_guard(name: str, sequence: bool, dense: Found, pool: Pool) -> None:
    """Negative control: a guard that lets its input through as it is must not pass."""
    parallel = {"mesh": {"tp": 2}, "tensor": {"sequence": sequence}}
    with pytest.raises(AssertionError) as caught:
        same(pool, dense, 2, DENSE, parallel, without=f"xscale.parallel.{name}")
    assert not isinstance(caught.value, RankError)
