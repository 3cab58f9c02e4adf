"""The command `xscale eval`."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from xscale.cli.terminal.options import (
    Ema,
    Json,
    LengthPenalty,
    PenaltyForm,
    Plugins,
    RunFolder,
    Step,
    Strict,
    checkpoint_to_read,
    rank_from_launcher,
)
from xscale.core.errors import ConfigError, Problem
from xscale.core.paths import path, path_or_pattern

Sequences = Annotated[
    int, typer.Option(help="Number of validation sequences, or of windows; 0: all.")
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Other text: a file, folder or glob, prepared data, or a data.source such as {kind: text}.",
        parser=path_or_pattern,
    ),
]
Exits = Annotated[
    bool,
    typer.Option(
        "--exits", help="Let tokens leave at the exits; print loss and accuracy by threshold."
    ),
]
Budgets = Annotated[
    bool,
    typer.Option(
        "--budgets", help="Evaluate at each budget of the gates; print loss and accuracy by budget."
    ),
]
Thresholds = Annotated[str | None, typer.Option(help="With --exits: thresholds, such as 1,2.5.")]
Bleu = Annotated[
    bool,
    typer.Option(
        "--bleu", help="Write the targets of pairs by beam search; print their BLEU (sacrebleu)."
    ),
]
Beams = Annotated[
    int | None, typer.Option(min=1, help="With --bleu: beams of the search; default: 4.")
]
Window = Annotated[
    int | None,
    typer.Option(
        help="Score long texts with a sliding window of so many tokens, the most context of one."
    ),
]
Stride = Annotated[
    int | None,
    typer.Option(
        help="With --window: tokens between windows, scored by each; default: half the window."
    ),
]

RecordRoutes = Annotated[
    Path | None,
    typer.Option(
        "--record-routes",
        help="Write the experts of each token to a file, for router replay (moe.replay.file).",
        parser=path,
    ),
]
ReplayRoutes = Annotated[
    Path | None,
    typer.Option(
        "--replay-routes", help="Use the experts of a file of routes, not the routers.", parser=path
    ),
]
TrainingSamples = Annotated[
    int | None,
    typer.Option(
        min=1, help="With --record-routes: also record the first so many samples of training."
    ),
]
TaskNames = Annotated[
    str | None, typer.Option("--tasks", help="Tasks of lm_eval, such as hellaswag,arc_easy.")
]
Shots = Annotated[
    int | None, typer.Option(min=0, help="With --tasks: examples before each question.")
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="With --tasks: examples of each task; default: all.")
]
TaskFolder = Annotated[
    Path | None,
    typer.Option(
        help="With --tasks: a folder of further tasks, as YAML files of lm_eval.", parser=path
    ),
]


def evaluate(
    run: RunFolder,
    sequences: Sequences = 0,
    data: Data = None,
    exits: Exits = False,
    budgets: Budgets = False,
    thresholds: Thresholds = None,
    bleu: Bleu = False,
    beams: Beams = None,
    length_penalty: LengthPenalty = None,
    penalty_form: PenaltyForm = None,
    window: Window = None,
    stride: Stride = None,
    tasks: TaskNames = None,
    shots: Shots = None,
    limit: Limit = None,
    task_folder: TaskFolder = None,
    record_routes: RecordRoutes = None,
    training_samples: TrainingSamples = None,
    replay_routes: ReplayRoutes = None,
    ema: Ema = False,
    as_json: Json = False,
    plugins: Plugins = False,
    step: Step = None,
    strict: Strict = False,
) -> None:
    """Evaluate a run's newest checkpoint on its validation documents, or on other text.

    Prints loss, perplexity and bits per byte as JSON. With --window they are those of whole documents, whose tokens
    have at least window - stride tokens of context, where there are so many. With --exits it prints a line for each
    threshold: the fraction of the blocks that were computed for a prediction, loss and accuracy, or of labels their
    metrics. With --budgets it prints a line for each budget of the gates: the fraction of the sublayers that tokens
    were computed in, and the same numbers.
    With --bleu it prints the BLEU of the targets that a run on pairs writes, and that of its sources as they stand.
    With --tasks it prints the metrics of tasks of lm_eval. With --record-routes it also writes the experts of the
    tokens to a file.
    """
    rank_from_launcher()
    modes = {"--exits": exits, "--budgets": budgets, "--bleu": bleu}
    has_window = window is not None
    modes |= {"--window": has_window, "--tasks": tasks is not None}
    _check_modes(modes, ema=ema)
    of_loss = {"--record-routes": record_routes, "--replay-routes": replay_routes}
    is_other = any(modes.values())
    _refuse_without("", "routes are those of an evaluation of the loss", of_loss, not is_other)
    search = {"--beams": beams, "--length-penalty": length_penalty, "--penalty-form": penalty_form}
    _refuse_without("--bleu", "it is that of the search for BLEU", search, bleu)
    of_exits = {"--thresholds": thresholds}
    _refuse_without("--exits", "is a list for the policy of exits", of_exits, exits)
    of_windows = {"--stride": stride}
    _refuse_without("--window", "is the distance of sliding windows", of_windows, has_window)
    of_tasks = {"--shots": shots, "--limit": limit, "--task-folder": task_folder}
    _refuse_without("--tasks", "it is for tasks of lm_eval", of_tasks, tasks is not None)
    of_routes = {"--training-samples": training_samples}
    what = "their routes are recorded, and nothing is evaluated on them"
    _refuse_without("--record-routes", what, of_routes, record_routes is not None)
    count = sequences or None
    run = checkpoint_to_read(run, step, strict)
    if bleu:
        _evaluate_bleu(run, count, beams, length_penalty, penalty_form, data, plugins)
    elif exits:
        levels = _numbers(thresholds, "--thresholds")
        _evaluate_exits(run, count, levels, data, plugins, as_json=as_json)
    elif budgets:
        _evaluate_budgets(run, count, data, plugins, as_json=as_json)
    elif tasks is not None:
        of_text = {"--sequences": count, "--data": data}
        _refuse_without("", "tasks have examples of their own", of_text, False)
        _evaluate_tasks(run, tasks, shots, limit, task_folder, plugins, ema=ema)
    else:
        routes = {
            "record_routes": record_routes,
            "training_samples": training_samples or 0,
            "replay_routes": replay_routes,
        }
        _evaluate_loss(run, count, window, stride, data, plugins, ema=ema, routes=routes)


def _refuse_without(mode: str, what: str, options: Mapping[str, object], chosen: bool) -> None:
    """ConfigError for each of the options that is given without the `mode` that reads it."""
    fix = f"Add {mode}, or omit it." if mode else "Omit it."
    if problems := [
        Problem(name, what, fix)
        for name, value in options.items()
        if value is not None and not chosen
    ]:
        raise ConfigError(problems)


def _check_modes(modes: dict[str, bool], *, ema: bool) -> None:
    """ConfigError for two evaluations at once, and for averages of the weights where they are not read."""
    chosen = [option for option, is_chosen in modes.items() if is_chosen]
    if len(chosen) > 1:
        raise ConfigError(
            chosen[1], f"prints another curve or number than {chosen[0]}", "Give one of them."
        )
    if ema and chosen and chosen[0] not in ("--window", "--tasks"):
        what = "is for the loss; --exits, --budgets and --bleu take the weights"
        raise ConfigError("--ema", what, "Give one of them.")


def _evaluate_loss(
    run: Path,
    limit: int | None,
    window: int | None,
    stride: int | None,
    data: str | None,
    plugins: bool,
    *,
    ema: bool,
    routes: Mapping[str, Any],
) -> None:
    """Print loss, perplexity and bits per byte as JSON, of sequences as in training or with a sliding window.

    `routes`: the arguments of `evaluate_run` that are about routes.
    """
    from xscale.mesh.environment import read_rank_info

    if window is None:
        from xscale.evaluate.evaluate_run import evaluate_run

        result = evaluate_run(run, limit, source=data, plugins=plugins, ema=ema, **routes)
    else:
        from xscale.evaluate.sliding_window import evaluate_windows

        step = max(1, window // 2) if stride is None else stride
        result = evaluate_windows(run, window, step, limit, source=data, plugins=plugins, ema=ema)
    if read_rank_info().is_rank0:
        print(json.dumps(result))


def _evaluate_tasks(
    run: Path,
    names: str,
    shots: int | None,
    limit: int | None,
    folder: Path | None,
    plugins: bool,
    *,
    ema: bool,
) -> None:
    """Print the metrics of tasks of lm_eval as JSON."""
    from xscale.evaluate.lm_eval_model import TaskRequest
    from xscale.evaluate.tasks import tasks_of_run
    from xscale.mesh.environment import read_rank_info

    chosen = tuple(name.strip() for name in names.split(",") if name.strip())
    if not chosen:
        raise ConfigError("--tasks", "names no task", "Give such as hellaswag,arc_easy.")
    request = TaskRequest(chosen, shots, limit, None if folder is None else str(folder))
    result = tasks_of_run(run, request, plugins=plugins, ema=ema)
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
    from xscale.evaluate.bleu import evaluate_bleu

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
        raise ConfigError(
            option, f"'{text}' is not a list of numbers", "Give such as 0.5,1,2."
        ) from None


def _evaluate_exits(
    run: Path,
    sequences: int | None,
    thresholds: list[float] | None,
    data: str | None,
    plugins: bool,
    *,
    as_json: bool,
) -> None:
    """Print the curve of a run with exits: a list of objects as JSON, or a table."""
    from xscale.evaluate.evaluate_run import exit_curve_of_run
    from xscale.mesh.environment import read_rank_info

    points = exit_curve_of_run(run, sequences, thresholds, source=data, plugins=plugins)
    if not read_rank_info().is_rank0:
        return
    _print_curve(points, ("blocks",), as_json=as_json)


def _evaluate_budgets(
    run: Path, sequences: int | None, data: str | None, plugins: bool, *, as_json: bool
) -> None:
    """Print the curve of a run with gates: a list of objects as JSON, or a table."""
    from xscale.evaluate.evaluate_run import budget_curve_of_run
    from xscale.mesh.environment import read_rank_info

    points = budget_curve_of_run(run, sequences, source=data, plugins=plugins)
    if not read_rank_info().is_rank0:
        return
    _print_curve(points, ("computed",), as_json=as_json)


def _print_curve(points: list[dict[str, Any]], shares: tuple[str, ...], *, as_json: bool) -> None:
    """Print the points of a curve, as JSON or as a table; those named in `shares`, and accuracies, are fractions."""
    if as_json:
        print(json.dumps(points))
        return
    step, *names = points[0]
    print(f"{step} {points[0][step]}")
    widths = {name: max(10, len(name) + 2) for name in names}
    print("".join(f"{name:>{width}}" for name, width in widths.items()))
    for point in points:
        cells = []
        for name, width in widths.items():
            value = point[name]
            is_share = name in shares or name.endswith("accuracy")
            text = "none" if value is None else f"{value:.2%}" if is_share else f"{value:.4g}"
            cells.append(f"{text:>{width}}")
        print("".join(cells))
