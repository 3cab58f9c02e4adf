"""The command `xscale eval`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from xscale.cli.options import Ema, Json, LengthPenalty, PenaltyForm, Plugins, RunFolder, rank_from_launcher
from xscale.core.errors import ConfigError, Problem


def evaluate(
    run: RunFolder,
    sequences: Annotated[int, typer.Option(help="Number of validation sequences; 0: all.")] = 0,
    data: Annotated[
        str | None,
        typer.Option(help="Other text: a file, folder or glob, prepared data, or a data.source such as {kind: text}."),
    ] = None,
    exits: Annotated[
        bool,
        typer.Option("--exits", help="Let tokens leave at the exits; print loss and accuracy by threshold."),
    ] = False,
    budgets: Annotated[
        bool, typer.Option("--budgets", help="Evaluate at each budget of the gates; print loss and accuracy by budget.")
    ] = False,
    thresholds: Annotated[str | None, typer.Option(help="With --exits: thresholds, such as 1,2.5.")] = None,
    bleu: Annotated[
        bool, typer.Option("--bleu", help="Write the targets of pairs by beam search; print their BLEU (sacrebleu).")
    ] = False,
    beams: Annotated[int | None, typer.Option(min=1, help="With --bleu: beams of the search; default: 4.")] = None,
    length_penalty: LengthPenalty = None,
    penalty_form: PenaltyForm = None,
    ema: Ema = False,
    as_json: Json = False,
    plugins: Plugins = False,
) -> None:
    """Evaluate a run's newest checkpoint on its validation documents, or on other text.

    Prints loss, perplexity and bits per byte as JSON. With --exits it prints a line for each threshold: the fraction of
    the blocks that tokens were computed in, loss and accuracy. With --budgets it prints a line for each budget of the
    gates: the fraction of the sublayers that tokens were computed in, loss and accuracy. With --bleu it prints the BLEU
    of the targets that a run on pairs writes, and that of its sources as they stand.
    """
    rank_from_launcher()
    from xscale.mesh.environment import read_rank_info

    if exits and budgets:
        raise ConfigError("--budgets", "prints another curve than --exits", "Give one of them.")
    if ema and (exits or budgets or bleu):
        what = "is for the loss; --exits, --budgets and --bleu take the weights"
        raise ConfigError("--ema", what, "Give one of them.")
    search = {"--beams": beams, "--length-penalty": length_penalty, "--penalty-form": penalty_form}
    if unused := [option for option, value in search.items() if value is not None and not bleu]:
        what = "it is that of the search for BLEU"
        raise ConfigError([Problem(option, what, "Add --bleu, or omit it.") for option in unused])
    if bleu:
        _evaluate_bleu(run, sequences or None, beams, length_penalty, penalty_form, data, plugins)
        return
    if exits:
        _evaluate_exits(run, sequences or None, _numbers(thresholds, "--thresholds"), data, plugins, as_json=as_json)
        return
    if thresholds is not None:
        raise ConfigError("--thresholds", "is a list for the policy of exits", "Add --exits, or omit it.")
    if budgets:
        _evaluate_budgets(run, sequences or None, data, plugins, as_json=as_json)
        return
    from xscale.train.load_run import evaluate_run

    result = evaluate_run(run, sequences or None, source=data, plugins=plugins, ema=ema)
    if read_rank_info().is_rank0:
        print(json.dumps(result))


def _evaluate_bleu(
    run: Path,
    sequences: int | None,
    beams: int | None,
    length_penalty: float | None,
    penalty_form: Literal["wu", "power"] | None,
    data: str | None,
    plugins: bool,
) -> None:
    """Print the BLEU of a run on pairs as JSON."""
    from xscale.train.bleu import evaluate_bleu

    score = evaluate_bleu(
        run,
        sequences,
        beams=beams or 4,
        length_penalty=0.6 if length_penalty is None else length_penalty,
        penalty_form=penalty_form or "wu",
        source=data,
        plugins=plugins,
    )
    print(json.dumps(asdict(score)))


def _numbers(text: str | None, option: str) -> list[float] | None:
    """Read numbers with commas between them; ConfigError where one is none."""
    try:
        return None if text is None else [float(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(option, f"'{text}' is not a list of numbers", "Give such as 0.5,1,2.") from None


def _evaluate_exits(
    run: Path, sequences: int | None, thresholds: list[float] | None, data: str | None, plugins: bool, *, as_json: bool
) -> None:
    """Print the curve of a run with exits: a list of objects as JSON, or a table."""
    from xscale.mesh.environment import read_rank_info
    from xscale.train.load_run import exit_curve_of_run

    points = exit_curve_of_run(run, sequences, thresholds, source=data, plugins=plugins)
    if not read_rank_info().is_rank0:
        return
    if as_json:
        print(json.dumps(points))
        return
    print(f"{'threshold':>12}{'blocks':>10}{'loss':>10}{'accuracy':>10}")
    for point in points:
        threshold = "none" if point["threshold"] is None else f"{point['threshold']:.4g}"
        print(f"{threshold:>12}{point['blocks']:>10.2%}{point['loss']:>10.4f}{point['accuracy']:>10.2%}")


def _evaluate_budgets(run: Path, sequences: int | None, data: str | None, plugins: bool, *, as_json: bool) -> None:
    """Print the curve of a run with gates: a list of objects as JSON, or a table."""
    from xscale.mesh.environment import read_rank_info
    from xscale.train.load_run import budget_curve_of_run

    points = budget_curve_of_run(run, sequences, source=data, plugins=plugins)
    if not read_rank_info().is_rank0:
        return
    if as_json:
        print(json.dumps(points))
        return
    print(f"{'budget':>8}{'computed':>10}{'loss':>10}{'accuracy':>10}")
    for point in points:
        share, accuracy = f"{point['computed']:.2%}", f"{point['accuracy']:.2%}"
        print(f"{point['budget']:>8.4g}{share:>10}{point['loss']:>10.4f}{accuracy:>10}")
