"""Multi-token prediction on layouts: the losses, gradients and metrics of one process, and what has no such layout."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, same
from tests.parallel.test_tensor import refused


def model(*, tied: bool = True, depth: int = 2, ffn: Any = None) -> dict[str, Any]:
    ffn = ffn or {"kind": "gated", "hidden": 24}
    block = {"mixer": {"kind": "attention", "heads": 4}, "ffn": ffn, "dropout": 0.1}
    stack = {"depth": 4, "block": block}
    return {"kind": "decoder", "width": 32, "tied": tied, "stack": stack, "mtp": {"depth": depth, "loss_weight": 0.5}}


EXPERTS = {"kind": "moe", "experts": 4, "router": {"kind": "topk", "top_k": 2, "aux_loss_weight": 0.01}}
EXPERTS["expert"] = {"kind": "gated", "hidden": 24}
PIPELINE = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}
SEQUENCE = {"mesh": {"tp": 2}, "tensor": {"sequence": True}, "recompute": {"every": 1}}
ZERO = {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}}
CONTEXT = {"mesh": {"cp": 2}}
"""A ring of zig-zag shards: the tokens ahead of a chunk's last ones are on the other rank."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (model(), [PIPELINE, SEQUENCE, CONTEXT]),
        (model(tied=False, depth=1), [PIPELINE | {"zero": {"stage": 1}}, {"mesh": {"tp": 2}}]),
        pytest.param(model(depth=1), [ZERO], marks=pytest.mark.long),
        pytest.param(
            model(tied=False, depth=1, ffn=EXPERTS),
            [{"mesh": {"ep": 2}}, SEQUENCE, PIPELINE, {**CONTEXT, "context": {"style": "ulysses"}}],
            marks=pytest.mark.long,
        ),
        pytest.param(
            model(tied=False), [{"mesh": {"pp": 2}, "pipeline": {"schedule": "zero_bubble"}}], marks=pytest.mark.long
        ),
    ],
    ids=["tied", "untied", "zero3", "experts", "split backward"],
)
def test_a_layout_has_the_numbers_of_one_process(
    model: dict[str, Any], layouts: list[dict[str, Any]], pool: Pool
) -> None:
    expected = alone(pool, model)
    assert "mtp.at.1/loss" in expected.statistics
    for layout in layouts:
        same(pool, expected, 2, model, layout)


@pytest.mark.long
def test_layouts_compose(pool: Pool) -> None:
    expected = alone(pool, model())
    for layout in (
        {"mesh": {"cp": 2, "tp": 2}, "tensor": {"sequence": True}},
        {"mesh": {"cp": 2, "pp": 2}, "context": {"style": "ulysses"}},
    ):
        same(pool, expected, 4, model(), layout)


def test_two_tables_of_embeddings_on_a_rank_are_refused() -> None:
    (problem,) = refused(model(tied=False), 2, mesh={"pp": 2}, pipeline={"schedule": "zbv"})
    assert "'zbv' puts two copies of embed.table.weight on one rank" in problem
    assert "or model.mtp=null and model.tied=false." in problem
