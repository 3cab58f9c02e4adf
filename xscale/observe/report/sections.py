"""The sections of report.html, in reading order."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape

import yaml

from xscale.observe.format import duration, html_text, percentage, quantity
from xscale.observe.record import History, Record
from xscale.observe.report.chart import Curve, Level, chart, smooth
from xscale.observe.report.heatmap import heatmap, legend
from xscale.observe.report.layout_image import layout_figures

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in the run folder, each `step-<step>`."""
STYLES = ("one", "two", "three", "four", "five")
PHASES = ("data", "forward", "backward", "communicate", "optimizer")
SMOOTH_FROM = 120
"""Values from which on a line is smoothed."""
REASONS = {
    "done": "The run is done",
    "stopped": "The run was stopped and can resume",
    "failed": "The run failed",
}


def section(title: str, *parts: str) -> str:
    """A section of the page; empty where it has no parts."""
    body = "".join(parts)
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def by_axis(charts: Mapping[str, str]) -> str:
    """Charts by the name of their axes, of which radio buttons choose one, without a script."""
    buttons = drawings = ""
    for number, (axis, drawn) in enumerate(charts.items()):
        checked = " checked" if number == 0 else ""
        buttons += f'<input type="radio" name="axis" id="axis-{axis}"{checked}><label for="axis-{axis}">{axis}</label>'
        drawings += f'<div class="grid against-{axis}">{drawn}</div>'
    return f'<div class="axes">{buttons}{drawings}</div>'


def summary(record: Record, history: History) -> str:
    """How the run ended, and its main figures."""
    facts, end = record.facts, record.end
    name = facts.folder.resolve().name
    step = end.step if end else (history.steps[-1] if history.steps else 0)
    reason = REASONS[end.reason] if end else "The run has not ended, or its end was not written"
    kind = "lead failed" if end and end.reason == "failed" else "lead"
    message = f": {html_text(end.message)}" if end and end.message else ""
    resumed = (
        ""
        if facts.resumed_from is None
        else f" The last process resumed from step {facts.resumed_from}."
    )
    return (
        f"<header><h1>{html_text(name)}</h1>"
        f'<p class="{kind}">{reason}{message}, at step {step} of {facts.last_step}.{resumed}</p>'
        f'<dl class="figures">{"".join(_figures(record, history))}</dl></header>'
    )


def _figures(record: Record, history: History) -> Iterable[str]:
    facts = record.facts
    baseline = record.end.baseline_bits_per_byte if record.end else None
    newest = history.evaluations[-1] if history.evaluations else {}
    if newest.get("bits_per_byte") is not None:
        note = "" if baseline is None else f"an order-2 byte model: {baseline:.3f}"
        yield _figure(
            "validation bits per byte", f"{newest['bits_per_byte']:.3f}", note, first=True
        )
    if newest.get("eval_loss") is not None:
        perplexity = newest.get("perplexity")
        note = "" if perplexity is None else f"perplexity {perplexity:.4g}"
        yield _figure("validation loss", f"{newest['eval_loss']:.3f}", note, first=True)
    if history.steps:
        losses = [loss for loss in history.scalars["loss"] if math.isfinite(loss)][-20:] or [
            math.nan
        ]
        yield _figure(
            "training loss",
            f"{sum(losses) / len(losses):.3f}",
            f"mean of {len(losses)} logged steps",
        )
        yield _figure(
            "tokens",
            quantity(last(history.scalars["tokens"])),
            f"{quantity(facts.tokens_per_step)} a step",
        )
        yield _figure(
            "tokens a second",
            quantity(median(history.scalars["tokens_per_second"])),
            "median, all processes",
        )
        if any(map(math.isfinite, history.scalars["mfu"])):
            yield _figure("MFU", percentage(median(history.scalars["mfu"])), "median")
        yield _figure("time", duration(last(history.scalars["seconds"])), "of the last process")
    note = f"{quantity(facts.active_parameters)} active for a token"
    yield _figure("parameters", quantity(facts.parameters), note)
    yield _figure("devices", str(facts.devices), facts.device)
    if record.end is not None and record.end.peak_memory is not None:
        yield _figure("peak memory", f"{record.end.peak_memory / 2**30:.2f} GiB", "of rank 0")
    if history.steps and (skipped := last(history.scalars["skipped"])):
        yield _figure("skipped steps", f"{skipped:.0f}", "not finite")


def _figure(term: str, value: str, words: str, *, first: bool = False) -> str:
    kind = ' class="first"' if first else ""
    return f"<div{kind}><dt>{escape(term)}</dt><dd>{escape(value)}<small>{escape(words)}</small></dd></div>"


def curves(record: Record, history: History) -> str:
    """Loss, bits per byte, learning rate, gradient norm, against tokens, on linear and on logarithmic axes."""
    drawings = {
        axis: _curves(record, history, log=log)
        for axis, log in (("linear", False), ("logarithmic", True))
    }
    return by_axis(drawings) if any(drawings.values()) else ""


def _curves(record: Record, history: History, *, log: bool) -> str:
    tokens, scalars = history.scalars["tokens"], history.scalars
    seen = [evaluation["tokens"] for evaluation in history.evaluations]
    loss = [_known(evaluation.get("eval_loss")) for evaluation in history.evaluations]
    bits = [_known(evaluation.get("bits_per_byte")) for evaluation in history.evaluations]
    end = record.end
    baseline = end.baseline_bits_per_byte if end else None
    marks = [] if baseline is None else [Level(baseline, f"order-2 byte model: {baseline:.3f}")]
    return (
        chart(
            [
                *_noisy(tokens, scalars["loss"], "training"),
                Curve(seen, loss, "two", "validation", dots=True),
            ],
            "Loss, nats a token",
            log=log,
            log_x=log,
            note="Lower is better. Validation far above training means overfitting.",
        )
        + chart(
            [Curve(seen, bits, "two", "validation", dots=True)],
            "Bits per byte",
            marks,
            log=log,
            log_x=log,
            note="Lower is better, and comparable between tokenizers.",
        )
        + chart(
            [Curve(tokens, scalars["lr"], "one")],
            "Learning rate",
            zero=True,
            log=log,
            log_x=log,
            note="It should rise to its maximum in the warm-up and then follow the schedule.",
        )
        + chart(
            _noisy(tokens, scalars["grad_norm"]),
            "Gradient norm",
            log=log or _needs_log_axis(scalars["grad_norm"]),
            log_x=log,
            note="Steady or slowly falling is good; spikes come before a loss that diverges.",
        )
    )


def _noisy(x: Sequence[float], y: Sequence[float], label: str = "") -> list[Curve]:
    """Every value faintly, and their course over it; few values are their own course."""
    if len(y) < SMOOTH_FROM:
        return [Curve(x, y, "one", label)]
    return [
        Curve(x, y, "faint", label and "each step"),
        Curve(x, smooth(y, max(1, len(y) // 40)), "one", label),
    ]


def speed(history: History) -> str:
    """Tokens a second, utilisation, and where a step's time goes."""
    tokens, scalars = history.scalars["tokens"], history.scalars
    utilisation = [100 * value for value in scalars["mfu"]]
    charts = chart(
        _noisy(tokens, scalars["tokens_per_second"]),
        "Tokens a second",
        zero=True,
        note="Higher is better, and flat: dips are evaluations, saves, or a slow machine.",
    )
    note = "Higher is better: FLOPs of the model over what the devices can do."
    charts += chart(_noisy(tokens, utilisation), "MFU, %", zero=True, note=note)
    return (f'<div class="grid">{charts}</div>' if charts else "") + _split(history.split)


def _split(split: dict[str, float]) -> str:
    total = sum(split.values())
    if total <= 0:
        return ""
    bar = keys = ""
    order = [
        *(phase for phase in PHASES if phase in split),
        *(phase for phase in split if phase not in PHASES),
    ]
    for index, phase in enumerate(order):
        seconds = split[phase]
        style = STYLES[index % len(STYLES)]
        bar += f'<i class="{style}" style="flex:{seconds / total:.5f}" title="{escape(phase)}"></i>'
        note = f"{escape(phase)} {percentage(seconds / total)}, {_time(seconds)}"
        keys += f'<span class="key {style}">{note}</span> '
    return f'<h3>A step\'s time: {_time(total)} on average</h3><div class="bar">{bar}</div><div>{keys}</div>'


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.9995 else f"{1000 * seconds:.3g} ms"


def experts(history: History) -> str:
    """A picture for each layer with experts."""
    dropped = history.statistics.get("dropped", {})
    pictures = "".join(
        heatmap(layer, columns, dropped.get(layer, ()), history.ends)
        for layer, columns in history.loads.items()
    )
    return f'{legend()}<div class="grid">{pictures}</div>' if pictures else ""


def statistics(history: History) -> str:
    """Other numbers from inside the model: a chart for each name, a line for each layer."""
    charts = ""
    for name, layers in history.statistics.items():
        if name == "dropped" and history.loads:
            continue
        lines = [
            Curve(
                history.ends[: len(values)],
                values,
                STYLES[index % len(STYLES)],
                layer if len(layers) <= 5 else "",
            )
            for index, (layer, values) in enumerate(layers.items())
        ]
        charts += chart(lines, name, note=statistic_note(name))
    return f'<div class="grid">{charts}</div>' if charts else ""


STATISTIC_NOTES = {
    "accuracy": "Higher is better: fraction of this part's predictions that are right.",
    "aux": "1 is even loads; a rise means that few experts get the tokens.",
    "computed": "Near the budget is good: fraction of the sublayers that a token computes.",
    "confidence": "A slow rise is good: the router tells tokens apart; near 1 early it has stopped exploring.",
    "dropped": "Near 0 is good: dropped tokens pass the layer without an expert.",
    "entropy": "A slow fall is good: from the logarithm of the number of experts; near 0 early the router collapsed.",
    "grad_norm": "Before clipping. Steady or slowly falling is good; spikes come before a loss that diverges.",
    "importance": "Near 0 is good: squared variation of the experts' summed gates.",
    "load": "Equal shares are good: an expert without tokens does not learn.",
    "load_cv": "Near 0 is good: standard deviation of the experts' loads over their mean.",
    "load_max": "Near 1 is good: load of the busiest expert over the mean.",
    "load_p50": "Near 1 is good: load of the median expert over the mean; near 0 most experts are idle.",
    "load_p95": "Near 1 is good: load over the mean that 95 % of the experts do not exceed.",
    "overload": "Near 1 is good: rows of the busiest expert-parallel rank over the mean; the other ranks wait for it.",
    "replaced": "Near 0 is good: fraction of tokens whose given experts are not those that the router would choose.",
    "steps": "Fewer is cheaper: mean steps of a token through the shared block.",
    "z": "Small and steady is good: squared log-sum of the router's logits, which grow before they overflow.",
}
"""Sentence that says which values of a statistic are good, by its name."""


def statistic_note(name: str) -> str:
    """Return the sentence on a statistic; empty for one that only a plugin knows."""
    loss = "Lower is better: a loss beside that of the objective."
    return STATISTIC_NOTES.get(name, loss if name.endswith("loss") else "")


def attention(record: Record) -> str:
    figures = layout_figures(record.facts.layouts)
    return f'<div class="layouts">{figures}</div>' if figures else ""


def setting(record: Record) -> str:
    """Devices, versions and config of the run."""
    facts, end = record.facts, record.end
    rows = [
        *(
            (name, value)
            for name, value in (("command", facts.command), ("host", facts.host))
            if value
        ),
        *([("commit of xscale", facts.commit)] if facts.commit else []),
        *([("began", _moment(facts.started))] if facts.started is not None else []),
        *([("ended", _moment(end.ended))] if end is not None and end.ended is not None else []),
        *facts.data.items(),
        ("devices", f"{facts.devices} × {facts.device}"),
        ("FLOPs a token", quantity(facts.flops_per_token)),
        *facts.versions.items(),
        *(("note", note) for note in facts.notes),
    ]
    table = "".join(
        f"<tr><th>{escape(name)}</th><td>{html_text(value)}</td></tr>" for name, value in rows
    )
    text: str = yaml.safe_dump(dict(facts.config), sort_keys=False, allow_unicode=True)
    return f'<div class="wide"><table>{table}</table></div><h3>Resolved config</h3><pre>{html_text(text)}</pre>'


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def checkpoints(record: Record) -> str:
    """The checkpoints in the run folder, and the step with the best validation."""
    steps = sorted(
        int(path.name.removeprefix("step-"))
        for path in (record.facts.folder / CHECKPOINTS).glob("step-*")
        if path.name.removeprefix("step-").isdecimal()
    )
    end = record.end
    best = end.best_step if end is not None else None
    if not steps:
        return ""
    listed = ", ".join(f"<b>{step} (best)</b>" if step == best else str(step) for step in steps)
    note = ""
    if end is not None and best is not None and end.best_bits_per_byte is not None:
        gone = "" if best in steps else ", whose checkpoint is not there"
        note = f"<p>The best validation is {end.best_bits_per_byte:.4f} bits per byte at step {best}{gone}.</p>"
    return f"<p>Steps: {listed}.</p>{note}"


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def last(values: Sequence[float]) -> float:
    """The newest value that is finite; nan without one."""
    return next((value for value in reversed(values) if math.isfinite(value)), math.nan)


def median(values: Iterable[float]) -> float:
    """Median of the finite values; nan without one."""
    known = sorted(filter(math.isfinite, values))
    return known[len(known) // 2] if known else math.nan


def _needs_log_axis(values: Iterable[float]) -> bool:
    """Whether the values span more than a factor of 30, so that only a logarithmic axis shows them all."""
    known = [value for value in values if math.isfinite(value) and value > 0]
    return bool(known) and max(known) > 30 * min(known)
