"""Residual streams of several tensors, or with parameters: every layout has the numbers of one process."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, compare, same
from tests.parallel.features import V_SHAPED
from tests.parallel.test_compiled import traced

ATTENTION: dict[str, Any] = {"kind": "attention", "heads": 4, "kv_heads": 2}
FFN: dict[str, Any] = {"kind": "gated", "hidden": 48}
STREAMS: dict[str, Any] = {
    "attention_residuals": {"kind": "attention_residuals", "sublayers": 3},
    "gru_gate": {"kind": "gru_gate", "bias": 0.5},
    "hyper_connections": {"kind": "hyper_connections", "streams": 3, "initial_scale": 0.5},
    "mhc": {"kind": "mhc", "streams": 3, "initial_scale": 0.5, "iterations": 4},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "recompute": (1, {"recompute": {"every": 1}}),
    "selective": (1, {"recompute": {"every": 1, "granularity": "selective"}}),
    "tp": (2, {"mesh": {"tp": 2}}),
    "tp-sequence": (2, {"mesh": {"tp": 2}, "tensor": {"sequence": True}}),
    "cp": (2, {"mesh": {"cp": 2}}),
    "pp": (2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}),
    "pp-interleaved": (2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2}}),
    "pp-zero-bubble": (2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "zero_bubble"}}),
    "offload": (1, {"recompute": {"every": 1, "offload": True}}),
    "pp-offload": (
        2,
        {
            "mesh": {"pp": 2},
            "pipeline": {"schedule": "1f1b"},
            "recompute": {"every": 1, "offload": True},
        },
    ),
    "pp-zbv": (2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "zbv"}}),
    "pp-dualpipe-v": (2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "dualpipe_v"}}),
    "zero1": (2, {"zero": {"stage": 1}}),
    "zero2": (2, {"zero": {"stage": 2}}),
    "zero3": (2, {"zero": {"stage": 3}, "recompute": {"every": 2}}),
}


def decoder(stream: str, **block: Any) -> dict[str, Any]:
    parts = {"mixer": ATTENTION, "ffn": FFN, "dropout": 0.1, "residual": STREAMS[stream], **block}
    return {"kind": "decoder", "width": 32, "stack": {"depth": 4, "block": parts}}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sampled(5)
def test_a_layout_has_the_numbers_of_one_process(layout: str, stream: str, pool: Pool) -> None:
    """On packed documents, with dropout."""
    ranks, parallel = LAYOUTS[layout]
    model = decoder(stream)
    if parallel.get("pipeline", {}).get("schedule") in V_SHAPED:
        model["tied"] = False
    same(pool, alone(pool, model), ranks, model, parallel)


@pytest.mark.long
def test_the_streams_of_reversible_blocks_are_offloaded(pool: Pool) -> None:
    model = decoder("gru_gate", residual="reversible")
    offloaded = {"recompute": {"every": 1, "offload": True, "reversible": False}}
    same(pool, alone(pool, model), 1, model, offloaded)


PAIR_STREAMS = {**STREAMS, "reversible": {"kind": "reversible"}}
STAGES: dict[str, list[int]] = {"in the encoder": [1, 4], "between the stacks": [2, 3], "in the decoder": [3, 2]}


@pytest.mark.long
@pytest.mark.parametrize("stream", PAIR_STREAMS)
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.sampled(5)
def test_stages_of_an_encoder_decoder_have_the_numbers_of_one_process(stages: str, stream: str, pool: Pool) -> None:
    """A stage receives the streams of the stack that goes on, and the other's output or embeddings."""
    parts = {"mixer": ATTENTION, "ffn": FFN, "dropout": 0.1, "residual": PAIR_STREAMS[stream]}
    stacks = {"encoder": {"depth": 2, "block": parts}, "decoder": {"depth": 3, "block": parts}}
    model = {"kind": "encoder_decoder", "width": 32, **stacks}
    pipeline = {"schedule": "1f1b", "blocks_per_stage": STAGES[stages]}
    same(pool, alone(pool, model), 2, model, {"mesh": {"pp": 2}, "pipeline": pipeline})


@pytest.mark.long
@pytest.mark.parametrize("stream", STREAMS)
def test_together(stream: str, pool: Pool) -> None:
    ffn = {"kind": "moe", "experts": 4, "router": {"kind": "topk", "top_k": 2}, "expert": FFN}
    model = decoder(stream, ffn=ffn)
    together = {"mesh": {"tp": 2, "pp": 2}, "tensor": {"sequence": True}, "zero": {"stage": 1}}
    same(pool, alone(pool, model), 4, model, together)


@pytest.mark.long
@pytest.mark.parametrize("stream", STREAMS)
def test_a_compiled_block_has_the_numbers_of_an_eager_one(stream: str, pool: Pool) -> None:
    model = decoder(stream)
    compare(alone(pool, model), pool.run(traced, 1, model, {"compile": True}, timeout_seconds=1800.0))
