"""Blocks of Gemma, OLMo 2, GPT-NeoX and ReZero on layouts: caps, norms over all heads, parallel sublayers, FixNorm."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, same
from tests.parallel.test_tensor import refused

MIXER: dict[str, Any] = {
    "kind": "attention",
    "heads": 4,
    "kv_heads": 2,
    "qk_norm": "rms",
    "qk_norm_over": "heads",
    "scale": 0.9,
    "core": {"kind": "softmax", "soft_cap": 0.7},
}
BAND = {"kind": "block_sparse", "block": 4, "soft_cap": 0.7, "pattern": {"kind": "band", "left": 6}}
SCALED = {"kind": "rope", "fraction": 0.5, "scaling": {"method": "yarn", "factor": 4.0, "original_length": 9}}
FFN = {"kind": "gated", "hidden": 48, "gate": "geglu"}


def decoder(residual: Any) -> dict[str, Any]:
    block = {"mixer": MIXER, "ffn": FFN, "residual": residual, "dropout": 0.1}
    local = {**MIXER, "core": BAND, "position": {"kind": "rope", "base": 100.0}}
    return {
        "kind": "decoder",
        "width": 32,
        "position": SCALED,
        "scale_embeddings": True,
        "logit_soft_cap": 0.5,
        "stack": {"depth": 2, "block": block, "rules": [{"every": 2, "at": 1, "mixer": local}]},
    }


PARALLEL = decoder("parallel")
SEQUENTIAL = decoder("res_post")
REZERO = {**decoder("rezero"), "fix_norm": True}
MACARON = decoder("pre")
MACARON["stack"]["block"]["sublayers"] = [{"part": "ffn", "factor": 0.5}, {"part": "mixer"}, {"part": "ffn"}]
SANDWICH = decoder("pre")
SANDWICH["stack"]["depth"] = 4
SANDWICH["stack"]["rules"] += [
    {"last": 1, "sublayers": [{"part": "mixer"}]},
    {"first": 3, "sublayers": [{"part": "ffn", "ffn": {"kind": "dense", "hidden": 24}}]},
]
UNTIED = {**decoder("sandwich"), "fix_norm": True, "tied": False}
UNTIED["stack"]["block"]["norm"] = "scale"


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (
            PARALLEL,
            [
                {"mesh": {"tp": 2}, "tensor": {"sequence": True}, "recompute": {"every": 1}},
                {"mesh": {"cp": 2}},
                {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
            ],
        ),
        (SEQUENTIAL, [{"mesh": {"tp": 2}}, {"mesh": {"cp": 2}}]),
        (
            REZERO,
            [
                {"mesh": {"tp": 2}, "tensor": {"sequence": True}},
                {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
                {"zero": {"stage": 3}},
            ],
        ),
        (UNTIED, [{"mesh": {"tp": 2}, "tensor": {"sequence": True}}, {"mesh": {"cp": 2}}, {"zero": {"stage": 3}}]),
        (MACARON, [{"mesh": {"tp": 2}, "tensor": {"sequence": True}}, {"mesh": {"cp": 2}}, {"zero": {"stage": 3}}]),
        (
            SANDWICH,
            [
                {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
                {"mesh": {"tp": 2}, "recompute": {"every": 1}},
            ],
        ),
    ],
    ids=["parallel", "res_post", "rezero", "scale", "macaron", "sandwich"],
)
@pytest.mark.sampled(3)
def test_a_layout_has_the_numbers_of_one_process(
    model: dict[str, Any], layouts: list[dict[str, Any]], pool: Pool
) -> None:
    expected = alone(pool, model)
    for layout in layouts:
        same(pool, expected, 2, model, layout)


def test_a_norm_over_all_heads_needs_whole_key_heads() -> None:
    (problem,) = refused(PARALLEL, 4, mesh={"tp": 4})
    assert "tp=4 does not divide kv_heads=2, over all of which the keys are normalised" in problem
    assert "qk_norm_over=head" in problem


def test_a_ring_refuses_capped_scores_and_says_what_works() -> None:
    problem, _ = refused(PARALLEL, 2, mesh={"cp": 2}, context={"style": "ring"})
    assert "the tiles of the ring do not cap scores" in problem
    assert "Take ulysses." in problem
