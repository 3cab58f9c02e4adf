"""Recipes: parameters of published models as the papers and their weights count them, and a plan of each one."""

from pathlib import Path

import pytest

from tests.golden.shrink import RECIPES, VARIANTS, small
from xscale.measure.flops import size
from xscale.mesh import axes
from xscale.mesh.axes import Degrees
from xscale.planning import Hardware, plan, vocabulary_of
from xscale.planning.simulate_step import simulate_step
from xscale.recipe import read
from xscale.settings.settings import build_on_meta

PUBLISHED = {
    # The weights that were released, to the parameter.
    "dense_7b": (64, 6_738_415_616, 6_738_415_616),
    "mixtral_8x7b": (64, 46_702_792_704, 12_879_925_248),
    # 24 layers of 32 experts (796,538,880 weights and biases), attention with biases and sinks, router and two norms.
    "gpt_oss_20b": (64, 20_914_757_184, 20_914_757_184 - 24 * 28 * 24_891_840),
    # "600B", which is 18 mixtures of 2048 experts of 2 x 1024 x 8192 (618.5B) and the rest; a token visits two.
    "gshard_600b": (2048, 619_333_738_496, 619_333_738_496 - 18 * 2046 * 2 * 1024 * 8192),
    # Table 9 says 1571B.
    "switch_1.6t": (512, pytest.approx(1571e9, rel=1e-3), pytest.approx(1.73e9, rel=0.01)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_parameters_and_its_layout_passes_the_checks(name: str) -> None:
    world, parameters, active = PUBLISHED[name]
    recipe, _ = read(Path(f"configs/run/{name}.yaml"), [])
    assert axes.min_world_size(recipe.parallel.mesh) == world
    counted = size(build_on_meta(recipe, vocabulary_of(recipe)))
    assert (counted.parameters, counted.active) == (parameters, active)
    assert not recipe.check(world)


@pytest.mark.parametrize(
    ("mesh", "world"),
    [({}, 1), ({"ep": 4, "cp": 2}, 4), ({"ep": 4, "tp": 2}, 8), ({"ep": 4, "tp": 2, "tp_in_experts": False}, 4)],
)
def test_the_fewest_ranks_that_make_a_mesh_pass_its_check_and_fewer_do_not(mesh: dict[str, int], world: int) -> None:
    config = axes.MeshConfig(**mesh)
    assert axes.min_world_size(config) == world
    assert not axes.check(config, world)
    assert all(axes.check(config, fewer) for fewer in range(1, world))


PLANS = (
    "classify",
    "finetune_classify",
    "tinybert_task",
    "bert",
    "structbert",
    "nsp-objective",
    "base-layers",
    "hash-layers",
)
"""Recipes whose samples or routers had no form in a plan; of the others one in four is planned with the long tests."""


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in PLANS else [pytest.mark.long, pytest.mark.sampled(4)]


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=f"{file.parent.name}-{file.stem}", marks=marks(file.stem))
        for file in [*RECIPES, *VARIANTS]
    ],
)
def test_a_small_recipe_is_simulated(file: Path, tmp_path: Path) -> None:
    step = simulate_step(small(file, tmp_path), Degrees(), rank=0, micro_batches=1, vocabulary=300)
    assert step.costs["forward"].flops > 0
    assert step.costs["backward"].flops > 0


@pytest.mark.long
@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    "file", [pytest.param(file, id=f"{file.parent.name}-{file.stem}") for file in [*RECIPES, *VARIANTS]]
)
def test_a_recipe_is_planned_as_it_is(file: Path) -> None:
    """At its full size, on the fewest ranks of its mesh."""
    recipe, _ = read(file, [])
    world = axes.min_world_size(recipe.parallel.mesh)
    assert not recipe.check(world)
    planned = plan(recipe, world, Hardware("h100"))
    assert planned["unknown"] is None
    assert planned["step_seconds"] > 0
