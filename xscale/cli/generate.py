"""The command `xscale generate`."""

import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from xscale.cli.terminal.options import (
    Ema,
    LengthPenalty,
    PenaltyForm,
    Plugins,
    RunFolder,
    Step,
    Strict,
    checkpoint_to_read,
)
from xscale.core.errors import ConfigError, Problem

TopP = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Sample from the fewest likeliest tokens of this probability; default: 1, all.",
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        help="Divide the scores of tokens that stand in the text already; default: 1, unchanged.",
    ),
]
Exits = Annotated[
    bool,
    typer.Option(
        "--exits/--no-exits",
        help="Let tokens leave by the policy of the model's exits, if any; not with beams.",
    ),
]


def generate(
    run: RunFolder,
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROMPT]", help="Text to continue; - reads standard input; default: 'import '."
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The same as an option.")] = None,
    suffix: Annotated[
        str | None, typer.Option(help="Print what fills a gap before it (fill_in_middle).")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Maximum number of new tokens.")] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="Sampling temperature; 0: greedy decoding; default: 0.8."),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(min=0, help="Sample from the k most likely tokens; 0: from all; default: 40."),
    ] = None,
    top_p: TopP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed of the sampling; default: 0.")
    ] = None,
    beams: Annotated[
        int, typer.Option(min=1, help="Beam search with that many beams; 1: sampling.")
    ] = 1,
    length_penalty: LengthPenalty = None,
    penalty_form: PenaltyForm = None,
    exits: Exits = True,
    ema: Ema = False,
    plugins: Plugins = False,
    step: Step = None,
    strict: Strict = False,
) -> None:
    """Generate text with the newest checkpoint of a run; needs only the run folder.

    The step that is read is printed on stderr. An encoder-decoder reads the prompt as its source, and what it writes is
    printed alone.
    """
    from xscale.generate.generate_text import generate_text

    if text is not None and prompt is not None:
        raise ConfigError("--prompt", "the prompt is given twice", "Leave out the option.")
    prompt = text if text is not None else "import " if prompt is None else prompt
    sampling = {"--temperature": temperature, "--top-k": top_k, "--top-p": top_p, "--seed": seed}
    sampling["--repetition-penalty"] = repetition_penalty
    _check_search(
        beams, sampling, {"--length-penalty": length_penalty, "--penalty-form": penalty_form}
    )
    print(
        generate_text(
            checkpoint_to_read(run, step, strict),
            sys.stdin.read() if prompt == "-" else prompt,
            tokens,
            0.8 if temperature is None else temperature,
            40 if top_k is None else top_k or None,
            seed or 0,
            suffix=suffix,
            beams=beams,
            length_penalty=0.6 if length_penalty is None else length_penalty,
            penalty_form=penalty_form or "wu",
            exits=exits,
            ema=ema,
            top_p=top_p,
            repetition_penalty=1.0 if repetition_penalty is None else repetition_penalty,
            plugins=plugins,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    )


def _check_search(beams: int, sampling: Mapping[str, object], search: Mapping[str, object]) -> None:
    """Raise ConfigError for an option of sampling with several beams, or of beam search with one."""
    if refused := [option for option, value in sampling.items() if value is not None and beams > 1]:
        what = "beam search samples nothing"
        raise ConfigError(
            [Problem(option, what, "Leave it out, or take --beams 1.") for option in refused]
        )
    for option, value in search.items():
        if beams == 1 and value is not None:
            raise ConfigError(
                option, "it is that of beam search", "Leave it out, or give --beams 4."
            )
