"""Exits on layouts: their losses, their gradients and the metrics of one process."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, same
from tests.parallel.test_tensor import refused


def model(kind: str = "decoder", *, tied: bool = True, depth: int = 3, **exits: Any) -> dict[str, Any]:
    block = {"mixer": {"kind": "attention", "heads": 4}, "ffn": {"kind": "dense", "hidden": 24}, "dropout": 0.1}
    stack = {"depth": depth, "block": block, "exits": exits}
    return {"kind": kind, "width": 32, "position": "learned", "tied": tied, "stack": stack}


OWN = model(weights="linear")
SHARED = model("encoder", tied=False, head="shared")
AHEAD = model(stop="by_depth", second_target=0.5)
DIVERSE = model("encoder", diversity=0.2)
STAGES = model("encoder", two_stage=0.5)
CERTAIN = {"criterion": "entropy", "threshold": 4.15}
NEAR = {"criterion": "uncertainty", "threshold": 0.985, "window": 1}
PIPELINE = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}
SEQUENCE = {"mesh": {"tp": 2}, "tensor": {"sequence": True}, "recompute": {"every": 1}}

RINGS = [{"mesh": {"cp": 2}, "context": {"style": style}} for style in ("ring", "ulysses")]


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (OWN, [PIPELINE, SEQUENCE, {"mesh": {"cp": 2}}, {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}}]),
        (SHARED, [{"mesh": {"tp": 2}}, {"mesh": {"cp": 2}}, {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}}]),
        (model("encoder", depth=4, blocks=[2], head="shared"), [PIPELINE | {"zero": {"stage": 3}}]),
        (AHEAD, [PIPELINE, {"mesh": {"tp": 2}}, *RINGS, {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}}]),
        (model(self_sampling=0.5, policy=CERTAIN), [{"mesh": {"tp": 2}}, {"mesh": {"cp": 2}}]),
        pytest.param(DIVERSE, [SEQUENCE, {"mesh": {"cp": 2}}, {"zero": {"stage": 3}}], marks=pytest.mark.long),
        (model(self_sampling=0.5, policy=NEAR), [{"mesh": {"dp_shard": 2}, "zero": {"stage": 3}}]),
    ],
    ids=[
        "own",
        "shared",
        "shared on the last stage",
        "second target",
        "self-sampling",
        "diverse",
        "self-sampling in a window",
    ],
)
@pytest.mark.sampled(3)
def test_a_layout_has_the_numbers_of_one_process(
    model: dict[str, Any], layouts: list[dict[str, Any]], pool: Pool
) -> None:
    expected = alone(pool, model)
    assert expected.statistics, "the losses of the exits are among the statistics"
    for layout in layouts:
        same(pool, expected, 2, model, layout)


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
def test_a_split_backward_has_the_numbers_of_one_process(schedule: str, pool: Pool) -> None:
    asked = model(depth=4, tied=False)
    same(pool, alone(pool, asked), 2, asked, {"mesh": {"pp": 2}, "pipeline": {"schedule": schedule}})


def test_the_second_stage_has_the_numbers_of_one_process(pool: Pool) -> None:
    groups = [{"match": "*.exits.*", "since": 0.5}, {"match": "*", "until": 0.5}]
    sections: dict[str, Any] = {"optimizer": {"kind": "adamw", "groups": groups}}
    expected = alone(pool, STAGES, **sections)
    for layout in (PIPELINE, {"mesh": {"tp": 2}}, {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}}):
        same(pool, expected, 2, STAGES, layout, **sections)


def test_stages_do_not_hand_on_the_predictions_of_exits() -> None:
    (problem,) = refused(DIVERSE, 2, **PIPELINE)
    assert "stages do not pass on logits. Take 1, or model.stack.exits.diversity=0.0." in problem


def test_an_exit_away_from_the_shared_head_is_refused() -> None:
    (problem,) = refused(model(depth=4, head="shared"), 2, **PIPELINE)
    assert "the exit after block 0 predicts by the model's head, which is on the last stage, from block 2" in problem
    assert "Take 1, or model.stack.exits.head=own, or 'model.stack.exits.blocks=[2]'." in problem
