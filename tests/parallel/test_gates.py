"""Gates of sublayers on layouts: noise, budgets and the budgets' loss are those of one process."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, same

GATES = {"budgets": [0.25, 0.75], "loss_weight": 0.5, "hidden": 6}
BLOCK: dict[str, Any] = {
    "mixer": {"kind": "attention", "heads": 4},
    "ffn": {"kind": "dense", "hidden": 24},
    "dropout": 0.1,
    "gates": GATES,
}
MODEL: dict[str, Any] = {"kind": "decoder", "width": 32, "position": "learned", "stack": {"depth": 2, "block": BLOCK}}

PAIR: dict[str, Any] = {
    **{key: MODEL[key] for key in ("width", "position")},
    "kind": "encoder_decoder",
    "encoder": MODEL["stack"],
    "decoder": MODEL["stack"],
}
PIPELINE: dict[str, Any] = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}


@pytest.mark.long
def test_a_layout_has_the_numbers_of_one_process(pool: Pool) -> None:
    expected = alone(pool, MODEL)
    for layout in (
        {"mesh": {"tp": 2}, "recompute": {"every": 1}},
        {"mesh": {"cp": 2}},
        PIPELINE,
        {"zero": {"stage": 3}, "recompute": {"every": 2, "granularity": "selective"}},
    ):
        same(pool, expected, 2, MODEL, layout)


@pytest.mark.long
def test_an_encoder_decoder_has_the_numbers_of_one_process(pool: Pool) -> None:
    expected = alone(pool, PAIR)
    for layout in ({"mesh": {"tp": 2}}, {"mesh": {"cp": 2}}):
        same(pool, expected, 2, PAIR, layout)


@pytest.mark.long
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"objective": {"kind": "denoising"}, "data": {"cross_documents": False}}, id="packed"),
        pytest.param(
            {
                "objective": {"kind": "seq2seq"},
                "data": {"source": {"kind": "pairs", "paths": ["x"]}, "cross_documents": False},
            },
            id="pairs",
        ),
    ],
)
def test_budgets_over_padded_shards_are_those_of_one_process(pool: Pool, sections: dict[str, Any]) -> None:
    """Each rank of cp has the whole loss of the budgets, a part of the weight, and some of the padding."""
    same(pool, alone(pool, PAIR, **sections), 2, PAIR, {"mesh": {"cp": 2}}, **sections)
