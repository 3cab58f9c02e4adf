"""The command `xscale generate`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

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
from xscale.core.paths import path
from xscale.core.say import say, say_aside

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
Text = Annotated[
    str | None,
    typer.Argument(
        metavar="[PROMPT]", help="Text to continue; - reads standard input; default: 'import '."
    ),
]
Prompt = Annotated[str | None, typer.Option(help="The same as an option.")]
Suffix = Annotated[
    str | None, typer.Option(help="Print what fills a gap before it (fill_in_middle).")
]
NewTokens = Annotated[int, typer.Option(help="Maximum number of new tokens.", min=0)]
Temperature = Annotated[
    float | None,
    typer.Option(min=0, help="Sampling temperature; 0: greedy decoding; default: 0.8."),
]
TopK = Annotated[
    int | None,
    typer.Option(min=0, help="Sample from the k most likely tokens; 0: from all; default: 40."),
]
Seed = Annotated[int | None, typer.Option(help="Random seed of the sampling; default: 0.")]
Beams = Annotated[int, typer.Option(min=1, help="Beam search with that many beams; 1: sampling.")]

Cache = Annotated[
    Literal["auto", "growing", "static"],
    typer.Option(
        help="KV cache: static has a fixed capacity, so that each step is a CUDA graph on a GPU and can be compiled; "
        "auto: static there and with --compile, if all parts of the model have such a form; else growing."
    ),
]
Compile = Annotated[
    bool,
    typer.Option("--compile", help="Compile the step of the static cache, once, by torch.compile."),
]
ReplayRoutes = Annotated[
    Path | None,
    typer.Option(
        "--replay-routes", help="Use the experts of a file of routes, not the routers.", parser=path
    ),
]


def generate(
    run: RunFolder,
    text: Text = None,
    prompt: Prompt = None,
    suffix: Suffix = None,
    tokens: NewTokens = 128,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    beams: Beams = 1,
    length_penalty: LengthPenalty = None,
    penalty_form: PenaltyForm = None,
    exits: Exits = True,
    cache: Cache = "auto",
    compile: Compile = False,
    replay_routes: ReplayRoutes = None,
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

    prompt = _prompt(text, prompt)
    sampling = {"--temperature": temperature, "--top-k": top_k, "--top-p": top_p, "--seed": seed}
    sampling["--repetition-penalty"] = repetition_penalty
    search = {"--length-penalty": length_penalty, "--penalty-form": penalty_form}
    _check_search(beams, sampling, search)
    # What a model of anyone wrote may steer a terminal; a file or a program gets it as it is.
    write = say if sys.stdout.isatty() else print
    write(
        generate_text(
            checkpoint_to_read(run, step, strict),
            prompt,
            tokens,
            0.8 if temperature is None else temperature,
            40 if top_k is None else top_k or None,
            seed or 0,
            suffix=suffix,
            beams=beams,
            length_penalty=0.6 if length_penalty is None else length_penalty,
            penalty_form=penalty_form or "wu",
            exits=exits,
            cache=cache,
            compile=compile,
            ema=ema,
            top_p=top_p,
            repetition_penalty=1.0 if repetition_penalty is None else repetition_penalty,
            plugins=plugins,
            say=say_aside,
            replay_routes=replay_routes,
        )
    )


def _prompt(text: str | None, option: str | None) -> str:
    """The prompt that the argument or the option gives, or standard input where it is `-`."""
    if text is not None and option is not None:
        raise ConfigError("--prompt", "the prompt is given twice", "Leave out the option.")
    prompt = text if text is not None else "import " if option is None else option
    return sys.stdin.read() if prompt == "-" else prompt


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
