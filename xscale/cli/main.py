"""The command line. Each command imports what it needs when it runs, so that --help is fast."""

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xscale import __version__
from xscale.cli.bench import bench_app
from xscale.cli.checkpoint import checkpoint_app
from xscale.cli.complete import complete_key, complete_part_or_recipe, complete_recipe, complete_run
from xscale.cli.data import data_app
from xscale.cli.evaluate import evaluate
from xscale.cli.generate import generate
from xscale.cli.options import (
    ComparisonFile,
    ConfigFile,
    Json,
    LadderFile,
    Overrides,
    rank_from_launcher,
    read_config,
)
from xscale.cli.streams import check_arguments, open_closed_streams
from xscale.core.errors import EXIT_FAULT, EXIT_USER, ConfigError, FaultError, NoticeWarning, Problem
from xscale.core.renamed import RenamedWarning

if TYPE_CHECKING:
    from xscale.recipe import Recipe


COMPLETION = {"--install-completion", "--show-completion"}
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
"""Shells that typer completes."""

plot_app = typer.Typer(help="Plot attention patterns.", no_args_is_help=True)


@plot_app.command("pattern")
def plot_pattern(
    pattern: Annotated[str, typer.Argument(help="A kind of pattern, or the YAML config of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings of the pattern or the run: k=v.")] = None,
    tokens: Annotated[int, typer.Option(help="Sequence length.")] = 4096,
    heads: Annotated[int, typer.Option(help="Number of heads (for a kind).")] = 4,
    both: Annotated[bool, typer.Option("--both", help="Plot the bidirectional layout of a kind, not causal.")] = False,
    layers: Annotated[int, typer.Option(help="Number of layers (for a kind).")] = 1,
    block: Annotated[int, typer.Option(help="Tokens per block (for a kind).")] = 64,
    out: Annotated[Path | None, typer.Option(help="A .png, .svg or .pdf file; default: the terminal.")] = None,
) -> None:
    """Plot which blocks of keys each block of queries attends to, for each head."""
    from xscale.commands.plot_pattern import plot

    plot(pattern, overrides or [], out, tokens=tokens, heads=heads, both=both, layers=layers, block=block)


app = typer.Typer(
    name="xscale",
    help="Train sparse Transformers: mixtures of experts and efficient attention.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data_app, name="data")
app.add_typer(plot_app, name="plot")
app.add_typer(bench_app, name="bench")
app.add_typer(checkpoint_app, name="checkpoint")


def _version(shown: bool) -> None:
    if shown:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the resolved config with the origin of each value, and exit.")
    ] = False,
) -> None:
    """Train a model, in one process or as a rank started by torchrun or `xscale launch`.

    A run whose folder has checkpoints resumes from the newest good one.
    """
    if print_config:
        from xscale.core.compose import dump
        from xscale.core.config import encode

        recipe, composed = read_config(config, overrides)
        print(dump(encode(recipe), composed.origin), end="")
        return
    rank_from_launcher()
    recipe = _checked_recipe(config, overrides or [])
    from xscale.train.run import train as run

    raise typer.Exit(run(recipe))


def _checked_recipe(config: Path, overrides: list[str]) -> "Recipe":
    """Return the recipe of a run on the ranks of this job; ConfigError with all problems. Rank 0 prints warnings."""
    from xscale.core.compose import compose_leniently
    from xscale.mesh.environment import read_rank_info

    rank = read_rank_info()
    try:
        # A file that cannot be read is reported before torch is imported.
        composed = compose_leniently(config, overrides)
        from xscale.recipe import dropped_values, read_and_check
        from xscale.train.setup import check_machine

        recipe, _ = read_and_check(composed, rank.world, check_machine)
    except ConfigError as error:
        error.same_on_all_ranks = True
        raise
    for problem in [*dropped_values(recipe, composed), *recipe.warnings()] if rank.is_rank0 else ():
        print(f"xscale: warning: {problem}", file=sys.stderr, flush=True)
    return recipe


@app.command()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    world: Annotated[
        int | None, typer.Option(help="World size; default: the smallest that fits parallel.mesh.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="h100, h200, a100 or cpu: estimate step time and check memory.")
    ] = None,
    draw: Annotated[Path | None, typer.Option(help="Plot the pipeline schedule to a .png or .svg file.")] = None,
    memory: Annotated[
        float | None, typer.Option(help="Device memory in GB; without --device only memory is checked.")
    ] = None,
    node: Annotated[int | None, typer.Option(help="Devices per node.")] = None,
    link: Annotated[float | None, typer.Option(help="Bandwidth between devices of a node, in GB/s, one way.")] = None,
    network: Annotated[float | None, typer.Option(help="Bandwidth between nodes per device, in GB/s.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only validate the config; skip memory and time.")] = False,
    search: Annotated[bool, typer.Option("--search", help="Search the fastest layouts that fit --device.")] = False,
    best: Annotated[int, typer.Option(help="With --search: number of layouts to print.", min=1)] = 4,
    members: Annotated[
        typer.FileText | None,
        typer.Option(help="JSON list of lists of overrides (- reads stdin); prints a JSON list of plans."),
    ] = None,
    json: Json = False,
) -> None:
    """Plan a run without starting it: memory, communication, step time, layout; or every problem of the config."""
    from xscale.commands import plan as commands

    if check:
        options = {"--device": device, "--draw": draw, "--memory": memory, "--node": node, "--link": link}
        options["--search"] = search or None
        for name in [name for name, value in {**options, "--network": network}.items() if value is not None]:
            raise ConfigError(name, "cannot be combined with --check", f"Omit {name} or --check.")
    machine = None if check else commands.hardware(device, memory, node, link, network)
    if members is not None:
        if search or draw is not None:
            raise ConfigError("--members", "cannot be combined with --search or --draw", "Omit --search and --draw.")
        commands.members(config, overrides or [], members.read(), world, machine)
        return
    if machine is None:
        commands.check(config, overrides or [], world, as_json=json)
        return
    if search:
        if draw is not None:
            raise ConfigError("--draw", "cannot be combined with --search", "Omit --search.")
        commands.search(config, overrides or [], world, machine, best=best, as_json=json)
        return
    commands.run(config, overrides or [], world, machine, draw=draw, as_json=json)


@app.command("list")
def list_parts(
    name: Annotated[
        str | None,
        typer.Argument(
            help="recipes; xformers: all variants; a family, such as core; or any name; default: all families.",
            autocompletion=complete_part_or_recipe,
        ),
    ] = None,
    json: Json = False,
    tokens: Annotated[int | None, typer.Option(help="Patterns: show the density at this sequence length.")] = None,
    kind: Annotated[
        str | None, typer.Option(help="xformers: show the variants of one kind, such as attention.")
    ] = None,
) -> None:
    """List the recipes, the parts of each family with their traits, or the variants of Transformers."""
    from xscale.commands.list_parts import show

    show(name, as_json=json, tokens=tokens, kind=kind)


@app.command()
def explain(
    key: Annotated[
        str | None,
        typer.Argument(
            help="A key, such as optimizer.lr, moe.capacity_factor; a section; a kind; default: all sections.",
            autocompletion=complete_key,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Explain a config key: type, default, choices, meaning, override, the parts that have it; or list a section."""
    from xscale.commands.explain import explain as run

    run(key, as_json=json)


@app.command()
def init(
    recipe: Annotated[
        str, typer.Argument(help="A recipe or variant (`xscale list recipes`).", autocompletion=complete_recipe)
    ] = "quickstart",
    out: Annotated[Path | None, typer.Option(help="The YAML file to write; default: RECIPE.yaml.")] = None,
) -> None:
    """Write a recipe as one commented YAML file to edit. A file that exists is not overwritten."""
    from xscale.commands.recipes import init as run

    run(recipe, out)


@app.command()
def compare(
    file: ComparisonFile,
    overrides: Overrides = None,
    seed: Annotated[list[int] | None, typer.Option(help="Seeds, instead of those of the file.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each variant, interleaved.")] = 20,
    json: Json = False,
) -> None:
    """Train variants of a run with several seeds; report tokens and time to reach the reference's loss."""
    from xscale.commands.compare import compare as run

    raise typer.Exit(run(file, overrides or [], steps, tuple(seed or ()), as_json=json))


@app.command()
def ladder(
    file: LadderFile,
    overrides: Overrides = None,
    train: Annotated[bool, typer.Option(help="Train the runs that are missing; otherwise only report.")] = True,
    slurm: Annotated[
        str | None,
        typer.Option(metavar="OPTIONS", help="Submit all runs as one array, by `xscale launch slurm` with OPTIONS."),
    ] = None,
    json: Json = False,
) -> None:
    """Train a ladder of sizes, tokens and experts; fit a scaling law and hold its prediction against a larger size."""
    from xscale.commands.ladder import ladder as run
    from xscale.commands.ladder import launch_arguments

    if slurm is not None:
        from xscale_launch.main import main as launcher

        raise typer.Exit(launcher(launch_arguments(file, overrides or [], slurm)))
    raise typer.Exit(run(file, overrides or [], train=train, as_json=json))


@app.command()
def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="A run folder; or several, a folder of them, or a pattern.",
            autocompletion=complete_run,
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="Write this file, not RUN/report.html, or comparison.html for several runs.")
    ] = None,
) -> None:
    """Build report.html of a run, finished or not; of several runs, one page that compares them."""
    from xscale.core.atomic_write import reporting_full_disk
    from xscale.observe.compare_runs import build_comparison, find_runs
    from xscale.observe.html import REPORT_FILE, build_report

    folders = find_runs(runs)
    path = output or (folders[0] / REPORT_FILE if len(folders) == 1 else Path("comparison.html"))
    with reporting_full_disk(path, "Free space, or give another file with --output."):
        print(build_report(folders[0], path) if len(folders) == 1 else build_comparison(folders, path))


app.command()(generate)


app.command("eval")(evaluate)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def launch(context: typer.Context) -> None:
    """Launch a run: local | slurm | mpi CONFIG. Manage it: status | logs | cancel | requeue | resume RUN."""
    from xscale_launch.main import main as launcher

    raise typer.Exit(launcher(context.args))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def doctor(context: typer.Context) -> None:
    """Check this machine, or every node of the enclosing Slurm allocation: preflight without a run."""
    from xscale_launch.doctor import main as check_nodes

    raise typer.Exit(check_nodes(context.args))


def main() -> None:
    """Run the command line. Mistakes of the user are printed as sentences with exit status 2, without a traceback."""
    open_closed_streams()
    try:
        check_arguments(sys.argv[1:])
        with warnings.catch_warnings():
            warnings.showwarning = show_renamed_once(warnings.showwarning)
            if COMPLETION & set(sys.argv[1:2]):
                _check_shell(sys.argv[1])
            app()
    except ConfigError as error:
        _print_errors([_sentence(problem) for problem in error.problems], same_on_all_ranks=error.same_on_all_ranks)
        sys.exit(EXIT_USER)
    except FaultError as error:
        _print_errors([str(error)], same_on_all_ranks=False)
        sys.exit(EXIT_FAULT)


def _check_shell(option: str) -> None:
    """Refuse a shell that typer completes not, and an installation that has no place; ConfigError."""
    import shellingham

    try:
        shell = str(shellingham.detect_shell()[0])
    except (shellingham.ShellDetectionFailure, RuntimeError):
        shell = "unknown"
    if shell not in SHELLS:
        raise ConfigError(option, f"this shell ({shell}) has no completion", f"Start it in one of {', '.join(SHELLS)}.")
    home = Path.home()
    if option == "--install-completion" and not os.access(home, os.W_OK):
        fix = "Put the output of `xscale --show-completion` where your shell reads it."
        raise ConfigError(option, f"the folder {home} cannot be written", fix)


def _sentence(problem: Problem) -> str:
    """The problem, with the place of a part that another family has, or of a variant, if its kind is one."""
    if not problem.unknown_kind:
        return str(problem)
    from xscale.commands.catalogue import where

    location = where(problem.unknown_kind)
    return str(replace(problem, fix=f"{location}.") if location else problem)


def show_renamed_once(show: Callable[..., None]) -> Callable[..., None]:
    """A `warnings.showwarning` that prints each sentence for the user once, on rank 0; others go to `show`."""
    shown: set[str] = set()

    def show_warning(message: Warning | str, category: type[Warning], *location: Any, **options: Any) -> None:
        if not issubclass(category, RenamedWarning | NoticeWarning):
            show(message, category, *location, **options)
            return
        from xscale.mesh.environment import read_rank_info

        if str(message) not in shown and read_rank_info().is_rank0:
            print(f"xscale: warning: {message}", file=sys.stderr, flush=True)
        shown.add(str(message))

    return show_warning


def _print_errors(sentences: list[str], *, same_on_all_ranks: bool) -> None:
    """Print errors on stderr: by rank 0 only if all ranks have the same, otherwise by each rank with its number."""
    from xscale.mesh.environment import read_rank_info

    rank = read_rank_info()
    if same_on_all_ranks and not rank.is_rank0:
        return
    prefix = "xscale" if rank.is_single_process or same_on_all_ranks else f"xscale (rank {rank.rank})"
    print("\n".join(f"{prefix}: {sentence}" for sentence in sentences), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
