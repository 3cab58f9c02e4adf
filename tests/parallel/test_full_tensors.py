"""Optimizers that are not elementwise, on sharded weights: the same steps as one process in double precision."""

from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.parallel.against_one import Found, alone, compare, same, trained
from tests.parallel.models import MODELS, SHALLOW, changed
from xscale.optim.full_tensors import UnshardedTensors
from xscale.parallel.shard.sharded import to_local
from xscale.train import setup

OPTIMIZERS_IN_DOUBLE: dict[str, dict[str, Any]] = {
    "muon": {"kind": "muon", "ns_dtype": "float64", "weight_decay": 0.1},
    "adafactor": {"kind": "adafactor", "beta1": 0.5, "weight_decay": 0.1},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"zero{stage}": (2, {"mesh": {"dp_shard": 2}, "zero": {"stage": stage}}) for stage in range(4)},
    "tp": (2, {"mesh": {"tp": 2}}),
    "ep": (2, {"mesh": {"dp_shard": 2, "ep": 2}}),
    "pp": (2, {"mesh": {"pp": 2}}),
    "tp_zero3": (4, {"mesh": {"tp": 2, "dp_shard": 2}, "zero": {"stage": 3}}),
    "ep_zero2": (4, {"mesh": {"dp_shard": 4, "ep": 2}, "zero": {"stage": 2}}),
    "tp_ep_zero3": (4, {"mesh": {"tp": 2, "ep": 2, "dp_shard": 2}, "zero": {"stage": 3}}),
    "copies_tp": (4, {"mesh": {"dp_replicate": 2, "tp": 2}}),
    "uneven": (4, {"mesh": {"dp_shard": 4}, "zero": {"stage": 3}}),
    "uneven_tp": (4, {"mesh": {"dp_shard": 2, "tp": 2}, "zero": {"stage": 1}}),
}
UNEVEN = changed(SHALLOW["mixture"], stack__block__ffn__hidden=50, stack__rules__0__ffn__experts=6)
"""Four ranks have 13, 13, 13 and 11 rows, and 2, 2, 2 and no experts."""
QUICK = ("zero1", "pp", "tp_ep_zero3", "uneven")
SIZES = {"train": {"micro_batch_size": 1}}


@pytest.fixture(scope="module")
def one() -> dict[tuple[str, str], Found]:
    """The runs of one process, by optimizer and model."""
    return {}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in LAYOUTS]
)
@pytest.mark.parametrize("kind", OPTIMIZERS_IN_DOUBLE)
@pytest.mark.sampled(3)
@pytest.mark.long
def test_a_layout(kind: str, layout: str, one: dict[tuple[str, str], Found], pool: Pool) -> None:
    ranks, parallel = LAYOUTS[layout]
    name = layout.split("_")[0] if layout.startswith(("pp", "uneven")) else "usual"
    model = {"pp": MODELS["mixture"], "uneven": UNEVEN, "usual": SHALLOW["mixture"]}[name]
    sections = {"optimizer": OPTIMIZERS_IN_DOUBLE[kind], **SIZES}
    if (kind, name) not in one:
        one[kind, name] = alone(pool, model, **sections)
    same(pool, one[kind, name], ranks, model, parallel, **sections)


def trained_on_shards_alone(*given: Any, **sections: Any) -> Found:
    """Train with optimizers that take each shard for the full tensor."""
    before = setup.ShardedTensors

    def unsharded(parameters: list[torch.Tensor]) -> UnshardedTensors:
        return UnshardedTensors([to_local(parameter.detach()) for parameter in parameters])

    setup.ShardedTensors = unsharded  # type: ignore[assignment, misc]
    try:
        return trained(*given, **sections)
    finally:
        setup.ShardedTensors = before  # type: ignore[misc]


@pytest.mark.parametrize("kind", OPTIMIZERS_IN_DOUBLE)
def test_a_shard_taken_for_the_full_tensor_is_seen(kind: str, pool: Pool) -> None:
    """Negative control."""
    model, sections = SHALLOW["mixture"], {"optimizer": OPTIMIZERS_IN_DOUBLE[kind], **SIZES}
    ranks, parallel = LAYOUTS["zero1"]
    everyone = pool.run(trained_on_shards_alone, ranks, model, parallel, **sections)
    with pytest.raises(AssertionError):
        compare(alone(pool, model, **sections), everyone)
