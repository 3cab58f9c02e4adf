"""python -m xscale_tinybert CONFIG --model RUN --output FILE.jsonl: TinyBERT's data augmentation as a command."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from xscale.cli.main import main
from xscale.cli.terminal.complete import complete_run
from xscale.cli.terminal.options import (
    CommandWithSettings,
    ConfigFile,
    Overrides,
    Plugins,
    data_config,
)
from xscale.core.errors import ConfigError
from xscale.core.paths import path

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(cls=CommandWithSettings)
def augment(
    config: ConfigFile,
    overrides: Overrides = None,
    *,
    output: Annotated[
        Path,
        typer.Option(help="File to write, JSON lines; an interrupted job resumes.", parser=path),
    ],
    model: Annotated[
        Path,
        typer.Option(
            help="Run of a masked language model, such as BERT.",
            autocompletion=complete_run,
            parser=path,
        ),
    ],
    vectors: Annotated[
        Path | None,
        typer.Option(
            help="Text file of word vectors, such as GloVe's; default: such words stay.",
            parser=path,
        ),
    ] = None,
    copies: Annotated[int, typer.Option(min=1, help="New examples of each example.")] = 20,
    probability: Annotated[
        float, typer.Option(min=0, max=1, help="Probability that a word is replaced.")
    ] = 0.4,
    candidates: Annotated[int, typer.Option(min=1, help="Candidates for a word.")] = 15,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    # As in `xscale_tinybert.augment`, which imports numpy.
    context: Annotated[
        Literal["augmented", "original"],
        typer.Option(
            help="Text that the model reads: with the words replaced so far, or the original (faster)."
        ),
    ] = "augmented",
    batch_size: Annotated[int, typer.Option(min=1, help="Texts in a forward of the model.")] = 32,
    plugins: Plugins = False,
) -> None:
    """Write labelled examples with new ones in which likely or similar words replace some (TinyBERT's augmentation).

    A word that is one piece of the run's tokenizer is replaced by one of the most probable words of its model, another
    one by one of the words with the nearest vectors. Labels stay. Examples of the validation split get no new ones.
    """
    _require_one_process()
    from xscale_tinybert.augment import Augmentation
    from xscale_tinybert.augment_data import AugmentRequest, augment_data

    settings = Augmentation(copies, probability, candidates, seed, context)
    data = data_config(config, overrides)
    for line in augment_data(
        AugmentRequest(data, output, model, vectors, settings, batch_size, plugins)
    ):
        print(line)


def _require_one_process() -> None:
    from xscale.mesh.environment import read_rank_info

    if not (rank := read_rank_info()).is_single_process:
        what = f"examples are augmented by one process, and this is one of {rank.world}"
        raise ConfigError("WORLD_SIZE", what, "Start the command by itself.")


if __name__ == "__main__":
    main(app)
