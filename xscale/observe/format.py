"""Format numbers and texts of a run for people."""

import math
import unicodedata
from collections.abc import Mapping
from html import escape

from xscale.observe.events import Statistic


def quantity(value: float) -> str:
    """Three significant digits and a suffix: 12345678 -> '12.3M'."""
    if not math.isfinite(value):
        return str(value)
    suffixes = ["", "k", "M", "G", "T", "P", "E"]
    # 999.5 would round to four digits.
    while abs(value) >= 999.5 and len(suffixes) > 1:
        value /= 1000
        suffixes.pop(0)
    digits = 0 if abs(value) >= 99.5 or value == int(value) else 1 if abs(value) >= 9.95 else 2
    return f"{value:.{digits}f}{suffixes[0]}"


def parameter_shares(active: int, trained: int | None) -> str:
    """'1.2M active', or '1.2M active, 20.5k trained' where only some parameters are trained."""
    return f"{quantity(active)} active" + (
        "" if trained is None else f", {quantity(trained)} trained"
    )


def duration(seconds: float) -> str:
    """'42 s', '3:07', '1:02:07', '3 d 04:10'."""
    if not math.isfinite(seconds):
        return "?"
    total_seconds = round(seconds)
    minutes, seconds_left = divmod(total_seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02}:{minutes:02}"
    if hours:
        return f"{hours}:{minutes:02}:{seconds_left:02}"
    return (
        f"{minutes}:{seconds_left:02}"
        if minutes
        else f"{seconds:.1f} s"
        if seconds < 9.95
        else f"{total_seconds} s"
    )


def percentage(fraction: float) -> str:
    """'12.5 %', '0.012 %'."""
    value = 100 * fraction
    text = f"{value:.1f}" if abs(value) >= 0.095 else f"{value:.2g}"
    return f"{text.removesuffix('.0')} %"


def printable(text: str) -> str:
    """`text` with control characters replaced by visible symbols, so that it cannot steer a terminal or break a page.

    A byte-level model can generate escape sequences.
    """
    return "".join(character if character in "\n\t" else _visible(character) for character in text)


def page_bytes(page: str) -> bytes:
    """Encode an HTML page, with the control characters of what it quotes replaced as by `printable`.

    UTF-8 cannot encode half a surrogate pair, which a model can generate.
    """
    lines = (line if line.isprintable() else printable(line) for line in page.split("\n"))
    return "\n".join(lines).encode(errors="replace")


def _visible(character: str) -> str:
    if unicodedata.category(character) not in ("Cc", "Cs", "Cf"):
        return character
    code = ord(character)
    return chr(0x2400 + code) if code < 0x20 else "\N{REPLACEMENT CHARACTER}"


def metrics_clause(metrics: Mapping[str, float]) -> str:
    """', accuracy 0.9123, macro F1 0.8991'; empty without metrics."""
    return "".join(f", {metric_words(name)} {value:.4f}" for name, value in metrics.items())


def ema_clause(loss: float | None) -> str:
    """', 1.2345 with the moving average'; empty without a loss of it."""
    return "" if loss is None else f", {loss:.4f} with the moving average"


def tasks_clause(results: Mapping[str, float]) -> str:
    """'tasks: hellaswag/acc 0.2913, lambada/perplexity 31.2'; without the standard errors."""
    named = {
        name: value
        for name, value in results.items()
        if not name.partition(",")[0].endswith("_stderr")
    }
    return "tasks: " + ", ".join(f"{name} {value:.4g}" for name, value in named.items())


def metric_words(name: str) -> str:
    """'macro_f1' as 'macro F1'."""
    return name.replace("_", " ").replace("f1", "F1")


def html_text(text: str) -> str:
    """Return the text as HTML shows it, without control characters."""
    return escape(printable(text))


LISTED_LAYERS = 8
"""Most layers of whose load a line is written at the end of a run: the most overloaded ones."""


def overloads(statistics: Mapping[str, Statistic]) -> dict[str, float]:
    """Return the overload factor of the busiest expert-parallel rank by layer, the largest first."""
    factors = {
        layer: value
        for layer, _, name in (key.rpartition("/") for key in statistics)
        if name == "overload"
        and isinstance(value := statistics[f"{layer}/{name}"], float)
        and math.isfinite(value)
    }
    return dict(sorted(factors.items(), key=lambda item: -item[1]))


def overload_lines(statistics: Mapping[str, Statistic]) -> list[str]:
    """Return a line for each layer with its overload factor and the percentiles of its experts, of a logged step."""
    factors = overloads(statistics)
    lines = []
    for layer, factor in list(factors.items())[:LISTED_LAYERS]:
        experts = ", ".join(
            f"{name} {value:.2f}"
            for name in ("p50", "p95", "max")
            if isinstance(value := statistics.get(f"{layer}/load_{name}"), float)
        )
        lines.append(
            f"{layer}: rows of the busiest rank {factor:.2f}x of the mean, of the experts {experts or 'unknown'}"
        )
    if more := len(factors) - len(lines):
        lines.append(f"{more} more layers, with less, are in metrics.jsonl")
    return lines
