"""`xscale ladder`: train the runs of a ladder here or list them for a Slurm array, fit and report their losses."""

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from xscale.bench.ladder import Ladder, LadderRun, file_name, fit_ladder, read_ladder, table
from xscale.bench.ladder_page import page
from xscale.commands.study.train_runs import (
    NamedRun,
    check_unchanged,
    last_evaluation,
    read_named,
    train_unless_finished,
)
from xscale.core.errors import EXIT_DONE, ConfigError, FaultError
from xscale.core.files.atomic_write import write_atomically
from xscale.measure.flops import size, training_flops
from xscale.observe.events import versions
from xscale.planning.plan import vocabulary_of
from xscale.recipe import Recipe
from xscale.settings.settings import build_on_meta


def ladder(
    file: Path,
    overrides: Sequence[str],
    *,
    train: bool = True,
    as_json: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Train what is missing of the ladder in `file`, and report; the exit status.

    `overrides` apply to all runs. `train`: false reports on the runs that are finished. ConfigError with the
    problems of every run, before the first one is trained.
    """
    config = read_ladder(file)
    runs = plan_runs(config, overrides)
    for _, named in runs:
        check_unchanged(named, "Give the ladder another dir.")
    for number, (run, named) in enumerate(runs if train else [], 1):
        train_unless_finished(named, lambda text, at=number: say(f"[{at}/{len(runs)}] {text}"))  # type: ignore[misc]
        if last_evaluation(named.folder, named.recipe.train.steps) is None:
            what = f"no validation loss of its last step in {named.folder}; delete that folder to train it again"
            raise FaultError(f"{run.name}: {what}, or set data.validation above 0")
    losses = {
        run.name: loss
        for run, named in runs
        if (loss := last_evaluation(named.folder, named.recipe.train.steps)) is not None
    }
    results = fit_ladder(config, [run for run, _ in runs], losses)
    folder = Path(config.dir)
    encoded = {"results": [result.encode() for result in results], **versions()}
    write_atomically(folder / "ladder.json", (json.dumps(encoded, indent=1) + "\n").encode())
    write_atomically(folder / "ladder.html", page(results, f"Ladder {file.stem}").encode())
    say(json.dumps(encoded) if as_json else table(results))
    if not as_json:
        say(f"{folder / 'ladder.html'} and ladder.json are written")
    return EXIT_DONE


def plan_runs(config: Ladder, overrides: Sequence[str]) -> list[tuple[LadderRun, NamedRun]]:
    """Return the runs, from cheap to expensive. ConfigError with the problems of every one."""
    runs = []
    overrides = (*config.overrides, *overrides)
    for size_name, of_size in config.sizes.items():
        for experts, of_experts in config.experts.items():
            chosen = (*overrides, *of_size, *of_experts)
            recipe = read_named(f"{size_name}, {experts}", Path(config.run), chosen)
            model = build_on_meta(recipe, vocabulary_of(recipe))
            active = size(model).active
            per_sample = training_flops(model, recipe.data.target_length, recipe.data.source_length)
            wanted = config.tokens or [
                round(ratio * active) for ratio in config.tokens_per_parameter
            ]
            for tokens in wanted:
                steps = _steps(recipe, tokens, size_name)
                samples = steps * recipe.train.batch_size
                keys = [f"train.steps={steps}"]
                # One evaluation, at the end, where the recipe has none.
                keys += [f"train.eval_every={steps}"] * (recipe.train.eval_every == 0)
                run_overrides = (*chosen, *keys)
                final = read_named(f"{size_name}, {experts}", Path(config.run), run_overrides)
                for seed in config.seeds:
                    name = f"{file_name(size_name)}-{file_name(experts)}-{tokens}-seed-{seed}"
                    run = LadderRun(
                        name,
                        size_name,
                        experts,
                        seed,
                        (*of_size, *of_experts, *keys, f"run.seed={seed}"),
                        active,
                        samples * recipe.sample_tokens,
                        samples * per_sample,
                    )
                    folder = Path(config.dir) / name
                    runs.append(
                        (run, NamedRun(name, config.run, run_overrides, folder, seed, final))
                    )
    return sorted(runs, key=lambda pair: pair[0].flops)


def _steps(recipe: Recipe, tokens: int, size_name: str) -> int:
    per_step = recipe.train.batch_size * recipe.sample_tokens
    if 2 * tokens < per_step:
        what = f"{tokens:,} tokens are less than one step of {size_name}, which reads {per_step:,}"
        raise ConfigError("tokens", what, "Take more tokens, or a smaller train.batch_size.")
    return max(1, round(tokens / per_step))


def launch_arguments(file: Path, overrides: Sequence[str], options: str) -> list[str]:
    """Write the list of all runs, and return the arguments of `xscale launch` that submit them as one Slurm array.

    `options` are those of `xscale launch slurm`. ConfigError with the problems of every run.
    """
    config = read_ladder(file)
    runs = plan_runs(config, overrides)
    for _, named in runs:
        check_unchanged(named, "Give the ladder another dir.")
    folder = Path(config.dir)
    members = folder / "members.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(
        members, json.dumps({run.name: list(run.overrides) for run, _ in runs}, indent=1).encode()
    )
    directory = f"run.dir={json.dumps(str(folder))}"
    return [
        "slurm",
        config.run,
        *config.overrides,
        *overrides,
        directory,
        "--members",
        str(members),
        *shlex.split(options),
    ]
