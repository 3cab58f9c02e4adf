"""Context parallelism gives the numbers of one process: losses, gradients' norms, evaluations and final weights."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import Found, alone, same

DENSE: dict[str, Any] = {
    "kind": "decoder",
    "width": 32,
    "dropout": 0.1,
    "stack": {
        "depth": 2,
        "block": {
            "mixer": {"kind": "attention", "heads": 4, "kv_heads": 1, "bias": True, "qk_norm": {"kind": "rms"}},
            "ffn": {"kind": "gated", "hidden": 48},
            "dropout": 0.1,
        },
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


def layout(style: str = "auto", **others: Any) -> dict[str, Any]:
    """Section `parallel`."""
    mesh = {"cp": 2, **others.pop("mesh", {})}
    return {"mesh": mesh, "context": {"style": style}, **others}


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, layout("ulysses", recompute={"every": 1})),
        (4, layout("ulysses", mesh={"cp": 4})),
        (4, layout("ulysses", zero={"stage": 0})),
        (4, layout("ulysses", zero={"stage": 3})),
        (4, layout("ulysses", mesh={"tp": 2}, tensor={"sequence": True})),
    ],
    ids=["ulysses2", "ulysses4", "ulysses2-dp2-zero0", "ulysses2-dp2-zero3", "ulysses2-sp2"],
)
def test_a_dense_decoder(ranks: int, parallel: dict[str, Any], dense: Found, pool: Pool) -> None:
    same(pool, dense, ranks, DENSE, parallel)


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, layout("ulysses", mesh={"ep": 2})),
        (4, layout("ulysses", mesh={"ep": 2}, zero={"stage": 3})),
        (4, layout("ulysses", mesh={"tp": 2, "ep": 2})),
    ],
    ids=["ulysses2-ep2", "ulysses2-ep2-dp2-zero3", "ulysses2-tp2-ep2"],
)
def test_a_mixture_of_experts(ranks: int, parallel: dict[str, Any], mixture: Found, pool: Pool) -> None:
    same(pool, mixture, ranks, MIXTURE, parallel)


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(2, layout("ulysses"))],
    ids=["ulysses2"],
)
def test_an_encoder_decoder(ranks: int, parallel: dict[str, Any], pair: Found, pool: Pool) -> None:
    same(pool, pair, ranks, PAIR, parallel, objective={"kind": "span"})
