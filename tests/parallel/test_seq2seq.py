"""Pairs on layouts: padded sources and targets, and a smoothed loss whose vocabulary is sharded."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import Found, alone, same

BLOCK = {
    "mixer": {"kind": "attention", "heads": 4},
    "ffn": {"kind": "dense", "hidden": 24, "activation": "relu", "bias": True},
    "norm": "layer",
    "residual": "post",
    "dropout": 0.1,
}
MODEL: dict[str, Any] = {
    "kind": "encoder_decoder",
    "width": 32,
    "position": "sinusoidal",
    "scale_embeddings": True,
    "dropout": 0.1,
    "encoder": {"depth": 2, "block": BLOCK},
    "decoder": {"depth": 2, "block": BLOCK},
}
SECTIONS: dict[str, Any] = {
    "objective": {"kind": "seq2seq", "label_smoothing": 0.1},
    "data": {"source": {"kind": "stdlib_pairs"}, "max_target_length": 13},
}


@pytest.fixture(scope="module")
def one(pool: Pool) -> Found:
    return alone(pool, MODEL, **SECTIONS)


@pytest.mark.parametrize(
    "layout",
    [
        {"mesh": {"dp_shard": 2}},
        {"mesh": {"tp": 2}},
        {"mesh": {"tp": 2}, "tensor": {"sequence": True}, "recompute": {"every": 1}},
        {"mesh": {"cp": 2}},
        {"mesh": {"cp": 2}, "context": {"style": "ulysses"}},
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
        {"zero": {"stage": 3}},
    ],
    ids=["dp", "tp", "sp", "ring", "ulysses", "pp", "zero3"],
)
@pytest.mark.sampled(3)
def test_a_layout_has_the_numbers_of_one_process(pool: Pool, one: Found, layout: dict[str, Any]) -> None:
    same(pool, one, 2, MODEL, layout, **SECTIONS)


def test_a_padded_target_with_an_unpadded_source_is_sharded(pool: Pool) -> None:
    """Ranks of cp divide the source's 24 tokens evenly and pad the target's 13, whose padding has nothing to read."""
    data = {**SECTIONS["data"], "sequence_length": 24}
    sections = {**SECTIONS, "data": data}
    same(pool, alone(pool, MODEL, **sections), 2, MODEL, {"mesh": {"cp": 2}}, **sections)


def test_a_decoder_smooths_over_a_sharded_vocabulary(pool: Pool) -> None:
    model = {"kind": "decoder", "width": 32, "tied": False, "logit_soft_cap": 5.0, "stack": {"depth": 1}}
    sections = {"objective": {"kind": "causal", "label_smoothing": 0.2}}
    smoothed = alone(pool, model, **sections)
    same(pool, smoothed, 2, model, {"mesh": {"tp": 2}}, **sections)
    plain = alone(pool, model)
    assert smoothed.numbers[0] != plain.numbers[0]


def test_a_decoder_has_the_z_loss_on_layouts(pool: Pool) -> None:
    model = {"kind": "decoder", "width": 32, "tied": False, "logit_soft_cap": 5.0, "stack": {"depth": 2}}
    sections = {"objective": {"kind": "causal", "z_loss_weight": 0.2}}
    expected, plain = alone(pool, model, **sections), alone(pool, model)
    for mesh in ({"tp": 2}, {"cp": 2}, {"pp": 2}):
        same(pool, expected, 2, model, {"mesh": mesh}, **sections)
    assert expected.numbers[0] > plain.numbers[0] + 1
