"""Arguments and options that several commands share, and how their values are resolved."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, overload

import typer
from typer.core import TyperCommand

from xscale.cli.terminal.complete import complete_override, complete_recipe, complete_run
from xscale.cli.terminal.usage import OTHERS_OPTIONS, command_name
from xscale.commands.show.recipes import RUNS, config_file
from xscale.core.compose import Composed, compose, parse_file
from xscale.core.errors import ConfigError, near_name
from xscale.core.key_words.others_words import way_of
from xscale.core.paths import path

if TYPE_CHECKING:
    from xscale.data.config import DataConfig
    from xscale.recipe import Recipe


@overload
def readable(config: Path) -> Path: ...
@overload
def readable(config: None) -> None: ...
def readable(config: Path | None) -> Path | None:
    """Refuse a config that is missing or no YAML before anything heavy is imported.

    The name of a recipe (`xscale list recipes`) or the id of a variant (`xscale list xformers`) stands for its file.
    None, where no config was given, stays.
    """
    return None if config is None else _readable(config, RUNS)


def _readable(config: Path, folder: str) -> Path:
    """The file of configs/`folder` that has the name `config`, or that path."""
    try:
        file = config_file(config, folder)
        parse_file(file)
    except ConfigError as error:
        error.same_on_all_ranks = True
        raise
    return file


def readable_comparison(file: Path) -> Path:
    return _readable(file, "compare")


def readable_ladder(file: Path) -> Path:
    return _readable(file, "ladder")


ConfigFile = Annotated[
    Path,
    typer.Argument(
        help="A YAML config, or the name of a recipe, such as quickstart, or of a variant, such as bigbird.",
        callback=readable,
        autocompletion=complete_recipe,
        parser=path,
    ),
]
ComparisonFile = Annotated[
    Path,
    typer.Argument(
        help="A comparison, such as configs/compare/experts.yaml, or its name: experts.",
        callback=readable_comparison,
        parser=path,
    ),
]
LadderFile = Annotated[
    Path,
    typer.Argument(
        help="A ladder, such as configs/ladder/bytes.yaml, or its name: bytes.",
        callback=readable_ladder,
        parser=path,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Config overrides: key.path=value.", autocompletion=complete_override),
]
RunFolder = Annotated[
    Path, typer.Argument(help="A run folder.", autocompletion=complete_run, parser=path)
]
CheckpointFolder = Annotated[
    Path,
    typer.Argument(
        help="A run folder, or a checkpoint in it.", autocompletion=complete_run, parser=path
    ),
]
TensorPrefix = Annotated[str, typer.Option(help="Only tensors whose names start with this prefix.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Plugins = Annotated[
    bool, typer.Option("--plugins", help="Import the Python modules that the run's config names.")
]
Ema = Annotated[
    bool,
    typer.Option(
        "--ema", help="Use the moving average of the weights, which train.ema_decay keeps."
    ),
]
LengthPenalty = Annotated[
    float | None,
    typer.Option(
        min=0, help="Alpha of the beam search, which favours longer texts; 0: none; default: 0.6."
    ),
]
PenaltyForm = Annotated[
    # As in `xscale.generate.beam_search`, which imports torch.
    Literal["wu", "power"] | None,
    typer.Option(
        help="Form of that penalty: wu, ((5 + length) / 6)^alpha, or power, length^alpha; default: wu."
    ),
]
Record = Annotated[Path | None, typer.Option(help="Also write the JSON to this file.", parser=path)]


class CommandWithSettings(TyperCommand):
    """A command with `Overrides`: an option that it does not have may be a setting, as in other trainers' commands."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        parameters = self.get_params(ctx)
        options = {
            name: bool(getattr(option, "is_flag", False))
            for option in parameters
            for name in (*option.opts, *option.secondary_opts)
        }
        before = ""
        for argument in args:
            if argument == "--":
                break
            name, _, value = argument.partition("=")
            # What follows an option that takes a value is its value.
            is_value = not options.get(before, True)
            before = argument
            if (
                is_value
                or not name.startswith("--")
                or name in options
                or name in ctx.help_option_names
            ):
                continue
            names = [option.lstrip("-") for option in options if option.startswith("--")]
            word = name.lstrip("-")
            known = way_of(word) or name in OTHERS_OPTIONS
            near = "" if known else near_name(word, names)
            fix = f"Did you mean --{near}?" if near else _as_setting(word, value)
            raise ConfigError(name, f"`{command_name(ctx)}` has no such option", fix)
        return super().parse_args(ctx, args)


def _as_setting(option: str, value: str) -> str:
    """A sentence on the config key that the name of an unknown option may mean."""
    from xscale.commands.show.explain import config_keys

    query = option.replace("-", "_")
    if way := way_of(query) or OTHERS_OPTIONS.get(f"--{option}", ""):
        return way
    keys = config_keys()
    groups = keys.find(query)
    meant = [group[0].path for group in groups] or keys.suggest(query)
    example = f"{meant[0] if meant else 'train.steps'}={value or 'VALUE'}"
    return f"Settings are given as key=value: {example}."


def checkpoints_in(path: Path) -> Path:
    """Return the checkpoints of a run folder; any other path is returned unchanged."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


Step = Annotated[
    int | None,
    typer.Option("--step", min=0, help="Read the checkpoint of this step; default: newest."),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse where the newest checkpoint is damaged.")
]


def checkpoint_to_read(run: Path, step: int | None, strict: bool) -> Path:
    """Return the checkpoint of `run` that the options choose; without them `run`, whose newest good one is read."""
    if step is None and not strict:
        return run
    from xscale.checkpoint.tools.tools import find_checkpoint

    return find_checkpoint(checkpoints_in(run), step=step, strict=strict)


def read_config(config: Path, overrides: list[str] | None) -> tuple["Recipe", Composed]:
    """Compose and validate a config; one that cannot be read is refused before torch is imported."""
    composed = compose(config, overrides or [])
    from xscale.recipe import decode_recipe

    return decode_recipe(composed), composed


def data_config(config: Path, overrides: list[str] | None) -> "DataConfig":
    """Return the `data` section of a config."""
    return read_config(config, overrides)[0].data


def rank_0_alone() -> None:
    """Go on as one process in rank 0 of several that srun, mpirun or torchrun started; end the others, which are done.

    For a command of one process: several would write the same files.
    """
    from xscale.mesh.environment import leave_other_ranks, read_rank_info

    _set_rank()
    if not read_rank_info().is_rank0:
        raise typer.Exit
    leave_other_ranks()


def rank_from_launcher() -> None:
    """Set RANK and WORLD_SIZE in this process if mpirun or srun started it directly; ConfigError if that fails.

    In an interactive shell, where nobody may start the other ranks, rank 0 says at once that it waits for them.
    """
    from xscale.mesh.environment import (
        is_in_terminal_of_srun,
        read_rank_info,
        why_ranks_are_missing,
    )

    _set_rank()
    rank = read_rank_info()
    if rank.is_rank0 and not rank.is_single_process and is_in_terminal_of_srun():
        text = f"rank 0 of {rank.world} waits for the others. {why_ranks_are_missing(rank.world)}"
        print(f"xscale: {text}", file=sys.stderr, flush=True)


def _set_rank() -> None:
    from xscale_launch.mpi.mpi_rank import set_rank_env
    from xscale_launch.status import LaunchError

    try:
        set_rank_env()
    except LaunchError as error:
        raise ConfigError("", str(error)) from None
