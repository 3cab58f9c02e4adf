"""Sections of report.html about what a run can do: samples, evaluations and tasks."""

from collections.abc import Mapping
from html import escape

from xscale.observe.format import html_text, metric_words, quantity
from xscale.observe.metrics import TASKS
from xscale.observe.record import History, Record

SAMPLES = 20
"""Newest samples shown; a long run generates thousands."""


def samples(record: Record) -> str:
    """The newest samples; those of the last step are unfolded."""
    newest = record.samples[-SAMPLES:][::-1]
    parts = []
    for sample in newest:
        prompt = f'<span class="prompt">{html_text(sample.prompt)}</span>' if sample.prompt else ""
        opened = " open" if sample.step == newest[0].step else ""
        parts.append(
            f"<details{opened}><summary>step {sample.step}</summary>"
            f"<pre>{prompt}{html_text(sample.text)}</pre></details>"
        )
    return "".join(parts)


def evaluations(history: History) -> str:
    """The evaluations as a table."""
    if not history.evaluations:
        return ""
    labelled = dict.fromkeys(
        name for item in history.evaluations for name in item if name.startswith("eval_")
    )
    measures = _MEASURES | {
        name: metric_words(name.removeprefix("eval_"))
        for name in labelled
        if name not in (*_MEASURES, "eval_seconds")
    }
    rows = "".join(
        f'<tr><td class="number">{item["step"]}</td><td class="number">{quantity(item["tokens"])}</td>'
        + "".join(f'<td class="number">{_cell(item.get(name))}</td>' for name in measures)
        + "</tr>"
        for item in history.evaluations
    )
    heads = "".join(f"<th>{escape(head)}</th>" for head in ("step", "tokens", *measures.values()))
    table = f'<div class="wide"><table><tr>{heads}</tr>{rows}</table></div>'
    return f"<details><summary>evaluations in numbers ({len(history.evaluations)})</summary>{table}</details>"


def tasks(history: History) -> str:
    """The results of tasks as a table: a row for each metric, a column for each evaluation."""
    names = dict.fromkeys(name for item in history.tasks for name in item if name.startswith(TASKS))
    metrics = [name for name in names if _metric_of(name) not in names]
    heads = "".join(f"<th>step {item['step']}</th>" for item in history.tasks)
    rows = "".join(
        f"<tr><th>{html_text(name.removeprefix(TASKS))}</th>"
        + "".join(
            f'<td class="number">{_cell_with_error(item, name)}</td>' for item in history.tasks
        )
        + "</tr>"
        for name in metrics
    )
    return (
        f'<div class="wide"><table><tr><th></th>{heads}</tr>{rows}</table></div>' if metrics else ""
    )


def _cell_with_error(item: Mapping[str, float | None], name: str) -> str:
    """Format a metric with its standard error, if it has one."""
    metric, comma, kept = name.partition(",")
    error = item.get(f"{metric}_stderr{comma}{kept}")
    return _cell(item.get(name)) + ("" if error is None else f" ± {error:.2g}")


def _metric_of(name: str) -> str:
    """Return the name of the metric whose standard error `name` may be."""
    metric, comma, kept = name.partition(",")
    return f"{metric.removesuffix('_stderr')}{comma}{kept}" if metric.endswith("_stderr") else ""


_MEASURES = {"eval_loss": "loss", "perplexity": "perplexity", "bits_per_byte": "bits per byte"}
"""Heads of the columns of every evaluation; metrics of labels follow under their own names."""


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.5g}"
