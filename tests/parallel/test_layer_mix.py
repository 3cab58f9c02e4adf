"""Transparent attention on layouts: the decoder's mixes of all encoder layers."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, same
from tests.parallel.test_tensor import refused

BLOCK = {"mixer": {"kind": "attention", "heads": 4}, "ffn": {"kind": "dense", "hidden": 24}, "dropout": 0.1}
MODEL: dict[str, Any] = {
    "kind": "encoder_decoder",
    "width": 32,
    "position": "learned",
    "transparent": True,
    "transparent_dropout": 0.2,
    "encoder": {"depth": 2, "block": BLOCK},
    "decoder": {"depth": 2, "block": BLOCK},
}


@pytest.mark.long
def test_a_layout_has_the_numbers_of_one_process(pool: Pool) -> None:
    expected = alone(pool, MODEL)
    for layout in (
        {"mesh": {"tp": 2}, "tensor": {"sequence": True}, "recompute": {"every": 1}},
        {"mesh": {"tp": 2}},
        {"mesh": {"cp": 2}},
        {"zero": {"stage": 3}},
    ):
        same(pool, expected, 2, MODEL, layout)


def test_stages_do_not_pass_on_all_layers() -> None:
    problems = refused(MODEL, 2, mesh={"pp": 2}, pipeline={"schedule": "1f1b"})
    (problem,) = [problem for problem in problems if "outputs of all encoder blocks" in problem]
    assert "Take 1." in problem
