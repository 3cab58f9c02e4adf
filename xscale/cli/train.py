"""`xscale train`: a run, in one process or as a rank of several."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xscale.cli.terminal.options import ConfigFile, Overrides, rank_from_launcher, read_config
from xscale.core.errors import ConfigError

if TYPE_CHECKING:
    from xscale.recipe import Recipe


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config",
            help="Print the resolved config with the origin of each value, and exit.",
        ),
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
        from xscale.commands.show.override_notes import say_at_start
        from xscale.recipe import read_and_check
        from xscale.train.setup import check_machine

        recipe, _ = read_and_check(composed, rank.world, check_machine)
    except ConfigError as error:
        error.same_on_all_ranks = True
        raise
    if rank.is_rank0:
        say_at_start(recipe, composed)
        _warn_of_deadline(recipe.checkpoint.deadline_seconds)
    return recipe


def _warn_of_deadline(deadline: float) -> None:
    """Say so where the launcher kills this process before it would give up the save of a signal."""
    from xscale.mesh.environment import launcher_stop_seconds

    stop_seconds = launcher_stop_seconds()
    if stop_seconds is not None and deadline > stop_seconds:
        what = f"checkpoint.deadline_seconds is {deadline:g} s, but the launcher kills a rank {stop_seconds:g} s"
        fix = f"Set checkpoint.deadline_seconds below {stop_seconds:g}, or let the launcher wait longer."
        print(
            f"xscale: warning: {what} after a signal, in the middle of its save. {fix}",
            file=sys.stderr,
            flush=True,
        )
