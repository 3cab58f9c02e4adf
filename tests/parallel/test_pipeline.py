"""Pipeline parallelism gives the numbers of one process: losses, gradients' norms, evaluations and final weights."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.parallel.against_one import DOUBLE, LENGTH, SEED, SPECIALS, VOCABULARY, Found, alone, batch_of, built, same
from tests.parallel.models import DENSE, PAIR
from tests.train.tiny import metrics, recipe, run
from xscale.checkpoint.load import load_tensors
from xscale.evaluate.evaluate import evaluate
from xscale.generate.generate import generate
from xscale.mesh.environment import read_rank_info
from xscale.objective.objective import OBJECTIVES, Objective
from xscale.parallel.config import PipelineConfig
from xscale.parallel.pipeline.schedule import SCHEDULES
from xscale.parallel.pipeline.simulate import StuckError, draw_picture, draw_text, simulate
from xscale.parallel.pipeline.split import balance
from xscale.run.state import State
from xscale.train.run import run_facts
from xscale.train.setup import set_up


@pytest.fixture(scope="module")
def dense(pool: Pool) -> Found:
    """A dense decoder on one process, with a tied table and dropout."""
    return alone(pool, DENSE)


@pytest.fixture(scope="module")
def pair(pool: Pool) -> Found:
    """An encoder-decoder on one process, whose one table has three users."""
    return alone(pool, PAIR)


def layout(schedule: str = "1f1b", pp: int = 2, **parallel: Any) -> dict[str, Any]:
    """Section `parallel` of a recipe."""
    found: dict[str, Any] = {"mesh": {"pp": pp}, "pipeline": {"schedule": schedule}}
    for key, value in parallel.items():
        found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
    return found


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, layout("zero_bubble", pipeline={"blocks_per_stage": [1, 3]})),
        (4, layout("1f1b", 4)),
        (4, layout("1f1b", zero={"stage": 3}, recompute={"every": 2})),
    ],
    ids=["uneven", "pp4", "dp2-zero3-recompute"],
)
def test_a_dense_decoder(ranks: int, parallel: dict[str, Any], dense: Found, pool: Pool) -> None:
    same(pool, dense, ranks, DENSE, parallel)


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, layout("1f1b", pipeline={"blocks_per_stage": [2, 3]})),
        (2, layout("zero_bubble", pipeline={"blocks_per_stage": [3, 2]})),
        (2, layout("zero_bubble", pipeline={"blocks_per_stage": [2, 3]})),
        (4, layout("1f1b", 4)),
        (4, layout("zero_bubble", 4)),
    ],
    ids=["at-decoder", "in-decoder", "zb-at-decoder", "pp4", "zb-pp4"],
)
def test_an_encoder_decoder(ranks: int, parallel: dict[str, Any], pair: Found, pool: Pool) -> None:
    """The decoder begins with a stage or within one, which also receives the memory."""
    same(pool, pair, ranks, PAIR, parallel)


def run_here(folder: Path, parallel: dict[str, Any], stop_after: int | None = None) -> int:
    """A run by the worker's own rank, through the loop, with evaluation, checkpoints and samples."""
    train = {"stop_after": stop_after, "sample": {"prompts": ["The "], "tokens": 6}}
    return run(recipe(folder, "run", precision=DOUBLE, parallel=parallel, train=train, checkpoint={"every_steps": 3}))


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)], ids=["1-to-pp2", "pp2-to-1"])
def test_a_run_goes_on_with_another_number_of_stages(before: int, after: int, tmp_path: Path, pool: Pool) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    pool.run(run_here, 1, tmp_path / "whole", {})
    pool.run(run_here, before, tmp_path / "parts", layout(pp=before), stop_after=3)
    pool.run(run_here, after, tmp_path / "parts", layout(pp=after))
    mine, theirs = ([line for line in metrics(tmp_path / one) if "loss" in line] for one in ("parts", "whole"))
    assert len(mine) == len(theirs) == 6
    for line, expected in zip(mine, theirs, strict=True):
        # Statistics of a mixture are known to one stage only, and gathered.
        for key in ("loss", "grad_norm", "stack.blocks.1.ffn.part/aux"):
            assert math.isclose(
                line[key], expected[key], rel_tol=1e-9 if key != "stack.blocks.1.ffn.part/aux" else 1e-6
            )
    kept, wanted = (load_tensors(tmp_path / one / "run/checkpoints/step-00000006") for one in ("parts", "whole"))
    assert kept.keys() == wanted.keys()
    for name, value in kept.items():
        assert torch.allclose(value, wanted[name], rtol=0, atol=1e-9), name


def on_their_way(network: Any) -> int:
    """Messages that this rank has not yet seen leave."""
    return len(network.channel._sending)


def after_an_evaluation(*, waits: bool) -> tuple[int, int]:
    """Messages that are on their way behind an evaluation of many batches, and behind a token."""
    settings, mesh, network, _ = built(DENSE, layout())
    objective: Objective = OBJECTIVES.build(settings.objective, SPECIALS, LENGTH, SEED)
    batches = [(batch_of(objective, 2, 0, number, None, True, noisy=False), True) for number in range(8)]
    if not waits:
        network.wait_sends = lambda: None  # type: ignore[method-assign]
    evaluate(network, objective, batches, torch.ones(VOCABULARY, dtype=torch.long), stages=mesh.degrees.pp)
    behind = on_their_way(network)
    generate(network, torch.tensor([20, 21]), 1, end=1)
    return behind, on_their_way(network)


def test_nothing_is_on_its_way_behind_an_evaluation(pool: Pool) -> None:
    """A process may end there: gloo's message that was not waited for would outlive the group it belongs to."""
    assert pool.run(after_an_evaluation, 2, waits=True) == [(0, 0), (0, 0)]
    (first, _), last = pool.run(after_an_evaluation, 2, waits=False)
    assert first > 0, "the negative control: messages stay on their way, so that the next batch can begin"
    assert last == (0, 0)


def pictured(folder: Path, parallel: dict[str, Any]) -> list[str]:
    """The layers whose attention layout the report of a run shows."""
    parts = set_up(recipe(folder, parallel=parallel), read_rank_info())
    return sorted(run_facts(parts, folder, State(), None).layouts)


def test_a_report_shows_the_blocks_of_every_stage(tmp_path: Path, pool: Pool) -> None:
    (expected,) = pool.run(pictured, 1, tmp_path, {})
    assert len(expected) == 1
    assert pool.run(pictured, 2, tmp_path, layout()) == [expected, expected]


def problems(parallel: dict[str, Any], model: dict[str, Any] = DENSE, ranks: int = 2, batch: int = 8) -> list[str]:
    """Problems that `check` returns, as text."""
    made = recipe(Path("nowhere"), model=model, parallel=parallel, train={"batch_size": batch})
    return [f"{one.path}: {one.what} {one.advice}" for one in made.check(ranks)]


@pytest.mark.parametrize(
    ("parallel", "ranks", "batch", "said"),
    [
        (layout(pp=8), 8, 8, "Take 4, 3, 2 or 1"),
        (layout("interleaved_1f1b", 4), 4, 8, "Take 2 or 1"),
        (layout("interleaved_1f1b"), 2, 6, "Or make it a multiple of 2"),
        (layout("interleaved_1f1b", pipeline={"stages_per_rank": 1}), 2, 8, "schedule=1f1b"),
        (layout("dualpipe_v"), 2, 4, "zbv"),
        (layout("zbv"), 2, 8, "model.tied=false"),
        (layout(pipeline={"blocks_per_stage": [1, 2]}), 2, 8, "Take [2, 2] or null"),
        (layout("zero_bubble", zero={"stage": 3}), 2, 8, "Take 0, 1 or 2"),
        (layout("zero_bubble", recompute={"every": 1}), 2, 8, "Take 0, or parallel.pipeline.schedule="),
        (layout("zero_bubble", compile=True), 2, 8, "Take false, or parallel.pipeline.schedule="),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(parallel: dict[str, Any], ranks: int, batch: int, said: str) -> None:
    found = problems(parallel, ranks=ranks, batch=batch)
    assert len([one for one in found if said in one]) == 1, found


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_a_schedule_runs_everything_once_and_never_stands_still(name: str, pp: int) -> None:
    config = PipelineConfig.model_validate({"schedule": name})
    for micros in (2 * pp, 5 * pp):
        table = SCHEDULES[name].table(config, pp, micros)
        stages = SCHEDULES[name].stages(config, pp)
        seen = [action for actions in table for action in actions]
        wanted = [(stage, micro) for stage in range(stages) for micro in range(micros)]
        for kinds in ("F", "BI", "BW"):
            assert sorted((one.stage, one.micro) for one in seen if one.kind in kinds) == wanted
        for rank, actions in enumerate(table):
            assert {SCHEDULES[name].rank_of(one.stage, pp) for one in actions} == {rank}
        simulate(table)


def test_bubbles_are_those_of_the_papers() -> None:
    pp, micros = 4, 8
    bubble = {name: simulate(one.table(PipelineConfig(), pp, micros)).bubble for name, one in SCHEDULES.items()}
    assert math.isclose(bubble["gpipe"], (pp - 1) / (micros + pp - 1))
    assert math.isclose(bubble["1f1b"], bubble["gpipe"])
    assert math.isclose(bubble["interleaved_1f1b"], (pp - 1) / (2 * micros + pp - 1))
    assert math.isclose(bubble["zero_bubble"], (pp - 1) / (3 * micros + pp - 1))
    assert bubble["zbv"] < bubble["zero_bubble"]


def test_a_table_on_which_ranks_wait_for_each_other_is_no_schedule() -> None:
    """Negative control."""
    table = SCHEDULES["1f1b"].table(PipelineConfig(), 2, 4)
    table[1][0], table[1][1] = table[1][1], table[1][0]
    with pytest.raises(StuckError, match="waits"):
        simulate(table)


def test_stages_are_of_like_cost() -> None:
    assert balance([1.0] * 8, 0.0, 4) == [2, 2, 2, 2]
    # The head is as dear as two blocks.
    assert balance([1.0] * 6, 2.0, 2) == [4, 2]
    assert balance([5.0, 1.0, 1.0, 1.0], 0.0, 2) == [1, 3]
    assert sum(balance([1.0] * 7, 3.0, 3)) == 7


@pytest.mark.long
def test_a_drawing_shows_every_action_and_the_bubble(tmp_path: Path) -> None:
    time = simulate(SCHEDULES["zero_bubble"].table(PipelineConfig(), 2, 3))
    lines = draw_text(time).splitlines()
    assert lines == [
        "rank 0  F0 F1 ...I0 W0 F2 I1 W1 I2 W2 ",
        "rank 1  ...F0 I0 F1 I1 W0 F2 I2 W1 W2 ",
    ]
    for name in ("a.svg", "a.png"):
        draw_picture(time, tmp_path / name, "zero bubble")
        assert (tmp_path / name).stat().st_size > 1000
    assert all(len(line) <= 40 for line in draw_text(time, columns=40).splitlines())
