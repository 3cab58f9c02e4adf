"""`xscale plot`: attention patterns."""

from pathlib import Path
from typing import Annotated

import typer

from xscale.cli.terminal.complete import complete_pattern_or_recipe
from xscale.cli.terminal.group import Group
from xscale.core.paths import path, path_or_pattern

plot_app = typer.Typer(cls=Group, help="Plot attention patterns.", no_args_is_help=True)


@plot_app.command("pattern")
def plot_pattern(
    pattern: Annotated[
        str,
        typer.Argument(
            help="A kind of pattern; or the YAML config of a run, or the name of a recipe.",
            autocompletion=complete_pattern_or_recipe,
            parser=path_or_pattern,
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings of the pattern or the run: k=v.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Sequence length.")] = 4096,
    heads: Annotated[int, typer.Option(help="Number of heads (for a kind).")] = 4,
    both: Annotated[
        bool, typer.Option("--both", help="Plot the bidirectional layout of a kind, not causal.")
    ] = False,
    layers: Annotated[int, typer.Option(help="Number of layers (for a kind).")] = 1,
    block: Annotated[int, typer.Option(help="Tokens per block (for a kind).")] = 64,
    out: Annotated[
        Path | None,
        typer.Option(help="A .png, .svg or .pdf file; default: the terminal.", parser=path),
    ] = None,
) -> None:
    """Plot which blocks of keys each block of queries attends to, for each head."""
    from xscale.commands.show.plot_pattern import plot

    plot(
        pattern,
        overrides or [],
        out,
        tokens=tokens,
        heads=heads,
        both=both,
        layers=layers,
        block=block,
    )
