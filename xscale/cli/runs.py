"""`xscale compare`, `ladder` and `report`: several runs, and the pages on them."""

from pathlib import Path
from typing import Annotated

import typer

from xscale.cli.terminal.complete import complete_run
from xscale.cli.terminal.options import ComparisonFile, Json, LadderFile, Overrides
from xscale.core.paths import path, path_or_pattern
from xscale.core.say import say


def compare(
    file: ComparisonFile,
    overrides: Overrides = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="Seeds, instead of those of the file.")
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Timed steps of each variant, interleaved.")
    ] = 20,
    json: Json = False,
) -> None:
    """Train variants of a run with several seeds; report tokens and time to reach the reference's loss."""
    from xscale.commands.study.compare import compare as run

    raise typer.Exit(run(file, overrides or [], steps, tuple(seed or ()), as_json=json))


def ladder(
    file: LadderFile,
    overrides: Overrides = None,
    train: Annotated[
        bool, typer.Option(help="Train the runs that are missing; otherwise only report.")
    ] = True,
    slurm: Annotated[
        str | None,
        typer.Option(
            metavar="OPTIONS",
            help="Submit all runs as one array, by `xscale launch slurm` with OPTIONS.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Train a ladder of sizes, tokens and experts; fit a scaling law and hold its prediction against a larger size."""
    from xscale.commands.study.ladder import ladder as run
    from xscale.commands.study.ladder import launch_arguments

    if slurm is not None:
        from xscale_launch.main import main as launcher

        raise typer.Exit(launcher(launch_arguments(file, overrides or [], slurm)))
    raise typer.Exit(run(file, overrides or [], train=train, as_json=json))


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="A run folder; or several, a folder of them, or a pattern.",
            parser=path_or_pattern,
            autocompletion=complete_run,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write this file, not RUN/report.html, or comparison.html for several runs.",
            parser=path,
        ),
    ] = None,
) -> None:
    """Build report.html of a run, finished or not; of several runs, one page that compares them."""
    from xscale.core.files.atomic_write import reporting_full_disk
    from xscale.observe.compare_runs import build_comparison, find_runs
    from xscale.observe.html import REPORT_FILE, build_report

    folders = find_runs(runs)
    path = output or (folders[0] / REPORT_FILE if len(folders) == 1 else Path("comparison.html"))
    with reporting_full_disk(path, "give another file with --output."):
        built = (
            build_report(folders[0], path) if len(folders) == 1 else build_comparison(folders, path)
        )
    say(str(built))
