"""Attention sinks on layouts: the ring by fused kernels and by tiles, ulysses, tensor parallelism, pipelines, ZeRO."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, same


def decoder(position: str, **core: Any) -> dict[str, Any]:
    mixer = {"kind": "attention", "heads": 4, "kv_heads": 2, "core": {"kind": "softmax", "sinks": True, **core}}
    block = {"mixer": mixer, "ffn": {"kind": "gated", "hidden": 48}, "dropout": 0.1}
    return {"kind": "decoder", "width": 32, "position": position, "stack": {"depth": 2, "block": block}}


RING = {"mesh": {"cp": 2}, "context": {"style": "ring"}}
ULYSSES = {"mesh": {"cp": 2}, "context": {"style": "ulysses"}}
TENSOR = {"mesh": {"tp": 2}, "tensor": {"sequence": True}}
PIPELINE = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}


@pytest.mark.parametrize(
    ("model", "layouts", "sections"),
    [
        (decoder("rope"), [RING, ULYSSES], {}),
        (decoder("alibi"), [RING], {}),
        (decoder("rope"), [RING], {"data": {"cross_documents": False}}),
        pytest.param(decoder("rope"), [TENSOR, PIPELINE, {"zero": {"stage": 3}}], {}, marks=pytest.mark.long),
        pytest.param(decoder("alibi", soft_cap=0.7), [ULYSSES, TENSOR], {}, marks=pytest.mark.long),
    ],
    ids=["fused", "tiles", "packed", "others", "capped"],
)
def test_a_layout_has_the_numbers_of_one_process(
    model: dict[str, Any], layouts: list[dict[str, Any]], sections: dict[str, Any], pool: Pool
) -> None:
    expected = alone(pool, model, **sections)
    assert expected.gradients["stack.blocks.0.mixer.part.core.sinks"][1].all()
    for layout in layouts:
        same(pool, expected, 2, model, layout, **sections)
