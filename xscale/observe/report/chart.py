"""A line chart as inline SVG, drawn in the colours of the page around it.

It is not drawn by matplotlib, whose pictures would be worse in a report: they have fixed colours, where these follow
the page from light to dark and to paper; their points show no value under the pointer; two curves take 138 kB, where
these take 39; and each run that rewrites its report would import it. What is a file of its own (layouts, pipelines,
comparisons, benchmarks) is drawn by matplotlib.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from xscale.observe.format import quantity

WIDTH, HEIGHT = 560, 290
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 14, 46
POINTS = 1200
"""Most points of a curve: the drawing resolves no more."""
NAMED_POINTS = 60
"""Points of a curve without dots that show their value under the pointer."""


@dataclass(frozen=True)
class Curve:
    """Points to connect; those that are not finite break the curve."""

    x: Sequence[float]
    y: Sequence[float]
    style: str = "one"
    """Classes of the page's style sheet: one to five, plain, faint; and dashed."""
    label: str = ""
    dots: bool = False


@dataclass(frozen=True)
class SeedRange:
    """The area between two curves over the same positions."""

    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    style: str = "one"


@dataclass(frozen=True)
class Level:
    """A horizontal line with a label."""

    y: float
    label: str


def chart(
    lines: Sequence[Curve],
    title: str,
    marks: Sequence[Level] = (),
    *,
    bands: Sequence[SeedRange] = (),
    log: bool = False,
    log_x: bool = False,
    zero: bool = False,
    unit: str = "tokens",
    note: str = "",
) -> str:
    """A figure with `title`, legend and drawing. `log`, `log_x`: logarithmic axes. `zero`: the y axis begins at 0.

    `unit` is that of the x axis; `note` is a sentence below the drawing.
    """
    if log_x:
        lines = [_right_of_zero(line) for line in lines]
    points = _drawn_points(lines, bands, log=log)
    if not points:
        return ""
    marks = [mark for mark in marks if _shown(mark.y, log)]
    levels = [y for _, y in points] + [mark.y for mark in marks]
    # From the beginning of the run, so that neighbouring figures line up.
    first = min(x for x, _ in points) if log_x else 0.0
    across = _Scale(first, max(x for x, _ in points), LEFT, WIDTH - RIGHT, log=log_x)
    low = min(0.0, *levels) if zero and not log else min(levels)
    up = _Scale(low, max(levels), HEIGHT - BOTTOM, TOP, log=log, roomy=True)
    drawing = [_grid(across, up, unit)]
    drawing += [_band(band, across, up, log=log) for band in bands]
    drawing += [_mark(mark, up) for mark in marks]
    drawing += [_line(line, across, up, log=log, unit=unit) for line in lines]
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f"<figure><figcaption>{escape(title)} {_legend(lines)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} against {unit}">'
        f"{''.join(drawing)}</svg>{below}</figure>"
    )


def _drawn_points(
    lines: Sequence[Curve], bands: Sequence[SeedRange], *, log: bool
) -> list[tuple[float, float]]:
    """All points that the axes have to hold."""
    curves = [(line.x, line.y) for line in lines]
    for band in bands:
        curves += [(band.x, band.low), (band.x, band.high)]
    return [
        (x, y)
        for across, up in curves
        for x, y in zip(across, up, strict=True)
        if _placed(x, y, log)
    ]


def _legend(lines: Sequence[Curve]) -> str:
    """The labels of the curves that have points, in their colours."""
    labelled = [line for line in lines if line.label and len(line.y)]
    return "".join(
        f'<span class="key {line.style}">{escape(line.label)}</span>' for line in labelled
    )


def _right_of_zero(line: Curve) -> Curve:
    """The curve without its points at 0, which a logarithmic axis does not have."""
    known = [(x, y) for x, y in zip(line.x, line.y, strict=True) if x > 0]
    return replace(line, x=[x for x, _ in known], y=[y for _, y in known])


class _Scale:
    """Maps values to positions in the drawing."""

    def __init__(
        self,
        low: float,
        high: float,
        start: float,
        end: float,
        *,
        log: bool = False,
        roomy: bool = False,
    ):
        self.log = log
        if log:
            low, high = math.log10(low), math.log10(high)
        if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
            # A single value goes to the middle.
            low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
        elif roomy:
            room = 0.04 * (high - low)
            low, high = low if low == 0 else low - room, high + room
        self.low = low
        self.high = high
        self.start = start
        self.end = end

    def __call__(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """About five round values in the range."""
        if self.log and self.high - self.low >= 2:
            every = math.ceil((self.high - self.low) / 5)
            return [
                10.0**power
                for power in range(math.ceil(self.low), math.floor(self.high) + 1)
                if power % every == 0
            ]
        low, high = self.low, self.high
        if self.log:
            decades = range(math.floor(low), math.floor(high) + 1)
            values = [factor * 10.0**power for power in decades for factor in (1, 2, 5)]
            values = [value for value in values if low <= math.log10(value) <= high]
            if len(values) >= 3:
                return values
            low, high = 10.0**low, 10.0**high
        unit = 10.0 ** math.floor(math.log10((high - low) / 5))
        step = next(
            unit * factor for factor in (1, 2, 2.5, 5, 10) if (high - low) / (unit * factor) <= 6
        )
        return [
            step * index
            for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
        ]


def _shown(y: float, log: bool) -> bool:
    return math.isfinite(y) and (y > 0 or not log)


def _placed(x: float, y: float, log: bool) -> bool:
    """Whether a point is drawn: at a number of tokens, which a file may lack."""
    return math.isfinite(x) and x >= 0 and _shown(y, log)


def _grid(across: _Scale, up: _Scale, unit: str) -> str:
    parts = []
    for y in up.ticks():
        line_y = up(y)
        parts.append(f'<path class="grid" d="M{LEFT} {line_y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{line_y + 4:.1f}" text-anchor="end">{number(y)}</text>'
        )
    for x in across.ticks():
        parts.append(
            f'<text x="{across(x):.1f}" y="{HEIGHT - 27}" text-anchor="middle">{number(x)}</text>'
        )
    parts.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end" class="unit">{unit}</text>'
    )
    return "".join(parts)


def _mark(mark: Level, up: _Scale) -> str:
    line_y = up(mark.y)
    below = line_y < TOP + 20
    return (
        f'<path class="mark" d="M{LEFT} {line_y:.1f}H{WIDTH - RIGHT}"/>'
        f'<text class="marked" x="{WIDTH - RIGHT - 2}" y="{line_y + (15 if below else -6):.1f}" text-anchor="end">'
        f"{escape(mark.label)}</text>"
    )


def _band(band: SeedRange, across: _Scale, up: _Scale, *, log: bool) -> str:
    sides = zip(band.x, band.low, band.high, strict=True)
    known = [
        (x, low, high) for x, low, high in sides if _placed(x, low, log) and _placed(x, high, log)
    ]
    corners = [(x, low) for x, low, _ in known] + [(x, high) for x, _, high in reversed(known)]
    path = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in corners)
    return f'<path class="band {band.style}" d="M{path}Z"/>' if corners else ""


def _line(line: Curve, across: _Scale, up: _Scale, *, log: bool, unit: str) -> str:
    path = []
    pen_down = False
    dots = []
    points = thin(line.x, line.y)
    every = max(1, len(points) // NAMED_POINTS)
    for index, (x, y) in enumerate(points):
        if not _placed(x, y, log):
            pen_down = False
            continue
        path.append(f"{'L' if pen_down else 'M'}{across(x):.1f} {up(y):.1f}")
        pen_down = True
        if line.dots or (line.style != "faint" and index % every == 0):
            kind, radius = (line.style, 3) if line.dots else ("hover", 7)
            dots.append(
                f'<circle class="{kind}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="{radius}">'
                f"<title>{number(x)} {unit}: {y:.5g}</title></circle>"
            )
    return f'<path class="curve {line.style}" d="{"".join(path)}"/>' + "".join(dots)


def thin(x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
    """At most about `POINTS` points: the minimum and maximum of each span of points, so that no peak is lost."""
    pairs = list(zip(x, y, strict=True))
    if len(pairs) <= POINTS:
        return pairs
    size = math.ceil(2 * len(pairs) / POINTS)
    kept = []
    for start in range(0, len(pairs), size):
        span = pairs[start : start + size]
        known = [index for index, pair in enumerate(span) if math.isfinite(pair[1])] or [0]
        least = min(known, key=lambda index: span[index][1])
        most = max(known, key=lambda index: span[index][1])
        kept += [span[index] for index in sorted({least, most})]
    return kept


def smooth(values: Sequence[float], span: int) -> list[float]:
    """Centred mean over `span` values, fewer near the ends; values that are not finite are ignored.

    A mean of the past alone would draw a fast falling curve too high.
    """
    totals, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        totals.append(totals[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    smoothed = []
    for index in range(len(values)):
        # At least an eighth of the span, or the ends would be noisy.
        reach = min(span // 2, max(index, span // 8), max(len(values) - 1 - index, span // 8))
        low, high = max(0, index - reach), min(len(values), index + reach + 1)
        known = counts[high] - counts[low]
        smoothed.append((totals[high] - totals[low]) / known if known else math.nan)
    return smoothed


def number(value: float) -> str:
    """A short number for an axis."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        text = quantity(value)
        digits, suffix = text.rstrip("kMGTPE"), text.lstrip("-.0123456789")
        return (digits.rstrip("0").rstrip(".") if "." in digits else digits) + suffix
    if abs(value) < 1e-3:
        mantissa, power = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(power)}"
    return f"{value:.4g}"
