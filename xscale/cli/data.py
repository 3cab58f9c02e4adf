"""`xscale data`: tokenizers and tokenised data."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from xscale.cli.terminal.complete import complete_recipe
from xscale.cli.terminal.group import Group
from xscale.cli.terminal.options import (
    CommandWithSettings,
    ConfigFile,
    Json,
    Overrides,
    data_config,
    rank_from_launcher,
    read_config,
    readable,
)
from xscale.commands.show.recipes import recipe_names
from xscale.core.errors import ConfigError
from xscale.core.paths import path
from xscale.core.say import say

data_app = typer.Typer(
    cls=Group, help="Train tokenizers; prepare and inspect tokenised data.", no_args_is_help=True
)


@data_app.command("tokenizer", cls=CommandWithSettings)
def data_tokenizer(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train the tokenizer of a config on its source."""
    from xscale.data.corpus.prepared import prepared_folder
    from xscale.data.corpus.train_tokenizer import train_tokenizer
    from xscale.data.tokenizer.tokenizer import TOKENIZERS

    data = data_config(config, overrides)
    tokenizer = train_tokenizer(data, progress=True)
    is_trained = TOKENIZERS.of(data.tokenizer).traits.trained
    where = f"written to {prepared_folder(data)}" if is_trained else "it needs no training"
    print(
        f"tokenizer {data.tokenizer.kind}: vocabulary of {tokenizer.unpadded_vocabulary}, {where}"
    )


@data_app.command("prepare", cls=CommandWithSettings)
def data_prepare(config: ConfigFile, overrides: Overrides = None) -> None:
    """Tokenise a config's source into Megatron .bin/.idx files, on one machine or on many nodes over MPI.

    An interrupted preparation resumes: finished shards are kept.
    """
    from xscale.commands.data.prepare_data import prepare
    from xscale.data.corpus.merge_shards import unknown_sentence
    from xscale.mesh.environment import read_rank_info

    rank_from_launcher()
    rank = read_rank_info()
    prepared = prepare(data_config(config, overrides), rank)
    if not rank.is_rank0:
        return
    for split in (prepared.train, prepared.validation):
        if split is not None:
            say(
                f"{split.name}: {split.documents} documents, {len(split.tokens)} tokens in {split.indexed.bin}"
            )
    if prepared.manifest is not None and (sentence := unknown_sentence(prepared.manifest)):
        say(sentence)


@data_app.command("inspect", cls=CommandWithSettings)
def data_inspect(
    config: ConfigFile,
    overrides: Overrides = None,
    documents: Annotated[int, typer.Option(help="Number of documents to show.")] = 5,
) -> None:
    """Show documents, their lengths and decoded samples of prepared data."""
    from xscale.data.corpus.inspect import inspect

    say(inspect(data_config(config, overrides), documents))


@data_app.command("verify")
def data_verify(
    data: Annotated[
        Path,
        typer.Argument(
            help="A folder of prepared data, or a .bin/.idx pair without its ending.", parser=path
        ),
    ],
) -> None:
    """Read every byte of prepared data: hashes as in its manifest, ids within the vocabulary, the same tokenizer.

    The exit status is 2 when a file is bad, and the first one is named.
    """
    from xscale.data.corpus.verify import verify

    for line in verify(data):
        say(line)


@data_app.command("stats", cls=CommandWithSettings)
def data_stats(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG_OR_FOLDER",
            help="A YAML config or the name of a recipe; or a folder of prepared data, or a .bin/.idx pair without its "
            "ending.",
            autocompletion=complete_recipe,
            parser=path,
        ),
    ],
    overrides: Overrides = None,
    json: Json = False,
) -> None:
    """Count documents, tokens, lengths, the most frequent tokens, duplicates and padding of the data of a config, which
    is prepared first where necessary, or of prepared data."""
    # As for other commands, the name of a recipe stands for it also where a folder has the same name.
    is_folder = config.is_dir() and str(config) not in recipe_names()
    is_prepared = is_folder or any(
        file.exists() for file in (config / "manifest.json", Path(f"{config}.idx"))
    )
    if is_prepared:
        if overrides:
            raise ConfigError(
                overrides[0],
                f"{config} is prepared data, without a config",
                "Give a config instead.",
            )
    else:
        config = readable(config)
    from xscale.commands.data.data_stats import stats_of_prepared, stats_of_recipe, to_json, to_text

    statistics = (
        stats_of_prepared(config)
        if is_prepared
        else stats_of_recipe(read_config(config, overrides)[0])
    )
    say(to_json(statistics) if json else "\n".join(to_text(statistics)))


@data_app.command(
    "augment",
    hidden=True,
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
    add_help_option=False,
)
def data_augment(context: typer.Context) -> None:
    """Say where the command went, for one version."""
    command = shlex.join(["python", "-m", "xscale_tinybert", *context.args])
    raise ConfigError(
        "xscale data augment",
        "TinyBERT's augmentation is a plugin of its own now",
        f"Run: {command}",
    )
