"""Parameters that all layers share, on layouts: tables of cores (Linformer, NPRF), Transformer-XL's u and v; and YOSO's
hash functions."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, asked, same

CORES: dict[str, dict[str, Any]] = {
    "linformer": {"kind": "linformer", "projected_length": 6, "sharing": "layers"},
    "nprf": {"kind": "nprf", "features": 6, "shared": True},
    "yoso": {"kind": "yoso", "hashes": 4, "convolution": 3},
}


@pytest.mark.long
@pytest.mark.parametrize(("kind", "core"), [("encoder", "linformer"), ("decoder", "nprf"), ("encoder", "yoso")])
def test_a_layout_has_the_numbers_of_one_process(kind: str, core: str, pool: Pool) -> None:
    mixer = {"kind": "attention", "heads": 4, "kv_heads": 2, "core": CORES[core]}
    model = {"kind": kind, "width": 32, "position": "none", "stack": {"depth": 2, "block": {"mixer": mixer}}}
    sections: dict[str, Any] = {"data": {"cross_documents": core != "yoso"}}
    expected = alone(pool, model, **sections)
    assert sum("core_tables" in name for name in expected.ended) == (core != "yoso")
    for layout in (
        {"mesh": {"tp": 2}, "tensor": {"sequence": True}, "recompute": {"every": 1}},
        {"mesh": {"cp": 2}},
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
        {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}},
    ):
        same(pool, expected, 2, model, layout, **sections)


def of_transformer_xl(depth: int) -> dict[str, Any]:
    """A decoder whose layers have one u and v."""
    mixer = {"kind": "attention", "heads": 4, "kv_heads": 2}
    stack = {"depth": depth, "block": {"mixer": mixer}}
    return {
        "kind": "decoder",
        "width": 32,
        "position": {"kind": "transformer_xl", "shared_biases": True},
        "stack": stack,
    }


@pytest.mark.long
def test_biases_that_all_layers_share_are_those_of_one_process(pool: Pool) -> None:
    model = of_transformer_xl(2)
    expected = alone(pool, model)
    assert sum("position_tables" in name for name in expected.ended) == 2
    for layout in (
        {"mesh": {"tp": 2}, "tensor": {"sequence": True}, "recompute": {"every": 1}},
        {"mesh": {"cp": 2}, "context": {"style": "ring"}},
        {"mesh": {"cp": 2}, "context": {"style": "ulysses"}},
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
        {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}},
    ):
        same(pool, expected, 2, model, layout)


def test_two_stages_of_a_rank_cannot_share_biases() -> None:
    pipeline = {"schedule": "interleaved_1f1b", "stages_per_rank": 2}
    layout = {"mesh": {"pp": 2}, "pipeline": pipeline}
    problems = [str(problem) for problem in asked(of_transformer_xl(8), layout).check(2)]
    assert any(
        "two copies of stack.position_tables." in problem and "or model.position.shared_biases=false." in problem
        for problem in problems
    ), problems
