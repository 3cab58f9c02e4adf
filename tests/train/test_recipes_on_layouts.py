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
from tests.golden.shrink import RECIPES, VARIANTS, small
from tests.parallel.test_random_layouts import Draw, Section
from tests.train.tiny import metrics as metrics_of
from tests.train.tiny import run
from xscale.checkpoint.load import load_tensors
from xscale.core.config import decode, encode
from xscale.core.errors import EXIT_DONE, Problem
from xscale.recipe import Recipe

STEPS, MIDDLE, DRAWS = 3, 2, 60
TOLERANCE = 1e-9
TIMEOUT_SECONDS = 900.0
OTHER_NUMBERS = {"cpc-objective": "its negatives are the other tokens of a rank's micro-batch, and of a shard of them"}
"""Recipes whose numbers depend on the layout by design."""
NO_LAYOUT: dict[str, str] = {}
"""Recipes that no layout of several ranks takes, and why."""
ALONE = {"batch-norm-transformer": "a batch norm normalises by the tokens of all ranks, which are more with dp"}
"""Recipes whose numbers are those of one process without data parallelism."""


def recipe_of(file: Path, folder: Path, name: str, parallel: Section | None = None) -> Recipe:
    """The small recipe with its dropout, or 0.1 where it has none, on a layout; None: of one process."""
    folder.mkdir(exist_ok=True)
    data: Any = encode(small(file, folder))
    data["parallel"] = {} if parallel is None else parallel
    data["run"]["dir"] = str(folder / name)
    data["train"] |= {"steps": STEPS, "batch_size": 4, "micro_batch_size": 1, "eval_every": MIDDLE, "eval_sequences": 4}
    data["train"]["tasks"] = {}
    data["checkpoint"] |= {"every_steps": MIDDLE, "keep_last": None, "memory_every_steps": 0}
    dropping = {**data, "model": {**data["model"], "dropout": data["model"].get("dropout") or 0.1}}
    recipe = decode(Recipe, dropping)
    return decode(Recipe, data) if any("dropout" in problem.path for problem in recipe.check(1)) else recipe


SCALE_FREE = ("lion", "adafactor")
"""Optimizers that move a parameter without a gradient by rounding alone, at full size. Such are a key's bias under a
softmax, which adds the same to all scores of a query, and a bias right before a norm that subtracts the mean. No recipe
trains by them; one that does has to leave these parameters out here. The epsilon of AdamW is far above rounding."""


def one_rank(file: Path, folder: Path, name: str, parallel: Section | None = None) -> int:
    return run(recipe_of(file, folder, name, parallel))


def drawn(file: Path, folder: Path, seed: str) -> tuple[int, Section] | list[Problem]:
    """Ranks and a layout that the recipe takes; the problems of the last one where it takes none of `DRAWS`."""
    draw, problems = Draw(seed), list[Problem]()
    for _ in range(DRAWS):
        recipe = recipe_of(file, folder, "drawn")
        ranks, parallel = draw.layout(mixture="experts" in str(recipe.model))
        if file.stem in ALONE and draw.degrees["dp_shard"] * draw.degrees["dp_replicate"] > 1:
            continue
        problems = recipe_of(file, folder, "drawn", parallel).check(ranks)
        if not problems:
            return ranks, parallel
    return problems


def numbers(folder: Path, name: str) -> list[tuple[int, str, float]]:
    """Step, key and value of all losses and metrics."""
    keys = ("loss", "grad_norm", "eval_loss", "ema_eval_loss")
    return [(line["step"], key, line[key]) for line in metrics_of(folder, name) for key in keys if key in line]


def weights(folder: Path, name: str) -> dict[str, Tensor]:
    tensors = load_tensors(folder / name / "checkpoints" / f"step-{STEPS:08d}", verify=False)
    return {key: value for key, value in tensors.items() if not key.startswith("optimizer.")}


def compare(folder: Path, name: str) -> None:
    """Hold the numbers and the last weights of a run to those of `single`."""
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
        if expected.numel()
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
    assert recipe_of(file, tmp_path, "single").optimizer.kind not in SCALE_FREE
    layouts = [drawn(file, tmp_path, f"{layout_seed} {file.stem} {turn}") for turn in ("first", "second")]
    refused = [problems for problems in layouts if isinstance(problems, list)]
    assert bool(refused) == (file.stem in NO_LAYOUT), refused
    if refused:
        return
    (ranks, parallel), (ranks_resumed, parallel_resumed) = layouts
    assert one_rank(file, tmp_path, "single") == EXIT_DONE
    where = (
        f"--layout-seed {layout_seed}: {ranks} ranks {parallel}, resumed on {ranks_resumed} ranks {parallel_resumed}"
    )
    try:
        done = pool.run(one_rank, ranks, file, tmp_path, "several", parallel, timeout_seconds=TIMEOUT_SECONDS)
        assert done == [EXIT_DONE] * ranks
        _copy_middle(tmp_path, "several", "resumed")
        done = pool.run(
            one_rank, ranks_resumed, file, tmp_path, "resumed", parallel_resumed, timeout_seconds=TIMEOUT_SECONDS
        )
        assert done == [EXIT_DONE] * ranks_resumed
        if file.stem in OTHER_NUMBERS:
            return
        for name in ("several", "resumed"):
            compare(tmp_path, name)
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
