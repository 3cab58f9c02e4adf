"""Merged priors, and priors alone, on layouts that shard heads, sequences, layers and samples."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, same

Section = dict[str, Any]
TENSOR: Section = {"mesh": {"tp": 2}, "tensor": {"sequence": True}, "recompute": {"every": 1}}
STAGES: Section = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}
CONTEXT: Section = {"mesh": {"cp": 2}}
DATA: Section = {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}}
CORE = {"kind": "general_prior", "merge": "mix", "previous": 0.5, "learned": True}
ONLY = [
    {"kind": "prior_only", "heads": 4, "generator": generator, "dropout": 0.1}
    for generator in ("alibi", "relative", "tupe")
]


def model(position: str, core: Section) -> Section:
    mixer = {"kind": "attention", "heads": 4, "kv_heads": 2, "dropout": 0.1, "core": core}
    block = {"mixer": mixer, "ffn": {"kind": "dense", "hidden": 48}}
    return {"kind": "decoder", "width": 32, "position": position, "stack": {"depth": 2, "block": block}}


@pytest.mark.long
@pytest.mark.parametrize(
    ("position", "core"),
    [("relative", CORE), ("shaw", {"kind": "general_prior", "merge": "multiply"}), ("alibi", CORE)],
)
def test_a_merged_prior_has_the_numbers_of_one_process(position: str, core: Section, pool: Pool) -> None:
    one = alone(pool, model(position, core), steps=2)
    for layout in (TENSOR, STAGES, CONTEXT, DATA):
        same(pool, one, 2, model(position, core), layout, steps=2)


@pytest.mark.long
def test_a_prior_alone_has_the_numbers_of_one_process(pool: Pool) -> None:
    block = {"ffn": {"kind": "dense", "hidden": 48}}
    rules = [{"every": 3, "at": at, "mixer": mixer} for at, mixer in enumerate(ONLY)]
    network = {
        "kind": "decoder",
        "width": 32,
        "position": "learned",
        "stack": {"depth": 3, "block": block, "rules": rules},
    }
    one = alone(pool, network, steps=2)
    for layout in (TENSOR, STAGES, DATA):
        same(pool, one, 2, network, layout, steps=2)
