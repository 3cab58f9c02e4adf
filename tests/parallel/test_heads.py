"""Attention whose heads talk, have spans or losses, on layouts that shard heads, sequences, layers and samples."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, asked, same

Section = dict[str, Any]
TENSOR: Section = {"mesh": {"tp": 2}, "tensor": {"sequence": True}, "recompute": {"every": 1}}
CONTEXT: Section = {"mesh": {"cp": 2}}
STAGES: Section = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}
DATA: Section = {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}}
MIXERS: dict[str, Section] = {
    "talking_heads": {"kind": "attention", "core": {"kind": "talking_heads"}},
    "adaptive_span": {
        "kind": "attention",
        "core": {
            "kind": "adaptive_span", "max_span": 16, "ramp": 4.0, "initial_span": 5.0, "span_loss_weight": 0.02,
        },
    },
    "dynamic_span": {"kind": "dynamic_span", "max_span": 16, "ramp": 4.0, "span_loss_weight": 0.02},
    "local_transformer": {"kind": "attention", "core": {"kind": "local_transformer", "window_from": "layer"}},
    "persistent_memory": {"kind": "attention", "kv_heads": 2, "core": {"kind": "persistent_memory", "persistent": 5}},
    "multi_scale": {
        "kind": "attention",
        "core": {"kind": "block_sparse", "block": 4, "pattern": {"kind": "multi_scale", "scales": [1, 3, 8]}},
    },
    "disagreement": {
        "kind": "attention",
        "kv_heads": 2,
        "core": {"kind": "disagreement", "subspace_weight": 0.3, "position_weight": 0.4, "output_weight": 0.5},
    },
    "guided_attention": {
        "kind": "guided_attention",
        "patterns": ["previous", "first", "delimiter"],
        "delimiter_ids": [20, 30, 40],
        "guidance_weight": 0.05,
    },
    "collaborative": {"kind": "collaborative", "shared_width": 12},
    "narrow_and_local": {
        "kind": "narrow_and_local",
        "narrow_width": 3,
        "bias": True,
        "local": {"kind": "block_sparse", "block": 4, "pattern": {"kind": "band", "left": 5, "right": 5}},
    },
    "branched_attention": {"kind": "branched_attention", "kv_heads": 2, "hidden": 6},
    "hamilton": {"kind": "attention", "kv_heads": 2, "dropout": 0.0, "core": {"kind": "hamilton"}},
    "dynamic_mask": {"kind": "dynamic_mask"},
    "routing_aggregation": {"kind": "routing_aggregation", "capsules": 8, "inverse_temperature": 0.5},
}  # fmt: skip
ABLE = {
    "talking_heads": [STAGES, DATA],
    "adaptive_span": [TENSOR, CONTEXT, STAGES, DATA],
    "dynamic_span": [TENSOR, STAGES, DATA],
    "local_transformer": [TENSOR, CONTEXT, STAGES],
    "persistent_memory": [TENSOR, CONTEXT, STAGES, DATA],
    "multi_scale": [TENSOR, CONTEXT, STAGES, DATA],
    "disagreement": [TENSOR, STAGES, DATA],
    "guided_attention": [TENSOR, STAGES],
    "collaborative": [TENSOR, CONTEXT, STAGES],
    "narrow_and_local": [TENSOR, CONTEXT, STAGES, DATA],
    "branched_attention": [TENSOR, CONTEXT, STAGES, DATA],
    "hamilton": [TENSOR, CONTEXT, STAGES],
    "dynamic_mask": [TENSOR, STAGES],
    "routing_aggregation": [CONTEXT, STAGES, DATA],
}


def model(mixer: str) -> Section:
    block = {"mixer": {"heads": 4, "dropout": 0.1, **MIXERS[mixer]}, "ffn": {"kind": "dense", "hidden": 48}}
    return {"kind": "decoder", "width": 32, "position": "none", "stack": {"depth": 2, "block": block}}


@pytest.mark.long
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.sampled(3)
def test_a_layout_has_the_numbers_of_one_process(mixer: str, pool: Pool) -> None:
    expected = alone(pool, model(mixer))
    for layout in ABLE[mixer]:
        same(pool, expected, 2, model(mixer), layout)


@pytest.mark.long
@pytest.mark.parametrize("mixer", ["adaptive_span", "disagreement", "branched_attention"])
def test_sums_and_losses_of_heads_are_the_same_on_sharded_heads(mixer: str, pool: Pool) -> None:
    same(pool, alone(pool, model(mixer)), 2, model(mixer), {"mesh": {"tp": 2}})


def test_weights_of_branches_are_projected_where_data_parallel_ranks_shard_them(pool: Pool) -> None:
    expected = alone(pool, model("branched_attention"))
    for name in ("kappa", "alpha"):
        (_, weights) = expected.ended[f"stack.blocks.0.mixer.part.{name}.weight"]
        assert abs(weights.sum().item() - 1) < 1e-12
        assert weights.min() >= 0
        assert weights.std() > 0, "they are learned"
    same(pool, expected, 2, model("branched_attention"), DATA)


def refused(mixer: str, parallel: Section) -> list[str]:
    return [str(problem) for problem in asked(model(mixer), parallel).check(2)]


def test_deepspeed_is_refused_where_weights_are_projected() -> None:
    deepspeed = {"mesh": {"dp_shard": 2}, "zero": {"stage": 1, "engine": "deepspeed"}}
    problem = next(one for one in refused("branched_attention", deepspeed) if "simplex" in one)
    assert "mixer.part.kappa.weight is projected onto the simplex after each step" in problem
    assert "Take torch, or model.stack.block.mixer.kind=attention." in problem


def test_what_a_layout_cannot_shard_is_refused_with_what_would_work() -> None:
    (problem,) = refused("talking_heads", {"mesh": {"tp": 2}})
    assert "core 'talking_heads' mixes heads, so tp cannot shard them" in problem
    assert "Take 1, or model.stack.block.mixer.core.kind=" in problem
    assert "talking_heads" not in problem.split("core.kind=")[1]
    for mixer in ("talking_heads", "disagreement"):
        (problem,) = refused(mixer, {"mesh": {"cp": 2}})
        assert f"a sequence cannot be sharded over cp=2 for core '{mixer}'" in problem
        assert "the core supports none" in problem
    (problem,) = refused("routing_aggregation", {"mesh": {"tp": 2}})
    assert "mixer 'routing_aggregation' mixes the heads of a token, so tp cannot shard them" in problem
    assert "Take 1, or model.stack.block.mixer.kind=attention." in problem
    for mixer in ("dynamic_span", "guided_attention", "dynamic_mask"):
        (problem,) = refused(mixer, {"mesh": {"cp": 2}})
        assert f"mixer '{mixer}' mixes the full sequence" in problem
        assert "Take 1, or parallel.context.gather=true, or model.stack.block.mixer.kind=attention, " in problem
