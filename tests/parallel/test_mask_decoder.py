"""An encoder whose last block decodes masked tokens, on layouts that shard heads, sequences, layers and samples."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, asked, same

Section = dict[str, Any]
DEBERTA = {"kind": "deberta", "buckets": 8, "distance": 16, "norm": {"kind": "layer"}, "shared": True}
BLOCK = {
    "mixer": {"kind": "attention", "heads": 4, "bias": True},
    "ffn": {"kind": "dense", "hidden": 48},
    "norm": "layer",
    "residual": "post",
    "dropout": 0.1,
}
MODEL = {
    "kind": "encoder",
    "width": 32,
    "position": DEBERTA,
    "stack": {"depth": 3, "block": BLOCK, "mask_decoder": {"steps": 2}},
}


def test_a_pipeline_has_the_numbers_of_one_process(pool: Pool) -> None:
    layout = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}, "recompute": {"every": 1}}
    same(pool, alone(pool, MODEL, steps=2), 2, MODEL, layout, steps=2)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        {"mesh": {"tp": 2}, "recompute": {"every": 1}},
        {"mesh": {"cp": 2}, "context": {"style": "ring"}},
        {"mesh": {"cp": 2}, "context": {"style": "ulysses"}},
        {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}},
    ],
    ids=["tp", "ring", "ulysses", "zero"],
)
def test_a_layout_has_the_numbers_of_one_process(layout: Section, pool: Pool) -> None:
    same(pool, alone(pool, MODEL, steps=2), 2, MODEL, layout, steps=2)


def test_sequence_parallelism_is_refused() -> None:
    (problem,) = asked(MODEL, {"mesh": {"tp": 2}, "tensor": {"sequence": True}}).check(2)
    assert "stack.mask_decoder reads the tokens between the blocks" in str(problem)
    assert "Take false, or model.stack.mask_decoder=null." in str(problem)
