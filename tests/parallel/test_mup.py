"""muP on every layout: initial weights, learning rates by the width and the head's multiplier, as on one process."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, compare, same, trained
from tests.parallel.models import DENSE, MIXTURE, changed

MUP = {"base_width": 8, "base_head_width": 4}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {**DENSE, "mup": MUP},
    "mixture": {**changed(MIXTURE, stack__rules__0__ffn__shared_combine="sum"), "mup": MUP},
}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "tp2": ("dense", 2, {"mesh": {"tp": 2}}, {}),
    "zero3": ("dense", 2, {"zero": {"stage": 3}}, {}),
    "zero1": ("dense", 2, {"zero": {"stage": 1}}, {}),
    "pp2": ("dense", 2, {"mesh": {"pp": 2}}, {}),
    "ep2": ("mixture", 2, {"mesh": {"ep": 2}}, {}),
    "tp2 x dp2, muon": (
        "mixture",
        4,
        {"mesh": {"tp": 2}, "zero": {"stage": 2}},
        {"kind": "muon", "ns_dtype": "float64"},
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("tp2", "zero3") else pytest.mark.long) for name in LAYOUTS]
)
def test_layouts_train_as_one_process_does(name: str, pool: Pool) -> None:
    model, ranks, parallel, optimizer = LAYOUTS[name]
    sections = {"optimizer": {"kind": "adamw", **optimizer}}
    same(pool, alone(pool, MODELS[model], **sections), ranks, MODELS[model], parallel, **sections)


def test_another_base_width_is_seen(pool: Pool) -> None:
    one = alone(pool, MODELS["dense"])
    other = {**MODELS["dense"], "mup": {**MUP, "base_width": 16}}
    with pytest.raises(AssertionError):
        compare(one, pool.run(trained, 2, other, {"mesh": {"tp": 2}}))
