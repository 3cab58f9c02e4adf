"""Weights that are written after an evaluation: on every layout the next evaluation and the shards have them."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import Pool
from tests.parallel.against_one import SPECIALS, VOCABULARY, built, held_out_batch, sequence_sharding, within
from xscale.evaluate.evaluate import evaluate
from xscale.objective.objective import OBJECTIVES, Objective
from xscale.parallel.shard.full_tensors import ShardedWeightWriter
from xscale.parallel.shard.sharded import local_shape_and_offset, shard_like, sharded_parameters, to_local
from xscale.step.batches import shard_over_cp

MODEL: dict[str, Any] = {
    "kind": "decoder",
    "width": 32,
    "stack": {
        "depth": 2,
        "block": {
            "mixer": {"kind": "attention", "heads": 4},
            "ffn": {
                "kind": "moe",
                "experts": 4,
                "router": {"kind": "topk", "bias_update_rate": 0.1},
                "expert": {"kind": "dense", "hidden": 16},
            },
        },
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"zero": {"stage": stage}} for stage in range(4)},
    "tp2": {"mesh": {"tp": 2}},
    "ep2": {"mesh": {"ep": 2}},
    "cp2": {"mesh": {"cp": 2}},
    "pp2": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
}

QUICK = ("zero2", "tp2")


def written(parallel: dict[str, Any]) -> tuple[list[float], dict[str, tuple[tuple[int, ...], Tensor]]]:
    """Losses of evaluations before and after each of three changes of all weights, and the weights at the end."""
    settings, mesh, network, _ = built(MODEL, parallel)
    objective: Objective = OBJECTIVES.build(settings.objective, SPECIALS, settings.data.source_length, 5)
    spread = sequence_sharding(settings, mesh)

    def loss() -> float:
        held_out = [
            (shard_over_cp(held_out_batch(objective, 2, 0, number, True), spread), True)
            for number in range(mesh.data_rank, 4, mesh.degrees.dp)
        ]
        return evaluate(
            network, objective, held_out, torch.ones(VOCABULARY, dtype=torch.long), stages=mesh.degrees.pp
        ).loss

    every = sharded_parameters(network)
    losses = [loss()]
    weights = ShardedWeightWriter(network)
    for sharded in every:
        weights.write(
            sharded.parameter,
            pattern(sharded.name, tuple(sharded.parameter.shape)) / 8 + weights.read(sharded.parameter),
        )
    losses.append(loss())
    weights = ShardedWeightWriter(network)
    for sharded in every:
        full = pattern(sharded.name, tuple(sharded.parameter.shape))
        weights.update(sharded.parameter, lambda weight, change: 0.9 * weight + 0.1 * change, full)
    losses.append(loss())
    weights = ShardedWeightWriter(network)
    for sharded in every:
        weights.write_shard(sharded.parameter, 1.1 * sharded.local)
    losses.append(loss())
    pieces = {sharded.name: (local_shape_and_offset(sharded.parameter)[1], sharded.local.clone()) for sharded in every}
    return losses, pieces


def pattern(name: str, shape: tuple[int, ...]) -> Tensor:
    """Values of a parameter's name alone."""
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module")
def expected(pool: Pool) -> Any:
    losses, pieces = pool.run(written, 1, {})[0]
    assert all(abs(later - earlier) > 1e-3 for earlier, later in pairwise(losses))
    return losses, pieces


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[] if layout in QUICK else [pytest.mark.long]) for layout in LAYOUTS]
)
def test_a_layout_evaluates_what_was_written(layout: str, expected: Any, pool: Pool) -> None:
    for losses, pieces in pool.run(written, 2, LAYOUTS[layout]):
        assert losses == pytest.approx(expected[0], rel=1e-9)
        for name, (offset, piece) in pieces.items():
            assert torch.allclose(piece, within(expected[1][name][1], offset, piece), rtol=1e-9, atol=1e-12), name


def lost() -> str:
    """Write to a weight that an evaluation gathered; return why the writer refuses it."""
    settings, _, network, _ = built(MODEL, LAYOUTS["zero2"])
    objective: Objective = OBJECTIVES.build(settings.objective, SPECIALS, settings.data.source_length, 5)
    stored: Any = network
    batch = held_out_batch(objective, 2, 0, 0, True)
    evaluate(network, objective, [(batch, True)], torch.ones(VOCABULARY, dtype=torch.long))
    gathered = stored.stack.blocks["0"].mixer.norm.weight
    with torch.no_grad():
        gathered.copy_(shard_like(torch.full(tuple(gathered.shape), 7.0, dtype=torch.float64), gathered))
    weights = ShardedWeightWriter(network)
    assert (to_local(stored.stack.blocks["0"].mixer.norm.weight.detach()) == 1).all(), (
        "what was gathered is thrown away"
    )
    try:
        weights.write(gathered, torch.ones(32))
    except AssertionError as error:
        return str(error)
    return "written"


def test_a_gathered_weight_is_refused(pool: Pool) -> None:
    for refused in pool.run(lost, 2):
        assert "it was gathered" in refused
