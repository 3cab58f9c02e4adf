"""Universal Transformers on layouts: halting with its ponder cost, and the signals of position and step."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, same
from tests.parallel.test_tensor import refused


def model(**stack: Any) -> dict[str, Any]:
    mixer = {"kind": "attention", "heads": 4}
    block = {"mixer": mixer, "ffn": {"kind": "dense", "hidden": 24}, "norm": "layer", "residual": "post"}
    stack = {"depth": 3, "share": "all", "step_signal": True, "block": {**block, "dropout": 0.1}, **stack}
    return {"kind": "decoder", "width": 32, "position": "none", "stack": stack}


HALTING = model(halting={"epsilon": 0.1, "ponder_weight": 0.1, "bias": 0.0})
STEPS = model()
PIPELINE = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (HALTING, [{"mesh": {"tp": 2}, "recompute": {"every": 1}}, {"zero": {"stage": 3}}]),
        (STEPS, [{"mesh": {"cp": 2}}, PIPELINE]),
    ],
    ids=["halting", "steps"],
)
def test_a_layout_has_the_numbers_of_one_process(
    model: dict[str, Any], layouts: list[dict[str, Any]], pool: Pool
) -> None:
    expected = alone(pool, model)
    for layout in layouts:
        same(pool, expected, 2, model, layout)


def test_a_layout_that_shards_the_steps_is_refused() -> None:
    told = "which tokens have halted"
    assert any(
        told in problem and "Take 1, or model.stack.halting=null" in problem
        for problem in refused(HALTING, 2, **PIPELINE)
    )
    (problem,) = refused(HALTING, 2, mesh={"cp": 2})
    assert "ponder cost is a mean over all tokens" in problem
    for asked, keys in ((HALTING, "stack.step_signal and stack.halting read"), (STEPS, "stack.step_signal reads")):
        (problem,) = refused(asked, 2, mesh={"tp": 2}, tensor={"sequence": True})
        assert f"{keys} the tokens between the blocks" in problem
