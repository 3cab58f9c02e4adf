"""The command line. Each command imports what it needs when it runs, so that --help is fast."""

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xscale.cli.bench import bench_app
from xscale.cli.checkpoint import checkpoint_app
from xscale.cli.data import data_app
from xscale.cli.evaluate import evaluate
from xscale.cli.generate import generate
from xscale.cli.plan import plan
from xscale.cli.plot import plot_app
from xscale.cli.recipes import check_part, explain, init, list_parts
from xscale.cli.runs import compare, ladder, report
from xscale.cli.terminal.complete import (
    LauncherCommand,
    complete_doctor,
    complete_launch,
    of_option,
)
from xscale.cli.terminal.group import Group
from xscale.cli.terminal.options import CommandWithSettings
from xscale.cli.terminal.quiet import silent_libraries, without_libraries
from xscale.cli.terminal.streams import check_arguments, flush_output, open_closed_streams
from xscale.cli.train import train
from xscale.core.errors import (
    EXIT_FAULT,
    EXIT_USER,
    ConfigError,
    FaultError,
    NoticeWarning,
    Problem,
)
from xscale.core.files.file_errors import OF_THE_DISK, file_sentence
from xscale.core.key_words.renamed import RenamedWarning
from xscale.core.say import say_aside
from xscale.core.version import __version__

if TYPE_CHECKING:
    from xscale.mesh.environment import RankInfo

COMPLETION = {"--install-completion", "--show-completion"}
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
"""Shells that typer completes."""

app = typer.Typer(
    cls=Group,
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


app.command(cls=CommandWithSettings)(train)
app.command(cls=CommandWithSettings)(plan)
app.command("list")(list_parts)
app.command()(explain)
app.command()(init)
app.command("check-part")(check_part)
app.command(cls=CommandWithSettings)(compare)
app.command(cls=CommandWithSettings)(ladder)
app.command()(report)
app.command()(generate)
app.command("eval")(evaluate)


OF_THE_LAUNCHER: dict[str, Any] = {
    "cls": LauncherCommand,
    "context_settings": {"ignore_unknown_options": True, "help_option_names": []},
    "add_help_option": False,
}
"""Settings of a command whose words the launcher parses, `--help` too."""


@app.command(**OF_THE_LAUNCHER)
def launch(
    words: Annotated[
        list[str] | None, typer.Argument(hidden=True, autocompletion=complete_launch)
    ] = None,
) -> None:
    """Launch a run: local | slurm | mpi CONFIG. Manage it: status | logs | cancel | requeue | resume RUN."""
    from xscale_launch.main import main as launcher

    raise typer.Exit(launcher(words or []))


@app.command(**OF_THE_LAUNCHER)
def doctor(
    words: Annotated[
        list[str] | None, typer.Argument(hidden=True, autocompletion=complete_doctor)
    ] = None,
) -> None:
    """Check this machine, or every node of the enclosing Slurm allocation: preflight without a run."""
    from xscale_launch.doctor import main as check_nodes

    raise typer.Exit(check_nodes(words or []))


def main(command: Callable[[], object] = app) -> None:
    """Run a command line, that of xscale or of a plugin, with the arguments of this process.

    Mistakes of the user are printed as sentences with exit status 2, without a traceback.
    """
    from xscale.mesh.environment import join_split_options, wait_passively

    wait_passively()
    join_split_options()
    open_closed_streams()
    try:
        check_arguments(sys.argv[1:])
        with silent_libraries(), warnings.catch_warnings():
            warnings.showwarning = show_renamed_once(without_libraries(warnings.showwarning))
            if COMPLETION & set(sys.argv[1:2]):
                _check_shell(sys.argv[1])
            try:
                _run_or_complete(command)
            finally:
                flush_output()
    except ConfigError as error:
        _print_errors(
            [_sentence(problem) for problem in error.problems],
            same_on_all_ranks=error.same_on_all_ranks,
        )
        sys.exit(EXIT_USER)
    except FaultError as error:
        _print_errors([str(error)], same_on_all_ranks=False)
        sys.exit(EXIT_FAULT)
    except OSError as error:
        sentence = file_sentence(error)
        if sentence is None:
            raise
        _print_errors([sentence], same_on_all_ranks=False)
        sys.exit(EXIT_FAULT if error.errno in OF_THE_DISK else EXIT_USER)


def _run_or_complete(command: Callable[[], object]) -> None:
    """Run the command; where a shell asks for the value in `--option=value`, print candidates as it takes them."""
    from xscale.mesh.environment import split_joined_option

    shell, option = split_joined_option()
    if not option:
        command()
        return
    try:
        with contextlib.redirect_stdout(io.StringIO()) as values:
            command()
    finally:
        print(of_option(shell, option, values.getvalue()), end="")


def _check_shell(option: str) -> None:
    """Refuse a shell that typer completes not, and an installation that has no place; ConfigError."""
    import shellingham

    try:
        shell = str(shellingham.detect_shell()[0])
    except (shellingham.ShellDetectionFailure, RuntimeError):
        shell = "unknown"
    if shell not in SHELLS:
        raise ConfigError(
            option,
            f"this shell ({shell}) has no completion",
            f"Start it in one of {', '.join(SHELLS)}.",
        )
    home = Path.home()
    if option == "--install-completion" and not os.access(home, os.W_OK):
        fix = "Put the output of `xscale --show-completion` where your shell reads it."
        raise ConfigError(option, f"the folder {home} cannot be written", fix)


def _sentence(problem: Problem) -> str:
    """The problem, with the place of a part that another family has, or of a variant, if its kind is one.

    A key that no section has is shown as the override of the parts that have it.
    """
    if problem.unknown_key and (words := _words_of_parts(problem.unknown_key)):
        return str(replace(problem, fix=f"Did you mean {' or '.join(map(repr, words))}?"))
    if not problem.unknown_kind:
        return str(problem)
    from xscale.commands.show.catalogue import where

    location = where(problem.unknown_kind)
    return str(replace(problem, fix=f"{location}.") if location else problem)


def _words_of_parts(key: str) -> list[str]:
    """Words that name a key by the parts that have it, such as moe.capacity_factor; at most three."""
    from xscale.commands.show.explain import config_keys
    from xscale.commands.show.explain_override import override_of

    keys = config_keys()
    words = [override_of(keys, group[0]).strip("'").partition("=")[0] for group in keys.find(key)]
    return list(dict.fromkeys(words))[:3]


def show_renamed_once(show: Callable[..., None]) -> Callable[..., None]:
    """A `warnings.showwarning` that prints each sentence for the user once, on rank 0; others go to `show`."""
    shown: set[str] = set()

    def show_warning(
        message: Warning | str, category: type[Warning], *location: Any, **options: Any
    ) -> None:
        if not issubclass(category, RenamedWarning | NoticeWarning):
            show(message, category, *location, **options)
            return
        if str(message) not in shown and _speaking_rank().is_rank0:
            say_aside(f"xscale: warning: {message}")
        shown.add(str(message))

    return show_warning


def _speaking_rank() -> "RankInfo":
    """Read which rank prints a message; where the variables of ranks are what is refused, a single process does."""
    from xscale.mesh.environment import RankInfo, read_rank_info

    try:
        return read_rank_info()
    except ConfigError:
        return RankInfo()


def _print_errors(sentences: list[str], *, same_on_all_ranks: bool) -> None:
    """Print errors on stderr: by rank 0 only if all ranks have the same, otherwise by each rank with its number."""
    rank = _speaking_rank()
    if same_on_all_ranks and not rank.is_rank0:
        return
    prefix = (
        "xscale" if rank.is_single_process or same_on_all_ranks else f"xscale (rank {rank.rank})"
    )
    # A sentence may quote a path or a file, which may be from anyone.
    say_aside("\n".join(f"{prefix}: {sentence}" for sentence in sentences))


if __name__ == "__main__":
    main()
