"""Attention scores that blocks hand to the next one, on layouts: RealFormer, LazyFormer and Evolving Attention."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, asked, same
from tests.parallel.test_tensor import refused
from xscale.parallel import context
from xscale.settings.settings import build_on_meta

FFN = {"kind": "dense", "hidden": 24}


def model(core: dict[str, Any], *, kind: str = "decoder", lazy: bool = False, **mixer: Any) -> dict[str, Any]:
    attention = {"kind": "attention", "heads": 4, "core": core, **mixer}
    rules = [{"every": 2, "at": 1, "mixer": {"kind": "reused_attention", "heads": 4, "dropout": 0.1}}]
    block = {"mixer": attention, "ffn": FFN, "dropout": 0.1}
    stack = {"depth": 4 if lazy else 2, "block": block, "rules": rules if lazy else []}
    stacks = {"encoder": stack, "decoder": stack} if kind == "encoder_decoder" else {"stack": stack}
    return {"kind": kind, "width": 32, "position": "learned", **stacks}


LEARNED = model({"kind": "prior_scores", "previous": 0.5, "learned": True}, kv_heads=2, dropout=0.1)
LAZY = model({"kind": "prior_scores", "previous": 0.0}, lazy=True)
LAZY_PAIR = model({"kind": "prior_scores", "previous": 0.0}, kind="encoder_decoder", lazy=True)
EVOLVING = model({"kind": "evolving", "alpha": 0.3, "beta": 0.4})
DEEP = {**LEARNED, "stack": {**LEARNED["stack"], "depth": 5}}
BOTH = model({"kind": "prior_scores"}, kind="encoder_decoder")
PIPELINE = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (
            LEARNED,
            [
                {"mesh": {"tp": 2}, "tensor": {"sequence": True}, "recompute": {"every": 1}},
                {"mesh": {"cp": 2}, "recompute": {"every": 1, "granularity": "selective"}},
                {"zero": {"stage": 3}},
            ],
        ),
        (LAZY, [{"mesh": {"tp": 2}}, {"mesh": {"cp": 2}}, PIPELINE, {"zero": {"stage": 3}, "recompute": {"every": 1}}]),
        (LAZY_PAIR, [{"mesh": {"cp": 2}, "recompute": {"every": 1}}]),
        (EVOLVING, [{"zero": {"stage": 3}, "recompute": {"every": 1}}, PIPELINE]),
        (
            DEEP,
            [
                {**PIPELINE, "recompute": {"every": 2}},
                {"mesh": {"pp": 2}, "pipeline": {"schedule": "interleaved_1f1b"}},
                {"mesh": {"pp": 2}, "pipeline": {"schedule": "zero_bubble"}},
            ],
        ),
        (BOTH, [{"mesh": {"cp": 2}}, {"mesh": {"pp": 2}, "pipeline": {"blocks_per_stage": [2, 2]}}]),
    ],
    ids=["learned", "lazy", "lazy pair", "evolving", "deep", "both stacks"],
)
@pytest.mark.sampled(3)
def test_a_layout_has_the_numbers_of_one_process(
    model: dict[str, Any], layouts: list[dict[str, Any]], pool: Pool
) -> None:
    sections: dict[str, Any] = {"objective": {"kind": "span"}} if model["kind"] == "encoder_decoder" else {}
    expected = alone(pool, model, **sections)
    for layout in layouts:
        same(pool, expected, 2, model, layout, **sections)


@pytest.mark.long
def test_reused_scores_have_heads_sharded_over_both_axes(pool: Pool) -> None:
    layout = {"mesh": {"cp": 2, "tp": 2}, "tensor": {"sequence": True}, "recompute": {"every": 1}}
    same(pool, alone(pool, LAZY), 4, LAZY, layout)


def test_scores_are_sent_between_stages_whose_heads_are_sharded(pool: Pool) -> None:
    layout = {"mesh": {"pp": 2, "tp": 2}, "tensor": {"sequence": True}, "pipeline": {"schedule": "1f1b"}}
    same(pool, alone(pool, DEEP), 4, DEEP, layout)


def test_global_tokens_have_scores_between_stages(pool: Pool) -> None:
    encoder = {**model({"kind": "prior_scores"}, kind="encoder"), "global_tokens": 2}
    sections: dict[str, Any] = {"objective": {"kind": "masked"}, "data": {"cross_documents": True}}
    same(pool, alone(pool, encoder, **sections), 2, encoder, PIPELINE, **sections)


def test_a_stage_of_an_encoder_decoder_or_under_cp_cannot_begin_with_a_block_that_reads_scores() -> None:
    cut = {**PIPELINE, "pipeline": {"schedule": "1f1b", "blocks_per_stage": [1, 3]}}
    (problem,) = refused(BOTH, 2, **cut)
    assert "a stage begins with encoder.blocks.1, which reads the attention scores of the block before" in problem
    assert "4 x " in problem
    assert "Take [2, 2]. Or take tp" in problem
    (problem,) = refused(LEARNED, 4, **{**PIPELINE, "mesh": {"pp": 2, "cp": 2}})
    assert "with cp > 1 stages pass on hidden states alone" in problem
    assert "Take 1, or parallel.mesh.cp=1." in problem


def test_a_convolution_over_heads_needs_all_of_them() -> None:
    (problem,) = refused(EVOLVING, 2, mesh={"tp": 2})
    assert "core 'evolving' mixes heads, so tp cannot shard them" in problem
    (problem,) = refused(EVOLVING, 2, mesh={"cp": 2})
    assert "parallel.context.gather=true" in problem


def test_reused_scores_are_not_sent() -> None:
    recipe = asked(LAZY, {"mesh": {"cp": 2, "tp": 2}}, data={"sequence_length": 64})
    sent = context.estimate(build_on_meta(recipe, 67), recipe.parallel, 64)
    # Two blocks send q, k, v and o, and two v and o: of two heads of 8 channels, half of 32 tokens.
    assert sent == {"ulysses": (2 * 4 + 2 * 2) * 2 * 8 * 32 / 2}


def test_reused_scores_are_sharded_by_heads() -> None:
    reused, core = refused(LAZY, 3, mesh={"cp": 3})
    assert "cp=3 for mixer 'reused_attention': cp x tp = 3 does not divide heads=4" in reused + core
    assert "Take 1, 2 or 4." in reused + core
    problems = " ".join(refused(LAZY, 2, mesh={"cp": 2}, context={"style": "ring"}))
    assert "mixer 'reused_attention' has scores with a shard of the heads" in problems
