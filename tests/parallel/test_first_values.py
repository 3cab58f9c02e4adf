"""Values of the first layer of RWKV-7 that later ones mix into theirs, and channel mixing, on layouts."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, asked, same
from tests.parallel.test_recurrent_mixers import MIXERS
from tests.parallel.test_tensor import refused
from xscale.parallel import context
from xscale.settings.settings import build_on_meta

RWKV = {**MIXERS["rwkv7"], "value_latent_width": 5}
FFN = {"kind": "rwkv7_channel_mixing", "hidden": 24}


def model(depth: int, *others: int, kind: str = "decoder") -> dict[str, Any]:
    """Blocks of RWKV-7, and of gated linear attention where `others` says so."""
    rules = [{"every": depth, "at": at, "mixer": {"kind": "gated_linear_attention", "heads": 4}} for at in others]
    stack = {"depth": depth, "block": {"mixer": RWKV, "ffn": FFN, "dropout": 0.1}, "rules": rules}
    return {"kind": kind, "width": 32, "position": "none", "stack": stack}


DEEP = model(4)
HYBRID = model(5, 0, 2)
PIPELINE: dict[str, Any] = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}
LAYOUTS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "pp and tp": (DEEP, 4, {**PIPELINE, "mesh": {"pp": 2, "tp": 2}, "tensor": {"sequence": True}}),
    "pp and cp": (DEEP, 4, {**PIPELINE, "mesh": {"pp": 2, "cp": 2}, "recompute": {"every": 2}}),
    "four stages": (DEEP, 2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "interleaved_1f1b"}}),
    "zero bubble": (DEEP, 2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "zero_bubble"}}),
    "hybrid": (HYBRID, 2, {**PIPELINE, "pipeline": {"schedule": "1f1b", "blocks_per_stage": [3, 2]}}),
    "begins later": (HYBRID, 2, {**PIPELINE, "pipeline": {"schedule": "1f1b", "blocks_per_stage": [1, 4]}}),
    "tp": (DEEP, 2, {"mesh": {"tp": 2}, "recompute": {"every": 1, "granularity": "selective"}}),
    "cp and tp": (DEEP, 4, {"mesh": {"cp": 2, "tp": 2}, "recompute": {"every": 1}}),
    "zero3": (DEEP, 2, {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}, "recompute": {"every": 1}}),
    "compiled": (DEEP, 1, {"compile": True, "recompute": {"every": 2}}),
}
QUICK = ("pp and tp",)


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[] if layout in QUICK else [pytest.mark.long]) for layout in LAYOUTS]
)
def test_a_layout_trains_as_one_process(layout: str, pool: Pool) -> None:
    section, ranks, parallel = LAYOUTS[layout]
    same(pool, alone(pool, section), ranks, section, parallel)


def test_a_shard_of_the_sequence_gets_one_token_for_each_token_shift() -> None:
    recipe = asked(DEEP, {"mesh": {"cp": 4}}, data={"sequence_length": 64})
    sent = context.estimate(build_on_meta(recipe, 67), recipe.parallel, 64)
    # Three of four ranks send the last of their tokens, once for each mixer and each ffn.
    assert sent["neighbours"] == 2 * 4 * 32 * 3 / 4


def test_stages_of_an_encoder_decoder_hand_on_no_values() -> None:
    decoder = model(4)["stack"]
    attention = {"mixer": {"kind": "attention", "heads": 4}}
    pair = {
        "kind": "encoder_decoder",
        "width": 32,
        "position": "none",
        "encoder": {"depth": 2, "block": {**attention, "ffn": FFN}},
        "decoder": {**decoder, "block": {**decoder["block"], "cross": attention["mixer"]}},
    }
    (problem,) = refused(pair, 4, mesh={"pp": 4}, pipeline={"schedule": "1f1b"})
    assert (
        "blocks read the values of the first layer, and stages of an encoder-decoder pass on hidden states" in problem
    )
    assert "Take 1, or model.decoder.block.mixer.value_latent_width=null." in problem
