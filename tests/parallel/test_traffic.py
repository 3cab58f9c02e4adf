"""Micro-batches of a step send gradients once where ranks keep them whole, else as often as the stage of ZeRO must."""

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import LENGTH, SEED, SPECIALS, alone, asked, batch_of, built, same
from tests.parallel.models import DENSE, MIXTURE, changed
from tests.parallel.recorder import recorded
from xscale.core.errors import ConfigError
from xscale.mesh import axes
from xscale.objective.objective import OBJECTIVES
from xscale.parallel.config import ParallelConfig
from xscale.parallel.shard.sharded import sharded_parameters
from xscale.parallel.shard.zero import prefetched_blocks
from xscale.step.stepper import Stepper
from xscale.train.setup import make_engine

MODEL = changed(DENSE, tied=False)
GROUPS = 5
"""Groups of parameters that are sent together: four blocks, and the rest."""
STAGES = 3
"""The same of a stage of a pipeline: two blocks, and the rest."""


def events(parallel: dict[str, Any], micros: int) -> list[str]:
    """Bytes that a step's forwards and backwards send on this rank; the step before has warmed up."""
    settings, mesh, network, _ = built(MODEL, parallel, train={"batch_size": 2 * micros, "micro_batch_size": 1})
    objective = OBJECTIVES.build(settings.objective, SPECIALS, LENGTH, SEED)
    engine = make_engine(settings, network, sharded_parameters(network), mesh)
    stepper = Stepper(engine, objective, mesh.device)
    apart = not settings.data.cross_documents
    batches = [
        batch_of(objective, 1, 0, number, None, apart) for number in range(mesh.data_rank, 2 * micros, mesh.degrees.dp)
    ]
    assert len(batches) == micros
    stepper._forward_backward(batches, 1.0)
    network.zero_grad()
    with recorded(network) as found:
        stepper._forward_backward(batches, 1.0)
    return found


def sent(parallel: dict[str, Any], micros: int) -> tuple[int, int]:
    """How often gradients are sent, and parameters gathered."""
    count = Counter(events(parallel, micros))
    return count["reduce"] + count["sum"], count["gather"]


def layout(stage: int, **mesh: int) -> dict[str, Any]:
    return {"mesh": {"dp_shard": 2, **mesh}, "zero": {"stage": stage}}


# Of a step with 1 and with 3 micro-batches.
WANTED = {
    0: [(GROUPS, 0), (GROUPS, 0)],
    1: [(GROUPS, GROUPS), (GROUPS, GROUPS)],
    2: [(GROUPS, GROUPS), (3 * GROUPS, GROUPS)],
    # All but the rest, which stays whole after forward, are gathered for backward too.
    3: [(GROUPS, 2 * GROUPS - 1), (3 * GROUPS, 3 * (2 * GROUPS - 1))],
}


@pytest.mark.parametrize("stage", WANTED)
def test_what_micro_batches_send(stage: int, pool: Pool) -> None:
    assert [pool.run(sent, 2, layout(stage), micros)[0] for micros in (1, 3)] == WANTED[stage]


@pytest.mark.long
@pytest.mark.parametrize("stage", WANTED)
@pytest.mark.sampled(2)
def test_what_they_send_in_a_pipeline(stage: int, pool: Pool) -> None:
    """Every stage of ZeRO as without one: stage 3 forgets a stage's parameters after each of its actions."""
    found = [pool.run(sent, 4, layout(stage, pp=2), micros)[0] for micros in (2, 4)]
    gradients = [STAGES, STAGES] if stage < 2 else [2 * STAGES, 4 * STAGES]
    parameters = {0: [0, 0], 3: [10, 20]}.get(stage, [STAGES, STAGES])
    assert found == list(zip(gradients, parameters, strict=True))


def careless(stage: int) -> tuple[int, int]:
    """The same without saying which micro-batch is the last."""
    with patch("xscale.parallel.shard.zero.set_gradient_sync", lambda *_, **__: None):
        return sent(layout(stage), 3)


def test_it_is_the_last_micro_batch_that_saves_messages(pool: Pool) -> None:
    """Negative control."""
    assert pool.run(careless, 2, 1) == [(3 * GROUPS, 3 * GROUPS)] * 2


def test_parameters_are_gathered_ahead(pool: Pool) -> None:
    """The gathers before each block's forward: the rest and its own, or those of the next ones too."""
    for ahead, wanted in ((0, [2, 1, 1, 1]), (1, [3, 1, 1, 0]), (2, [4, 1, 0, 0])):
        parallel = layout(3)
        parallel["zero"]["prefetch"] = ahead
        found = pool.run(events, 2, parallel, 1)[0]
        counts = [0]
        for event in found[: found.index("stack.blocks.3")]:
            if event == "gather":
                counts[-1] += 1
            else:
                counts.append(0)
        assert counts == wanted, (ahead, found)


@pytest.mark.parametrize(
    ("parallel", "blocks"),
    [
        ({"mesh": {"ep": 2}, "zero": {"stage": 3}}, 1),
        ({"mesh": {"ep": 2}, "zero": {"stage": 3, "prefetch": 0}}, 0),
        ({"mesh": {"ep": 2}, "zero": {"stage": 2}}, 0),
        ({"mesh": {"ep": 1}, "zero": {"stage": 3}}, 0),
    ],
)
def test_zero_3_gathers_ahead_where_experts_are_spread(parallel: dict[str, Any], blocks: int) -> None:
    config = ParallelConfig.model_validate(parallel)
    assert prefetched_blocks(config, axes.resolve(config.mesh, 2)) == blocks


def modules_gathered_ahead(zero: dict[str, Any]) -> list[int]:
    """For each block for which modules are gathered ahead, how many."""
    from torch.distributed.fsdp import FSDPModule

    counts: list[int] = []

    def record(block: FSDPModule, modules: list[FSDPModule]) -> None:
        counts.append(len(modules))

    with patch.object(FSDPModule, "set_modules_to_forward_prefetch", record):
        built(MIXTURE, {"mesh": {"dp_shard": 2, "ep": 2}, "zero": zero})
    return counts


def test_experts_on_several_ranks_gather_ahead_by_default(pool: Pool) -> None:
    """The host waits there for the counts of a dispatch, and would ask for the next block's parameters too late."""
    default, chosen, off = (
        pool.run(modules_gathered_ahead, 2, {"stage": 3, **zero})[0] for zero in ({}, {"prefetch": 1}, {"prefetch": 0})
    )
    assert default == chosen
    assert len(default) == 4
    assert all(default[:-1])
    assert not off


def test_prefetch_without_zero_3_is_refused() -> None:
    zero = {"prefetch": 1, "stage": 2}
    (problem,) = asked(MODEL, {"mesh": {"dp_shard": 2}, "zero": zero}).check(2)
    assert "at stage 2 parameters are already resident" in str(problem)


def test_a_prefetch_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel.zero.prefetch: must be >= 0, got -1"):
        asked(MODEL, {"mesh": {"dp_shard": 2}, "zero": {"prefetch": -1, "stage": 3}})


def test_gathering_ahead_changes_no_number(pool: Pool) -> None:
    parallel = {"mesh": {"dp_shard": 2, "ep": 2}, "zero": {"stage": 3, "prefetch": 1}, "recompute": {"every": 2}}
    same(pool, alone(pool, MIXTURE, steps=2), 2, MIXTURE, parallel, steps=2)
