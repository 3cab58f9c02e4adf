"""Stacks whose blocks share sublayers, on layouts: one gradient for each weight, whichever ranks have the blocks."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, same
from tests.parallel.models import MOE
from tests.parallel.test_tensor import refused

PIPELINE = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}


def model(share: str, ffn: dict[str, Any], kind: str = "decoder") -> dict[str, Any]:
    mixer = {"kind": "attention", "heads": 4, "kv_heads": 2, "bias": True}
    stack = {"depth": 3, "share": share, "block": {"mixer": mixer, "ffn": ffn, "norm": "layer", "dropout": 0.1}}
    stacks = {"encoder": stack, "decoder": stack} if kind == "encoder_decoder" else {"stack": stack}
    return {"kind": kind, "width": 32, "position": "learned", **stacks}


ALL = model("all", {"kind": "dense", "hidden": 24, "bias": True})
MIXERS = model("mixer", {"kind": "gated", "hidden": 24})
ALBERT: dict[str, Any] = {
    **model("all", {"kind": "dense", "hidden": 24, "bias": True}, "encoder"),
    "embedding_width": 12,
    "embedding_norm": "layer",
    "transform": "gelu",
    "head_bias": True,
    "dropout": 0.1,
}
EXPERTS = model("all", MOE)
STATE = model("ffn", {**MOE, "router": {**MOE["router"], "balance_over": "global_batch"}})
"""A router with loads and a bias that follow the statistics of all its uses, and have no gradients."""
BOTH = model("all", {"kind": "dense", "hidden": 24}, "encoder_decoder")


def test_a_recomputed_use_counts_once_in_the_statistics(pool: Pool) -> None:
    """The mixture has three uses, of which two are recomputed, and its load is the mean over the three."""
    expected = alone(pool, EXPERTS, steps=1)
    assert any(name.endswith("/entropy") for name in expected.statistics)
    same(pool, expected, 1, EXPERTS, {"recompute": {"every": 2}}, steps=1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (
            ALL,
            [
                {"mesh": {"tp": 2}, "tensor": {"sequence": True}, "recompute": {"every": 1}},
                {"mesh": {"cp": 2}},
                PIPELINE,
                {"zero": {"stage": 3}},
            ],
        ),
        (MIXERS, [{"mesh": {"tp": 2}}, PIPELINE, {"zero": {"stage": 2}, "recompute": {"every": 1}}]),
        (
            ALBERT,
            [
                {"mesh": {"tp": 2}, "tensor": {"sequence": True}},
                {"mesh": {"cp": 2}},
                PIPELINE,
                {"zero": {"stage": 3}},
            ],
        ),
        (EXPERTS, [{"mesh": {"ep": 2}}]),
        (STATE, [PIPELINE, {"zero": {"stage": 3}}]),
        (BOTH, [PIPELINE]),
    ],
    ids=["all", "mixers", "albert", "experts", "routers with state", "both stacks"],
)
@pytest.mark.sampled(3)
def test_a_layout_has_the_numbers_of_one_process(
    model: dict[str, Any], layouts: list[dict[str, Any]], pool: Pool
) -> None:
    expected = alone(pool, model)
    for layout in layouts:
        same(pool, expected, 2, model, layout)


def test_two_stages_of_a_rank_cannot_share() -> None:
    deep = {**ALL, "stack": {**ALL["stack"], "depth": 8}}
    pipeline = {"schedule": "interleaved_1f1b", "stages_per_rank": 2}
    problems = refused(deep, 2, mesh={"pp": 2}, pipeline=pipeline)
    assert any("two copies of stack.shared." in problem and "stack.share=none" in problem for problem in problems)
