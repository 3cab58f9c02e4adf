"""Every recipe, made small, on a random layout and resumed on another: losses, evaluations and weights of one process.

    pytest -m long tests/train/test_recipes_on_layouts.py --layout-seed 7 -k bigbird

In float64 and with dropout. `--layout-seed` draws other layouts; a failure says the seed.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.distributed import Pool, RankError
from tests.golden.shrink import RECIPES, ROOT, VARIANTS, small
from tests.parallel.test_random_layouts import Draw, Section
from tests.train.tiny import metrics as metrics_of
from tests.train.tiny import run
from xscale.checkpoint.load import load_tensors
from xscale.core.config import decode, encode
from xscale.core.errors import EXIT_DONE, Problem
from xscale.nn.attention.softmax import Softmax
from xscale.nn.mixer.attention import Attention
from xscale.planning import vocabulary_of
from xscale.recipe import Recipe
from xscale.settings.settings import build_on_meta

STEPS, MIDDLE, DRAWS = 3, 2, 60
TOLERANCE = 1e-9
TIMEOUT_SECONDS = 900.0
OTHER_NUMBERS = {"cpc-objective": "its negatives are the other tokens of a rank's micro-batch, and of a shard of them"}
"""Recipes whose numbers depend on the layout by design."""
NO_LAYOUT: dict[str, str] = {}
"""Recipes that no layout of several ranks takes, and why."""
ALONE = {"batch-norm-transformer": "a batch norm normalises by the tokens of all ranks, which are more with dp"}
"""Recipes whose numbers are those of one process without data parallelism."""


def recipe_of(
    file: Path, folder: Path, name: str, parallel: Section | None = None, optimizer: str | None = None
) -> Recipe:
    """The small recipe with its dropout, or 0.1 where it has none, on a layout; None: of one process.

    `optimizer`: its kind, in place of the recipe's.
    """
    folder.mkdir(exist_ok=True)
    data: Any = encode(small(file, folder))
    data["parallel"] = {} if parallel is None else parallel
    data["run"]["dir"] = str(folder / name)
    data["train"] |= {"steps": STEPS, "batch_size": 4, "micro_batch_size": 1, "eval_every": MIDDLE, "eval_sequences": 4}
    data["train"]["tasks"] = {}
    if optimizer is not None:
        data["optimizer"] = {"kind": optimizer}
    data["checkpoint"] |= {"every_steps": MIDDLE, "keep_last": None, "memory_every_steps": 0}
    dropping = {**data, "model": {**data["model"], "dropout": data["model"].get("dropout") or 0.1}}
    recipe = decode(Recipe, dropping)
    return decode(Recipe, data) if any("dropout" in problem.path for problem in recipe.check(1)) else recipe


SCALE_FREE = ("lion", "adafactor")
"""Optimizers that move a parameter at full size, however small its gradient: one without a gradient by rounding alone,
and so otherwise on each layout. The epsilon of AdamW is far above rounding. No recipe trains by them."""
BY_SCALE_FREE = ("xformer/bart", "xformer/bert", "xformer/gpt-2", "run/quickstart")
"""Recipes that are trained by them here: with parameters without a gradient, and one without such."""


def without_gradient(recipe: Recipe) -> set[str]:
    """Names of the parameters of a recipe that have no gradient, by what they are: the biases of keys.

    A key's bias adds the same to all scores of a query, which its softmax does not see; a rotation by position, a norm
    of the keys, a bound of the scores, a sink or somebody else who reads the scores would.

    A bias right before a batch norm has none either. But its drift is in the means that the norm keeps, and an
    evaluation reads these: of `batch-norm-transformer` under such an optimizer the evaluations differ too.
    """
    if recipe.distill is not None:
        return set()
    return {
        f"{path}.k.bias"
        for path, module in build_on_meta(recipe, vocabulary_of(recipe)).named_modules()
        if isinstance(module, Attention) and module.k is not None and module.k.bias is not None
        if type(module.core) is Softmax and module.core.sinks is None and module.core.soft_cap is None
        if module.k_norm is None and (module.position is None or module.position.adds_bias)
    }


def one_rank(file: Path, folder: Path, name: str, parallel: Section | None = None, optimizer: str | None = None) -> int:
    return run(recipe_of(file, folder, name, parallel, optimizer))


def drawn(file: Path, folder: Path, seed: str, optimizer: str | None = None) -> tuple[int, Section] | list[Problem]:
    """Ranks and a layout that the recipe takes; the problems of the last one where it takes none of `DRAWS`."""
    draw = Draw(seed)
    refused: tuple[Recipe, int] | None = None
    for _ in range(DRAWS):
        recipe = recipe_of(file, folder, "drawn", None, optimizer)
        ranks, parallel = draw.layout(mixture="experts" in str(recipe.model))
        if file.stem in ALONE and draw.degrees["dp_shard"] * draw.degrees["dp_replicate"] > 1:
            continue
        recipe = recipe_of(file, folder, "drawn", parallel, optimizer)
        if recipe.is_valid(ranks):
            return ranks, parallel
        refused = (recipe, ranks)
    return [] if refused is None else refused[0].check(refused[1])


def numbers(folder: Path, name: str) -> list[tuple[int, str, float]]:
    """Step, key and value of all losses and metrics."""
    keys = ("loss", "grad_norm", "eval_loss", "ema_eval_loss")
    return [(line["step"], key, line[key]) for line in metrics_of(folder, name) for key in keys if key in line]


def weights(folder: Path, name: str) -> dict[str, Tensor]:
    tensors = load_tensors(folder / name / "checkpoints" / f"step-{STEPS:08d}", verify=False)
    return {key: value for key, value in tensors.items() if not key.startswith("optimizer.")}


def compare(folder: Path, name: str, left_out: set[str]) -> None:
    """Hold the numbers and the last weights of a run to those of `single`, but for the parameters in `left_out`."""
    for (*place, value), (*expected_place, expected) in zip(
        numbers(folder, name), numbers(folder, "single"), strict=True
    ):
        assert place == expected_place
        assert value == pytest.approx(expected, rel=TOLERANCE), place
    single, several = weights(folder, "single"), weights(folder, name)
    assert single.keys() == several.keys()
    far = {
        key: difference
        for key, expected in single.items()
        if expected.numel() and key.removeprefix("model.") not in left_out
        if (difference := (several[key] - expected).abs().max().item())
        > TOLERANCE * max(expected.abs().max().item(), 1)
    }
    assert not far


@pytest.fixture(scope="session")
def layout_seed(pytestconfig: pytest.Config) -> int:
    """Seed of the layouts: that of `--layout-seed`, or one with which all recipes were trained."""
    given: int | None = pytestconfig.getoption("--layout-seed")
    return 20261127 if given is None else given


@pytest.mark.long
@pytest.mark.sampled(12)
@pytest.mark.parametrize("file", [*RECIPES, *VARIANTS], ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_recipe_on_two_layouts(file: Path, layout_seed: int, tmp_path: Path, pool: Pool) -> None:
    hold_to_one_process(file, layout_seed, tmp_path, pool)


@pytest.mark.long
@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimizer", SCALE_FREE)
@pytest.mark.parametrize("name", BY_SCALE_FREE)
def test_a_scale_free_optimizer_on_two_layouts(
    name: str, optimizer: str, layout_seed: int, tmp_path: Path, pool: Pool
) -> None:
    file = ROOT / "configs" / f"{name}.yaml"
    left_out = without_gradient(recipe_of(file, tmp_path, "single", None, optimizer))
    assert bool(left_out) == (name != "run/quickstart")
    hold_to_one_process(file, layout_seed, tmp_path, pool, optimizer)
    if optimizer == "lion":
        assert moved_by_rounding(tmp_path) == left_out


def moved_by_rounding(folder: Path) -> set[str]:
    """Parameters of Lion's run whose momentum is rounding: far below that of others, and not 0."""
    prefix = "optimizer.momentum."
    tensors = load_tensors(folder / "single" / "checkpoints" / f"step-{STEPS:08d}", verify=False)
    largest = {
        key.removeprefix(prefix): tensor.abs().max().item()
        for key, tensor in tensors.items()
        if key.startswith(prefix) and tensor.numel()
    }
    return {name for name, size in largest.items() if 0 < size < 1e-12 * max(largest.values())}


def hold_to_one_process(file: Path, layout_seed: int, tmp_path: Path, pool: Pool, optimizer: str | None = None) -> None:
    """Train on a drawn layout, resume on another, and compare both with one process."""
    seeds = [f"{layout_seed} {file.stem} {turn}" for turn in ("first", "second")]
    layouts = [drawn(file, tmp_path, seed, optimizer) for seed in seeds]
    refused = [problems for problems in layouts if isinstance(problems, list)]
    assert bool(refused) == (file.stem in NO_LAYOUT), refused
    if refused:
        return
    (ranks, parallel), (ranks_resumed, parallel_resumed) = layouts
    assert one_rank(file, tmp_path, "single", None, optimizer) == EXIT_DONE
    where = (
        f"--layout-seed {layout_seed}: {ranks} ranks {parallel}, resumed on {ranks_resumed} ranks {parallel_resumed}"
    )
    print(where, flush=True)
    try:
        limit = {"timeout_seconds": TIMEOUT_SECONDS}
        done = pool.run(one_rank, ranks, file, tmp_path, "several", parallel, optimizer, **limit)
        assert done == [EXIT_DONE] * ranks
        _copy_middle(tmp_path, "several", "resumed")
        done = pool.run(one_rank, ranks_resumed, file, tmp_path, "resumed", parallel_resumed, optimizer, **limit)
        assert done == [EXIT_DONE] * ranks_resumed
        if file.stem in OTHER_NUMBERS:
            return
        recipe = recipe_of(file, tmp_path, "single", None, optimizer)
        left_out = without_gradient(recipe) if recipe.optimizer.kind in SCALE_FREE else set()
        for name in ("several", "resumed"):
            compare(tmp_path, name, left_out)
    except (AssertionError, RankError) as error:
        raise AssertionError(f"{where}\n{error}") from None


def _copy_middle(folder: Path, source: str, name: str) -> None:
    """Begin a run folder with the checkpoint of the middle of another."""
    middle = f"checkpoints/step-{MIDDLE:08d}"
    shutil.copytree(folder / source / middle, folder / name / middle)
    for file in ("config.yaml", "metrics.jsonl"):
        shutil.copy(folder / source / file, folder / name)
    if (folder / source / "tokenizer").exists():
        shutil.copytree(folder / source / "tokenizer", folder / name / "tokenizer")
