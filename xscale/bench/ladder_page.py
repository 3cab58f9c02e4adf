"""ladder.html: the losses of a ladder's runs against compute, the fits with their intervals, and the predictions."""

from collections.abc import Sequence
from html import escape

import numpy as np

from xscale.bench.ladder import LadderResult, LadderRun
from xscale.bench.scaling_fit import QUANTILES, Interval, ScalingFit
from xscale.observe.report.chart import Curve, SeedRange, chart
from xscale.observe.report.sections import STYLES, section
from xscale.observe.report.style import STYLE

POSITIONS = 60
"""Points of a drawn fit."""
_HOLDS = {True: "within", False: "outside", None: ""}


def page(results: Sequence[LadderResult], title: str) -> str:
    """The whole document."""
    parts = [f"<header><h1>{escape(title)}</h1></header>"]
    for result in results:
        content = f'<div class="single">{_drawing(result)}</div>{_constants(result)}{_predictions(result)}'
        parts.append(section(f"Scaling of {result.experts}", content))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>{''.join(parts)}</body></html>\n"
    )


def _drawing(result: LadderResult) -> str:
    """Chart of the losses against compute with the fit, and that of each size for the parametric law."""
    curves: list[Curve] = []
    bands: list[SeedRange] = []
    predictions = result.predictions
    by_size: dict[str, list[int]] = {}
    for index, run in enumerate(result.runs):
        by_size.setdefault(run.size, []).append(index)
    flops = [point.flops for point in result.points] + [
        prediction.run.flops for prediction in predictions
    ]
    if result.fit.law == "compute":
        positions = np.geomspace(min(flops), max(flops), POSITIONS)
        _add_fit(
            result.fit,
            [(0.0, 0.0, at) for at in positions],
            STYLES[0],
            "fit, 90 % interval",
            curves,
            bands,
        )
    for number, (size, indices) in enumerate(by_size.items()):
        style = STYLES[(number + (result.fit.law == "compute")) % len(STYLES)]
        points = sorted(
            (result.points[index].flops, result.points[index].loss) for index in indices
        )
        curves.append(Curve([x for x, _ in points], [y for _, y in points], style, size, dots=True))
        if result.fit.law == "parametric":
            _add_fit(
                result.fit,
                _lengths([result.runs[index] for index in indices], flops),
                style,
                "",
                curves,
                bands,
            )
    reached = [
        (prediction.run.flops, loss) for prediction in predictions for loss in prediction.losses
    ]
    if predictions:
        xs = [prediction.run.flops for prediction in predictions]
        values = [prediction.predicted for prediction in predictions]
        curves.append(
            Curve(xs, [value.value for value in values], "plain dashed", "predicted", dots=True)
        )
    if reached:
        curves.append(
            Curve([x for x, _ in reached], [y for _, y in reached], "plain", "held out", dots=True)
        )
    title = "Validation loss, nats a token"
    return chart(curves, title, bands=bands, log_x=True, log=True, unit="FLOPs")


def _lengths(runs: Sequence[LadderRun], flops: Sequence[float]) -> list[tuple[float, float, float]]:
    """(N, D, C) along the training of one size, up to the longest of its runs."""
    run = max(runs, key=lambda other: other.tokens)
    per_token = run.flops / run.tokens
    shortest = min(other.tokens for other in runs) / 1.5
    return [
        (run.parameters, tokens, tokens * per_token)
        for tokens in np.geomspace(shortest, run.tokens, POSITIONS)
    ]


def _add_fit(
    fit: ScalingFit,
    positions: Sequence[tuple[float, float, float]],
    style: str,
    label: str,
    curves: list[Curve],
    bands: list[SeedRange],
) -> None:
    losses = np.stack([fit.curve(*position) for position in positions])  # [positions, 1 + R]
    low, high = np.percentile(losses[:, 1:], QUANTILES, axis=1)
    xs = [position[2] for position in positions]
    curves.append(Curve(xs, losses[:, 0].tolist(), style, label))
    bands.append(SeedRange(xs, low.tolist(), high.tolist(), style))


def _constants(result: LadderResult) -> str:
    rows = "".join(
        f"<tr><td>{name}</td><td>{value.value:.4g}</td><td>{value.low:.4g} to {value.high:.4g}</td></tr>"
        for name, value in result.fit.named_constants().items()
    )
    return _table(
        "Constants of the law",
        "<tr><th>constant</th><th>value</th><th>90 % interval</th></tr>",
        rows,
    )


def _predictions(result: LadderResult) -> str:
    if not result.predictions:
        return ""
    rows = "".join(
        f"<tr><td>{escape(prediction.run.size)}</td><td>{prediction.run.tokens:,}</td>"
        f"<td>{_interval(prediction.predicted)}</td>"
        f"<td>{', '.join(f'{loss:.4f}' for loss in prediction.losses) or 'not run'}</td>"
        f"<td>{_HOLDS[prediction.holds]}</td></tr>"
        for prediction in result.predictions
    )
    head = "<tr><th>size</th><th>tokens</th><th>predicted loss</th><th>reached</th><th>interval</th></tr>"
    return _table("Predictions for the sizes that are held out", head, rows)


def _table(title: str, head: str, rows: str) -> str:
    return f'<h3>{title}</h3><div class="wide runs"><table>{head}{rows}</table></div>'


def _interval(value: Interval) -> str:
    return f"{value.value:.4f} ({value.low:.4f} to {value.high:.4f})"
