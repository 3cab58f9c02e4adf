"""`xscale plan --search`: the listed layouts are valid, fit, match `xscale plan`, and are sorted by time."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.planning.test_command import CONFIG, TINY, wrapped
from xscale.commands.plan import hardware
from xscale.core.errors import ConfigError
from xscale.mesh.axes import Degrees
from xscale.planning import Hardware, plan
from xscale.planning.cost_model import CostModel, LayoutChoice, bubble, estimate
from xscale.planning.search import RankedLayout, candidates, format_ranked, search
from xscale.recipe import Recipe, read
from xscale.settings.settings import build_on_meta

H100 = Hardware("h100")
SEVEN = Path("configs/run/dense_7b.yaml")
PLAIN = LayoutChoice(Degrees(pp=2, dp_shard=8, tp=4), stage=1, schedule="1f1b", chunks=2, every=0, micro_batch_size=1)


def tiny(more: Sequence[str]) -> Recipe:
    return read(CONFIG, [*TINY, *more])[0]


def found(*overrides: str, world: int = 4, hardware: Hardware = H100, wanted: int = 2) -> list[RankedLayout]:
    fixed = frozenset(layout.partition("=")[0] for layout in overrides)

    def change(more: Sequence[str]) -> Recipe | None:
        recipe = tiny([*overrides, *more])
        return recipe if recipe.is_valid(world) else None

    return search(tiny(overrides), change, fixed, world, hardware, wanted, lambda line: None)


def seven() -> CostModel:
    recipe = read(SEVEN, [])[0]
    device = H100.resolve(recipe)
    assert device is not None
    return CostModel(build_on_meta(recipe, 32000), recipe, device)


@pytest.mark.long
def test_listed_layouts_are_valid_and_match_their_plan() -> None:
    ranked = found()
    assert len(ranked) == 2
    seconds = [layout.plan["step_seconds"] for layout in ranked]
    assert seconds == sorted(seconds)
    assert len({layout.overrides for layout in ranked}) == 2
    for layout in ranked:
        recipe = tiny(layout.overrides)
        assert recipe.check(4) == []
        assert layout.plan["fits"] is True
        again = plan(recipe, 4, H100)
        assert again["parallel"] == layout.plan["parallel"]
        assert again["step_seconds"] == pytest.approx(layout.plan["step_seconds"], rel=1e-6)
        # The order in which tensors are freed changes the peak by a few bytes.
        assert again["memory_bytes"]["total"] == pytest.approx(layout.plan["memory_bytes"]["total"], rel=1e-6)
    text = "\n".join(format_ranked(ranked))
    assert all(" ".join(layout.overrides) in text for layout in ranked)


@pytest.mark.long
def test_keys_set_by_the_caller_stay() -> None:
    (layout,) = found("parallel.mesh.tp=2", "parallel.mesh.pp=2", "parallel.zero.stage=2", wanted=1)
    assert layout.plan["degrees"]["tp"] == layout.plan["degrees"]["pp"] == 2
    assert layout.plan["parallel"]["zero"]["stage"] == 2


@pytest.mark.long
def test_layouts_that_the_check_refuses_are_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero-bubble pipelines are estimated to be faster, and cannot be compiled."""
    wanted = ("parallel.compile=true", "parallel.mesh.pp=2", "train.micro_batch_size=1")
    assert all(layout.plan["parallel"]["pipeline"]["schedule"] != "zero_bubble" for layout in found(*wanted))
    monkeypatch.setattr(Recipe, "is_valid", lambda self, world: True)
    monkeypatch.setattr("xscale.planning.search.plan", lambda settings, world, hardware: {
        "fits": True, "step_seconds": 1.0, "parallel": {"pipeline": {"schedule": settings.parallel.pipeline.schedule}},
    })  # fmt: skip
    assert any(layout.plan["parallel"]["pipeline"]["schedule"] == "zero_bubble" for layout in found(*wanted))


def test_nothing_fits() -> None:
    with pytest.raises(ConfigError, match=r"the smallest needs about 2\.\d GB of 0\.1.*Take more devices"):
        found(hardware=replace(H100, memory=1e8))
    with pytest.raises(ConfigError, match="divides this batch"):
        found("train.batch_size=1", "parallel.mesh.pp=1", "parallel.mesh.tp=1", "parallel.mesh.cp=1")


def test_a_layout_that_fits_by_estimate_only_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated step decides whether a layout fits."""
    monkeypatch.setattr("xscale.planning.search.plan", lambda *_: {"fits": False, "step_seconds": 1.0})
    with pytest.raises(ConfigError, match=r"none of the 3 simulated layouts fits into 80\.0 GB"):
        found(wanted=1)


def test_a_rank_of_time_needs_a_device() -> None:
    with pytest.raises(ConfigError, match=r"needs a device of known speed.*--device h100"):
        found(hardware=Hardware())
    with pytest.raises(ConfigError, match="needs a device of known speed"):
        found(hardware=Hardware(memory=80e9))


def test_no_layout_comes_twice_and_none_is_of_another_world() -> None:
    cost_model = seven()
    listed = [tuple(values.items()) for values, _ in candidates(cost_model, frozenset(), 64)]
    assert len(listed) == len(set(listed)) > 1000


@pytest.mark.parametrize(("changed", "seconds", "memory"), [
    ({"stage": 3}, 1, -1),
    ({"every": 1}, 1, -1),
    ({"every": 1, "granularity": "selective"}, 0, -1),
    ({"micro_batch_size": 4}, 1, 1),
    ({"schedule": "interleaved_1f1b"}, -1, 1),
    ({"degrees": Degrees(pp=2, dp_shard=4, tp=8)}, 1, -1),
])  # fmt: skip
def test_an_estimate_changes_in_the_right_direction(changed: dict[str, Any], seconds: int, memory: int) -> None:
    cost_model = seven()
    before, after = estimate(cost_model, PLAIN), estimate(cost_model, replace(PLAIN, **changed))
    if seconds:
        assert (after.seconds - before.seconds) * seconds > 0
    else:
        assert after.seconds == before.seconds
    assert (after.memory - before.memory) * memory > 0


@pytest.mark.long
def test_an_estimate_is_near_the_simulated_step() -> None:
    """Within half of time and memory, for four blocks of the 7B model: good layouts are not missed."""
    recipe = read(SEVEN, ["model.stack.depth=4", "parallel.mesh.dp_shard=-1", "train.batch_size=64"])[0]
    device = H100.resolve(recipe)
    assert device is not None
    cost_model = CostModel(build_on_meta(recipe, 32000), recipe, device)
    estimated = estimate(cost_model, replace(PLAIN, degrees=Degrees(dp_shard=8)))
    measured = plan(recipe, 8, H100)
    assert estimated.seconds == pytest.approx(measured["step_seconds"], rel=0.5)
    assert estimated.memory == pytest.approx(measured["memory_bytes"]["total"], rel=0.5)


@pytest.mark.long
def test_uneven_stages_are_slower_and_the_recipes_own_layout_is_not_missed() -> None:
    """32 blocks and a head of two thirds of one in 16 stages: the last rank has 4.65 of a mean of 4.08."""
    cost_model = seven()
    assert cost_model.imbalance(8, "interleaved_1f1b", 2) == pytest.approx(4.65 / 4.08, rel=0.02)
    assert cost_model.imbalance(2, "1f1b", 2) < 1.05
    own = replace(PLAIN, degrees=Degrees(dp_shard=64))
    staged = replace(PLAIN, degrees=Degrees(pp=8, dp_shard=8), schedule="interleaved_1f1b")
    assert estimate(cost_model, own).seconds < estimate(cost_model, staged).seconds
    plain = plan(tiny([]), 1, H100)
    assert min(layout.plan["step_seconds"] for layout in found(world=1, wanted=1)) <= plain["step_seconds"]


def test_gathered_parameters_are_called_so() -> None:
    """Stage 1 gathers all of them once, in the compute precision."""
    made = plan(tiny(["parallel.mesh.dp_shard=2", "parallel.zero.stage=1"]), 2, H100)
    assert made["memory_bytes"]["gathered_parameters"] == pytest.approx(4 * made["parameters"], rel=0.05)


def test_the_bubble_of_one_forward_one_backward() -> None:
    """(p - 1) / (m + p - 1), Narayanan et al. 2021, section 2.2.1; over the chunks where stages interleave."""
    assert bubble(PLAIN, 8) == pytest.approx(1 / 9)
    assert bubble(replace(PLAIN, schedule="interleaved_1f1b"), 8) == pytest.approx(0.5 / 8.5)


@pytest.mark.long
def test_as_it_is_typed() -> None:
    typed = [str(CONFIG), *TINY, "--search", "--world", "2", "--device", "h100", "--best", "1", "--json"]
    done = CliRunner().invoke(wrapped(), typed)
    assert done.exit_code == 0, done.output
    (layout,) = json.loads(done.stdout)
    assert layout["world"] == 2
    assert "layouts of 2 ranks" in done.stderr
    for wrong, path in (("--check", "--search"), ("--draw=x.png", "--draw")):
        refused = CliRunner().invoke(wrapped(), [str(CONFIG), "--search", wrong])
        assert isinstance(refused.exception, ConfigError)
        assert refused.exception.problems[0].path == path
    assert hardware("h100", None, None, None, None) == H100
