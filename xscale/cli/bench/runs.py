"""`xscale bench` of whole runs: their steps, the memory that these take, and their checkpoints."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from xscale.cli.terminal.complete import complete_recipe
from xscale.cli.terminal.options import ConfigFile, Json, Overrides, Record, read_config, readable
from xscale.core.errors import ConfigError
from xscale.core.paths import path


def bench_checkpoint(
    folder: Annotated[
        Path,
        typer.Option(
            help="A folder on the disk to measure; the files written there are deleted.",
            parser=path,
        ),
    ] = Path(),
    megabytes: Annotated[int, typer.Option(min=1, help="Size of the state.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Saves of each kind.")] = 5,
    device: Annotated[str, typer.Option(help="Device of the state: cpu or cuda.")] = "cpu",
    boxes: Annotated[
        int, typer.Option(min=0, help="Boxes of the first save's plan; 0: no plan.")
    ] = 30_000,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Train this config or recipe instead, and print its step times through its saves.",
            callback=readable,
            autocompletion=complete_recipe,
            parser=path,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of that run.")] = 60,
    every: Annotated[int, typer.Option(help="Its steps between two saves.")] = 20,
    json: Json = False,
) -> None:
    """Measure how long training waits for a checkpoint: synchronous against asynchronous, with and without hashing.

    And how long the ranks of a large run wait for the plan of its first save. With --config: the trace of step times.
    """
    from dataclasses import asdict

    if config is not None:
        _bench_trace(config, steps, every, as_json=json)
        return

    from xscale.bench.checkpoint import first_plan, show, show_plan, stall

    if not folder.is_dir():
        raise ConfigError("--folder", f"folder {folder} does not exist", "Give an existing folder.")
    stalls = stall(folder, megabytes=megabytes, repeats=repeats, device=device)
    plan = first_plan(boxes, repeats) if boxes else None
    if json:
        import json as text

        print(text.dumps({**asdict(stalls), "first_plan": None if plan is None else asdict(plan)}))
        return
    print(show(stalls))
    if plan is not None:
        print(show_plan(plan))


def _bench_trace(config: Path, steps: int, every: int, *, as_json: bool) -> None:
    from dataclasses import asdict
    from json import dumps

    from xscale.bench.checkpoint_trace import show_trace, trace_steps

    recipe, _ = read_config(config, [])
    if problems := recipe.check(1):
        raise ConfigError(problems)
    trace = trace_steps(recipe, steps, every)
    print(dumps(asdict(trace)) if as_json else show_trace(trace, every))


def bench_memory(
    config: ConfigFile,
    overrides: Overrides = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="With recomputation too.")] = False,
    json: Json = False,
) -> None:
    """Measure the peak memory of two training steps on one device beside the prediction of `xscale plan`."""
    from dataclasses import asdict
    from json import dumps

    from xscale.bench.memory import compare_memory, show

    variants = {
        "as configured": [],
        **({"recomputation": ["parallel.recompute.every=1"]} if recompute else {}),
    }
    comparisons = []
    for name, changes in variants.items():
        recipe, _ = read_config(config, [*(overrides or []), *changes])
        if problems := recipe.check(1):
            raise ConfigError(problems)
        comparisons.append((name, compare_memory(recipe)))
    print(dumps({name: asdict(row) for name, row in comparisons}) if json else show(comparisons))


def bench_plan(
    recipes: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Recipes, by file or name; default: all of configs/run and configs/xformer.",
            parser=path,
            autocompletion=complete_recipe,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device that is planned for.")] = "h100",
    limit: Annotated[float, typer.Option(help="Most seconds of a plan.", min=1)] = 300,
    json: Json = False,
) -> None:
    """Measure the processor time and the memory that `xscale plan` takes for each recipe.

    The exit status is 1 where a plan fails.
    """
    from dataclasses import asdict
    from json import dumps

    from xscale.planning.plan_costs import all_recipes, cost_of_plan, format_costs

    files = [readable(recipe) for recipe in recipes] if recipes else all_recipes()
    costs = []
    for file in files:
        costs.append(cost_of_plan(file, device, limit))
        print(f"{file.stem}: {costs[-1].seconds:.1f} s", file=sys.stderr, flush=True)
    print(dumps([asdict(cost) for cost in costs]) if json else format_costs(costs))
    if any(cost.failed for cost in costs):
        raise typer.Exit(1)


def bench_train(
    config: ConfigFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each side.")] = 12,
    side: Annotated[
        list[str] | None,
        typer.Option(
            help="A side, several times: xscale, 'plain PyTorch', transformers ...; default: all."
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="On a GPU, write a trace of two steps of xscale here.", parser=path),
    ] = None,
    json: Json = False,
) -> None:
    """Benchmark a training step against plain PyTorch, transformers, balanced routing and an MoE's dense equivalent."""
    recipe, _ = read_config(config, overrides)
    from xscale.bench.train import bench_train as run
    from xscale.bench.train import format_result

    if problems := recipe.check(1):
        raise ConfigError(problems)
    result = run(recipe, steps, side or [], profile=profile)
    if json:
        import json as text

        print(text.dumps(result))
        return
    print(format_result(result))


def bench_start(
    config: ConfigFile = Path("quickstart"),
    overrides: Overrides = None,
    processes: Annotated[
        int, typer.Option(help="Processes of this machine that train.", min=1)
    ] = 1,
    json: Json = False,
    record: Record = None,
) -> None:
    """Time the start of a run, phase by phase: until its first step, and from a kill until the next one."""
    from dataclasses import asdict
    from json import dumps

    from xscale.bench.start.bench_start import bench_start as run
    from xscale.bench.start.bench_start import show
    from xscale.core.files.atomic_write import write_atomically

    recipe, _ = read_config(config, overrides)
    if problems := recipe.check(processes):
        raise ConfigError(problems)
    starts = run(config.absolute(), overrides or [], processes, recipe.parallel.compile)
    text = dumps([{**asdict(start), "compile": start.compile_seconds} for start in starts])
    if record is not None:
        write_atomically(record, f"{text}\n")
    print(text if json else show(starts))
