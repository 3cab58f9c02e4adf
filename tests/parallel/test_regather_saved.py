"""Activations that are gathered again under sequence parallelism: the same numbers, and less memory."""

import gc
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.distributed import Pool
from tests.parallel.against_one import (
    LENGTH,
    SEED,
    SPECIALS,
    Found,
    alone,
    asked,
    batch_of,
    built,
    compare,
    same,
    trained,
)
from tests.parallel.models import DENSE, MIXTURE, PAIR
from xscale.mesh import collectives, differentiable_collectives
from xscale.nn.tokens import Stats
from xscale.objective.objective import OBJECTIVES
from xscale.parallel.shard import region


def layout(pp: int = 1, schedule: str = "1f1b", every: int = 0, *, gathered: bool = True) -> dict[str, Any]:
    return {
        "mesh": {"tp": 2, "pp": pp},
        "tensor": {"sequence": True},
        "pipeline": {"schedule": schedule},
        "recompute": {"regather_sequence_parallel_input": gathered, "every": every},
    }


@pytest.mark.parametrize(
    ("model", "ranks", "parallel"),
    [
        pytest.param(DENSE, 2, layout(), marks=pytest.mark.long),
        (MIXTURE, 2, layout(every=2)),
        pytest.param(PAIR, 2, layout(), marks=pytest.mark.long),
        pytest.param(DENSE, 4, layout(2, "zero_bubble"), marks=pytest.mark.long),
    ],
    ids=["dense", "mixture-every-other", "pair", "zero_bubble"],
)
def test_the_numbers_are_those_of_one_process(
    model: dict[str, Any], ranks: int, parallel: dict[str, Any], pool: Pool
) -> None:
    same(pool, alone(pool, model, steps=2), ranks, model, parallel, steps=2)


def kept(model: dict[str, Any], parallel: dict[str, Any]) -> tuple[int, int, int]:
    """Tensors gathered into regions by a forward, those of them that are still there behind it, and exchanges after."""
    settings, _, network, _ = built(model, parallel)
    network.train()
    objective = OBJECTIVES.build(settings.objective, SPECIALS, LENGTH, SEED)
    batch = batch_of(objective, 2, 0, 0, Stats(), not settings.data.cross_documents)
    made: list[Any] = []
    later: list[Tensor] = []

    def gather_in(*given: Any) -> Tensor:
        whole = differentiable_collectives.gather_in(*given)
        made.append(StorageWeakRef(whole.untyped_storage()))
        return whole

    def all_gather(*given: Any) -> Tensor:
        later.append(given[0])
        return collectives.all_gather(*given)

    with patch.object(region, "gather_in", gather_in), patch.object(region, "all_gather", all_gather):
        loss = objective.loss(network, batch)
        there = sum(not one.expired() for one in made)
        loss.backward()
    return len(made), there, len(later)


def test_what_is_gathered_is_not_kept(pool: Pool) -> None:
    """Four blocks have two regions each, and the head, whose input is kept, is one."""
    assert pool.run(kept, 2, DENSE, layout(gathered=False)) == [(9, 9, 0)] * 2
    assert pool.run(kept, 2, DENSE, layout()) == [(9, 1, 8)] * 2


def tensors_in_cycles(model: dict[str, Any], parallel: dict[str, Any]) -> int:
    """Tensors of a forward and backward that only Python's collector frees."""
    settings, _, network, _ = built(model, parallel)
    network.train()
    objective = OBJECTIVES.build(settings.objective, SPECIALS, LENGTH, SEED)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        objective.loss(network, batch_of(objective, 2, 0, 0, Stats(), not settings.data.cross_documents)).backward()
        gc.collect()
        return sum(isinstance(freed, Tensor) for freed in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("model", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("gathered", [False, True])
def test_no_activation_waits_for_the_collector(model: dict[str, Any], gathered: bool, pool: Pool) -> None:
    """A cycle would keep activations of earlier steps in memory for as long as nothing calls the collector."""
    assert pool.run(tensors_in_cycles, 2, model, layout(gathered=gathered)) == [0, 0]


def swapped(x: Tensor, dim: int, group: Any) -> Tensor:
    """Replaces what is gathered again: the tokens in another order."""
    return collectives.all_gather(x, dim, group).flip(dim)


def wrong() -> Found:
    with patch.object(region, "all_gather", swapped):
        return trained(DENSE, layout(), steps=1)


def test_what_is_gathered_again_is_what_backward_uses(pool: Pool) -> None:
    """Negative control."""
    with pytest.raises(AssertionError):
        compare(alone(pool, DENSE, steps=1), pool.run(wrong, 2))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mesh": {"dp_shard": 2}}, "no activations are all-gathered"),
        ({"tensor": {"sequence": False}}, "no activations are all-gathered"),
        ({"recompute": {"regather_sequence_parallel_input": True, "every": 1}}, "every block is recomputed"),
        ({"compile": True}, "what compiled blocks save"),
    ],
)
def test_where_it_means_nothing_it_is_refused(changed: dict[str, Any], said: str) -> None:
    problems = [str(one) for one in asked(DENSE, {**layout(), **changed}).check(2)]
    assert len([one for one in problems if said in one]) == 1, problems
