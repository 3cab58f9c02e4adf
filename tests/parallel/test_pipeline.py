"""Pipeline parallelism gives the numbers of one process: losses, gradients' norms, evaluations and final weights."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import Found, alone, same

ATTENTION: dict[str, Any] = {"kind": "attention", "heads": 4, "kv_heads": 2}
DENSE: dict[str, Any] = {
    "kind": "decoder",
    "width": 32,
    "dropout": 0.1,
    "position": {"kind": "learned"},
    "stack": {
        "depth": 4,
        "block": {
            "mixer": {**ATTENTION, "bias": True},
            "ffn": {"kind": "gated", "hidden": 48, "bias": True},
            "dropout": 0.1,
        },
    },
}
MIXTURE: dict[str, Any] = {
    "kind": "decoder",
    "width": 32,
    "tied": False,
    "stack": {
        "depth": 4,
        "block": {
            "mixer": ATTENTION,
            "ffn": {"kind": "gated", "hidden": 48},
            "placement": "post",
            "dropout": 0.1,
        },
        "rules": [
            {
                "every": 2,
                "at": 1,
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
    "dropout": 0.1,
    "position": {"kind": "alibi"},
    "encoder": {"depth": 2, "block": {"mixer": ATTENTION, "ffn": {"kind": "dense"}, "dropout": 0.1}},
    "decoder": {
        "depth": 3,
        "block": {"mixer": ATTENTION, "cross": {"kind": "attention", "heads": 4, "bias": True}, "dropout": 0.1},
    },
}
SPAN: dict[str, Any] = {"kind": "span"}


@pytest.fixture(scope="module")
def dense(pool: Pool) -> Found:
    """A dense decoder on one process, with a tied table, learned positions and dropout."""
    return alone(pool, DENSE)


@pytest.fixture(scope="module")
def mixture(pool: Pool) -> Found:
    """A mixture of experts on one process, with auxiliary losses and noise in the router."""
    return alone(pool, MIXTURE)


@pytest.fixture(scope="module")
def pair(pool: Pool) -> Found:
    """An encoder-decoder on one process, whose one table has three users."""
    return alone(pool, PAIR, objective=SPAN)


def layout(schedule: str = "1f1b", pp: int = 2, **parallel: Any) -> dict[str, Any]:
    """Section `parallel` of a recipe."""
    found: dict[str, Any] = {"mesh": {"pp": pp}, "pipeline": {"schedule": schedule}}
    for key, value in parallel.items():
        found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
    return found


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, layout("gpipe", zero={"stage": 3})),
        (2, layout("interleaved_1f1b")),
        (2, layout("zero_bubble", pipeline={"stages_by_hand": [1, 3]})),
        (4, layout("1f1b", 4)),
        (4, layout("1f1b", zero={"stage": 3}, recompute={"every": 2})),
        (4, layout("zero_bubble", zero={"stage": 2})),
        (4, layout("gpipe", zero={"stage": 0})),
        (4, layout("1f1b", zero={"stage": 2}, mesh={"tp": 2}, tensor={"sequence": True})),
    ],
    ids=["gpipe-zero3", "interleaved", "uneven", "pp4", "dp2-zero3", "zb-dp2-zero2", "dp2-zero0", "sp2"],
)
def test_a_dense_decoder(ranks: int, parallel: dict[str, Any], dense: Found, pool: Pool) -> None:
    same(pool, dense, ranks, DENSE, parallel)


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, layout("1f1b")),
        (2, layout("zbv")),
        (2, layout("dualpipe_v")),
        (4, layout("1f1b", mesh={"ep": 2}, zero={"stage": 2})),
        (4, layout("zero_bubble", mesh={"ep": 2})),
        (4, layout("interleaved_1f1b", mesh={"ep": 2}, zero={"stage": 3})),
    ],
    ids=["1f1b", "zbv", "dualpipe_v", "ep2-zero2", "zb-ep2", "interleaved-ep2-zero3"],
)
def test_a_mixture_of_experts(ranks: int, parallel: dict[str, Any], mixture: Found, pool: Pool) -> None:
    same(pool, mixture, ranks, MIXTURE, parallel)


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, layout("1f1b", pipeline={"stages_by_hand": [2, 3]})),
        (2, layout("zero_bubble", pipeline={"stages_by_hand": [3, 2]})),
        (4, layout("1f1b", 4)),
    ],
    ids=["at-decoder", "in-decoder", "pp4"],
)
def test_an_encoder_decoder(ranks: int, parallel: dict[str, Any], pair: Found, pool: Pool) -> None:
    same(pool, pair, ranks, PAIR, parallel, objective=SPAN)
