"""`xscale plan`: print the plan of a run, search layouts, and plot the pipeline schedule."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xscale.commands.overload import BALANCED, OverloadOptions
from xscale.commands.show.override_notes import say_at_start
from xscale.core.compose import Composed, compose_leniently, dump
from xscale.core.config import encode
from xscale.core.errors import EXIT_DONE, EXIT_TOO_LARGE, ConfigError, Problem, counted
from xscale.core.files.file_safety import decode_json
from xscale.mesh import axes
from xscale.recipe import Recipe, read, read_and_check

if TYPE_CHECKING:
    from xscale.planning import Hardware

PICTURES = (".png", ".svg", ".pdf")


def hardware(
    device: str | None,
    memory: float | None,
    node: int | None,
    link: float | None,
    network: float | None,
    flops: float | None = None,
    bandwidth: float | None = None,
) -> "Hardware":
    """Build the hardware from the options, in GB, GB/s and TFLOP/s; ConfigError for an option that needs --device."""
    from xscale.planning import Hardware

    giga = {"--memory": memory, "--link": link, "--network": network, "--node": node}
    giga |= {"--flops": flops, "--bandwidth": bandwidth}
    options = [name for name, value in giga.items() if value is not None]
    speeds = [name for name in options if name != "--memory"]
    if speeds and device is None:
        raise ConfigError(speeds[0], "needs --device", "Give one, such as --device h100.")
    for name in options:
        if giga[name] is not None and not giga[name] > 0:  # type: ignore[operator]
            raise ConfigError(name, f"must be greater than 0, got {giga[name]}")
    memory, link, network, bandwidth = (
        None if giga_value is None else giga_value * 1e9
        for giga_value in (memory, link, network, bandwidth)
    )
    flops = None if flops is None else flops * 1e12
    return Hardware(device, memory, node, link, network, flops, bandwidth)


def run(
    config: Path,
    overrides: list[str],
    world: int | None,
    hardware: "Hardware",
    *,
    overload: OverloadOptions = BALANCED,
    draw: Path | None = None,
    as_json: bool = False,
) -> int:
    """Print the plan; return the exit status, 3 where it does not fit. `world` None: the smallest of the mesh.

    ConfigError with every problem.
    """
    recipe, composed, world = _checked(config, overrides, world)
    if draw is not None:
        _draw(recipe, world, draw)
    answer = _answer(recipe, composed, world, hardware, overload)
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        from xscale.planning import format_plan

        print("\n".join(format_plan(answer)))
    return EXIT_TOO_LARGE if answer.get("fits") is False else EXIT_DONE


def search(
    config: Path,
    overrides: list[str],
    world: int | None,
    hardware: "Hardware",
    *,
    best: int,
    as_json: bool = False,
) -> None:
    """Print the fastest layouts that fit; keys in `overrides` are not varied. ConfigError when no layout fits."""
    from xscale.planning import search as searching

    recipe, _ = read(config, overrides)
    ranks = axes.min_world_size(recipe.parallel.mesh) if world is None else world

    def change(more: Sequence[str]) -> Recipe | None:
        changed, _ = read(config, [*overrides, *more])
        return changed if changed.is_valid(ranks) else None

    fixed = frozenset(override.partition("=")[0] for override in overrides)
    layouts = searching.search(
        recipe,
        change,
        fixed,
        ranks,
        hardware,
        best,
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    text = (
        json.dumps([searching.as_json(layout) for layout in layouts], indent=2) if as_json else ""
    )
    print(text or "\n".join(searching.format_ranked(layouts)))


def members(
    config: Path,
    overrides: list[str],
    lists: str,
    world: int | None,
    hardware: "Hardware | None",
    overload: OverloadOptions = BALANCED,
) -> None:
    """Print a JSON list of plans, one per list of overrides in the JSON text `lists`; without hardware only check them.

    One process serves a whole sweep: starting a process takes longer than checking a config.
    """
    answers, wrong = [], dict[Problem, list[str]]()
    many = _lists(lists)
    for more in many:
        try:
            recipe, composed, ranks = _checked(config, [*overrides, *more], world)
            answers.append(_answer(recipe, composed, ranks, hardware, overload))
        except ConfigError as error:
            for problem in error.problems:
                wrong.setdefault(problem, []).append(" ".join(more) or "no more overrides")
    if wrong:
        raise ConfigError(
            _of_members(problem, whose, len(many)) for problem, whose in wrong.items()
        )
    print(json.dumps(answers))


def _of_members(problem: Problem, whose: list[str], count: int) -> Problem:
    """Add the overrides that cause the problem, unless all members have it."""
    if len(whose) == count:
        return problem
    more = f" and {len(whose) - 1} more" if len(whose) > 1 else ""
    return replace(problem, what=f"{problem.what} (with {whose[0]}{more})")


def _lists(text: str) -> list[list[str]]:
    """Parse a JSON list of lists of overrides."""
    what = "must be a JSON list of lists of overrides"
    try:
        lists = decode_json(text)
    except ValueError:
        lists = None
    if not isinstance(lists, list) or not all(isinstance(overrides, list) for overrides in lists):
        raise ConfigError("--members", what, 'Write [["train.steps=1"], ["train.steps=2"]].')
    return [[str(word) for word in overrides] for overrides in lists]


def _answer(
    recipe: Recipe,
    composed: Composed,
    world: int,
    hardware: "Hardware | None",
    overload: OverloadOptions = BALANCED,
) -> dict[str, Any]:
    """Return what `--json` prints for one run."""
    if hardware is None:
        return {"world": world, "problems": [], **read_from(recipe, composed)}
    from xscale.planning import plan

    ep = axes.resolve(recipe.parallel.mesh, world).ep
    return plan(recipe, world, hardware, overload.of(ep)) | read_from(recipe, composed)


def check(config: Path, overrides: list[str], world: int | None, *, as_json: bool) -> None:
    """Check a config; ConfigError with every problem."""
    recipe, composed, world = _checked(config, overrides, world)
    if as_json:
        print(json.dumps(_answer(recipe, composed, world, None), indent=2))
    else:
        print(f"{config} is valid on {counted(world, 'process')}; memory and time were not checked")


def _checked(config: Path, overrides: list[str], world: int | None) -> tuple[Recipe, Composed, int]:
    composed = compose_leniently(config, overrides)
    recipe, world = read_and_check(composed, world)
    say_at_start(recipe, composed)
    return recipe, composed, world


def read_from(recipe: Recipe, composed: Composed) -> dict[str, Any]:
    """Return what a launcher needs: the run folder, the resolved config, and the files that it depends on."""
    return {
        "run_dir": recipe.run.dir,
        "config": dump(encode(recipe), composed.origin),
        "files": [str(file) for file in composed.files],
        "plugins": list(recipe.plugins),
    }


def _draw(recipe: Recipe, world: int, file: Path) -> None:
    from xscale.parallel.pipeline.simulate import draw_picture, simulate_schedule
    from xscale.planning import vocabulary_of
    from xscale.settings.settings import build_on_meta

    if file.suffix not in PICTURES:
        what = f"'{file.name}' has no supported suffix"
        raise ConfigError("--draw", what, f"Use one of {', '.join(PICTURES)}.")
    degrees = axes.resolve(recipe.parallel.mesh, world)
    if degrees.pp == 1:
        raise ConfigError(
            "--draw", "a single pipeline stage has no schedule", "Set parallel.mesh.pp above 1."
        )
    micros = recipe.train.batch_size // (recipe.train.micro_batch_size * degrees.dp)
    model = build_on_meta(recipe, vocabulary_of(recipe))
    config = recipe.parallel.pipeline
    title = f"{config.schedule}: {degrees.pp} stages' ranks, {micros} micro-batches"
    draw_picture(
        simulate_schedule(model, config, degrees.pp, micros, recipe.data.sequence_length),
        file,
        title,
    )
