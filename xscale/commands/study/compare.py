"""`xscale compare`: train each variant with each seed, unless it is trained already, and report the results."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xscale.bench.compare import (
    Comparison,
    VariantResult,
    figure,
    read_comparison,
    read_curve,
    table,
    variant_results,
)
from xscale.bench.train import TrainingSpeed, training_speeds
from xscale.commands.study.train_runs import (
    NamedRun,
    check_unchanged,
    read_named,
    train_unless_finished,
)
from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.measure.flops import size
from xscale.observe.events import versions
from xscale.planning import vocabulary_of
from xscale.recipe import Recipe
from xscale.settings.settings import build_on_meta


def compare(
    file: Path,
    overrides: list[str],
    steps: int,
    seeds: tuple[int, ...] = (),
    *,
    as_json: bool,
    say: Callable[[str], None] = print,
) -> int:
    """Run the comparison in `file`; the exit status.

    `overrides` apply to all variants; `steps` are timed for each; `seeds` replace those of the file. ConfigError with
    the problems of every variant, before the first one is trained.
    """
    comparison = read_comparison(file)
    if seeds:
        comparison = comparison.model_copy(update={"seeds": seeds})
    recipes = {
        name: read_named(name, Path(comparison.run), [*overrides, *changes])
        for name, changes in comparison.variants.items()
    }
    for name, recipe in recipes.items():
        if not recipe.train.eval_every:
            raise ConfigError(
                f"{name}: train.eval_every", "a comparison needs evaluations", "Set it to 20."
            )
    for seed in comparison.seeds:
        for name in comparison.variants:
            run = _named_run(comparison, name, seed, overrides, recipes[name])
            check_unchanged(run, "Give the comparison another dir.")
            train_unless_finished(run, say)
    variants = _variant_results(comparison, recipes, training_speeds(recipes, steps))
    folder = Path(comparison.dir)
    result = {"rows": [variant.row() for variant in variants], "steps_timed": steps, **versions()}
    (folder / "comparison.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    figure(variants, comparison.reference, folder / "comparison.png")
    say(json.dumps(result) if as_json else table(variants, comparison.reference))
    if not as_json:
        say(f"{folder / 'comparison.png'} and comparison.json are written")
    return EXIT_DONE


def _named_run(
    comparison: Comparison, name: str, seed: int, overrides: list[str], recipe: Recipe
) -> NamedRun:
    variant = (*overrides, *comparison.variants[name])
    return NamedRun(
        f"{name}, seed {seed}", comparison.run, variant, comparison.folder(name, seed), seed, recipe
    )


def _variant_results(
    comparison: Comparison, recipes: dict[str, Recipe], measured: dict[str, TrainingSpeed]
) -> list[VariantResult]:
    curves = {
        name: [read_curve(comparison.folder(name, seed)) for seed in comparison.seeds]
        for name in comparison.variants
    }
    sizes: dict[str, Any] = {}
    for name, recipe in recipes.items():
        counted = size(build_on_meta(recipe, vocabulary_of(recipe)))
        sizes[name] = (counted.parameters, counted.active)
    return variant_results(curves, comparison.reference, measured, sizes)
