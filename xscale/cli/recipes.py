"""`xscale list`, `explain` and `init`: what there is to choose, what a key means, a recipe to edit."""

from pathlib import Path
from typing import Annotated

import typer

from xscale.cli.terminal.complete import complete_key, complete_part_or_recipe, complete_recipe
from xscale.cli.terminal.options import Json, Overrides
from xscale.core.paths import path, path_or_pattern


def list_parts(
    name: Annotated[
        str | None,
        typer.Argument(
            help="recipes; xformers: all variants; a family, such as core; or any name; default: all families.",
            autocompletion=complete_part_or_recipe,
        ),
    ] = None,
    json: Json = False,
    tokens: Annotated[
        int | None, typer.Option(help="Patterns: show the density at this sequence length.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="xformers: show the variants of one kind, such as attention.")
    ] = None,
) -> None:
    """List the recipes, the parts of each family with their traits, or the variants of Transformers."""
    from xscale.commands.show.list_parts import show

    show(name, as_json=json, tokens=tokens, kind=kind)


def explain(
    key: Annotated[
        str | None,
        typer.Argument(
            help="A key, such as optimizer.lr, moe.capacity_factor; a section; a kind; default: all sections.",
            autocompletion=complete_key,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="A config, recipe or run: say where it has the key, and its value.",
            autocompletion=complete_recipe,
            parser=path_or_pattern,
        ),
    ] = None,
    overrides: Overrides = None,
    json: Json = False,
) -> None:
    """Explain a config key: type, default, choices, meaning, override, the parts that have it; or list a section."""
    from xscale.commands.show.explain import explain as run
    from xscale.commands.show.recipes import recipe_or_run, what_else
    from xscale.core.compose import compose

    composed = None if recipe is None else compose(recipe_or_run(recipe), overrides or [])
    run(key, composed, recipe or "", what_else=what_else(key or ""), as_json=json)


def init(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="A recipe or variant (`xscale list recipes`); default: quickstart.",
            parser=path_or_pattern,
            autocompletion=complete_recipe,
        ),
    ] = None,
    from_: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            help="In place of a recipe: a config of Megatron-LM, torchtitan, DeepSpeed, HF Trainer, nanoGPT "
            "or nanochat; once more: the config.json of a model.",
            parser=path,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The YAML file to write; default: RECIPE.yaml.", parser=path)
    ] = None,
) -> None:
    """Write a recipe as one commented YAML file to edit. A file that exists is not overwritten."""
    if from_:
        from xscale.commands.show.init_from import init_from

        init_from(recipe, from_, out)
    else:
        from xscale.commands.show.recipe_file import init as run

        run(recipe or "quickstart", out)


def check_part(
    module: Annotated[
        str,
        typer.Argument(
            help="A Python file, such as mine.py, or the name of a module.", parser=path_or_pattern
        ),
    ],
    names: Annotated[list[str] | None, typer.Argument(help="Parts of it; default: all.")] = None,
) -> None:
    """Check a part of your own: what its traits declare, held against what it does. Exit status 1: a check fails."""
    from xscale.commands.check_part import check_part as run

    raise typer.Exit(run(module, names or []))
