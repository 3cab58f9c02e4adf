"""Attention sinks on layouts: the ring by fused kernels and by tiles, ulysses, halo, tp, pipelines and ZeRO; and a
gpt-oss, with windows in every second layer and clamped experts with biases."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, same


def decoder(position: str, **core: Any) -> dict[str, Any]:
    mixer = {"kind": "attention", "heads": 4, "kv_heads": 2, "core": {"kind": "softmax", "sinks": True, **core}}
    block = {"mixer": mixer, "ffn": {"kind": "gated", "hidden": 48}, "dropout": 0.1}
    return {"kind": "decoder", "width": 32, "position": position, "stack": {"depth": 2, "block": block}}


def sliding() -> dict[str, Any]:
    """A window in each block."""
    pattern = {"kind": "band", "left": 5, "right": 0}
    return decoder("rope", kind="block_sparse", block=4, pattern=pattern)


def gpt_oss() -> dict[str, Any]:
    model = sliding()
    stack = model["stack"]
    # The clamp cuts some of both parts of the experts' hidden layers.
    expert = {"kind": "gated", "gate": "quick_geglu", "hidden": 24, "bias": True}
    expert |= {"clamp_value": 0.05, "linear_offset": 1.0}
    router = {"kind": "topk", "top_k": 2, "logit_bias": True, "aux_loss_weight": 0.01}
    stack["block"]["ffn"] = {"kind": "moe", "experts": 4, "router": router, "expert": expert}
    stack["block"]["mixer"]["bias"] = True
    dense = {**stack["block"]["mixer"], "core": {"kind": "softmax", "sinks": True}}
    return {**model, "stack": {**stack, "rules": [{"every": 2, "at": 1, "mixer": dense}]}}


RING = {"mesh": {"cp": 2}, "context": {"style": "ring"}}
ULYSSES = {"mesh": {"cp": 2}, "context": {"style": "ulysses"}}
HALO = {"mesh": {"cp": 2}, "context": {"style": "halo"}}
EXPERTS = {"mesh": {"ep": 2}}
TENSOR = {"mesh": {"tp": 2}, "tensor": {"sequence": True}}
PIPELINE = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}


@pytest.mark.parametrize(
    ("model", "layouts", "sections"),
    [
        (decoder("rope"), [RING, ULYSSES], {}),
        (decoder("alibi"), [RING], {}),
        (decoder("rope"), [RING], {"data": {"cross_documents": False}}),
        (sliding(), [HALO, TENSOR], {}),
        pytest.param(gpt_oss(), [EXPERTS, ULYSSES], {}, marks=pytest.mark.long),
        pytest.param(sliding(), [HALO, ULYSSES], {"data": {"cross_documents": False}}, marks=pytest.mark.long),
        pytest.param(gpt_oss(), [TENSOR, PIPELINE, {"zero": {"stage": 3}}], {}, marks=pytest.mark.long),
        pytest.param(decoder("rope"), [TENSOR, PIPELINE, {"zero": {"stage": 3}}], {}, marks=pytest.mark.long),
        pytest.param(decoder("alibi", soft_cap=0.7), [ULYSSES, TENSOR], {}, marks=pytest.mark.long),
    ],
    ids=["fused", "tiles", "packed", "window", "gpt-oss", "packed windows", "gpt-oss, others", "others", "capped"],
)
def test_a_layout_has_the_numbers_of_one_process(
    model: dict[str, Any], layouts: list[dict[str, Any]], sections: dict[str, Any], pool: Pool
) -> None:
    expected = alone(pool, model, **sections)
    assert expected.gradients["stack.blocks.0.mixer.part.core.sinks"][1].all()
    for layout in layouts:
        same(pool, expected, 2, model, layout, **sections)


@pytest.mark.long
def test_a_rank_of_padding_reduces_the_gradient_of_the_sinks(pool: Pool) -> None:
    """Six tokens, two for each of three ranks: the fourth has none, and computes no scores."""
    short = {"data": {"sequence_length": 6}}
    expected = alone(pool, sliding(), **short)
    same(pool, expected, 4, sliding(), {"mesh": {"cp": 4}, "context": {"style": "halo"}}, **short)
