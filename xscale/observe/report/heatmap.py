"""Heat map of the load of each expert over time: one row an expert, one column a span of steps; small PNG pictures.

A cell is a pixel that the browser enlarges, and what is unknown is transparent, so that the page's colour shows: a
picture takes a few kB, and needs no axes but those that the page writes beside it.
"""

import base64
import io
import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from xscale.observe.format import percentage
from xscale.observe.report.chart import number

if TYPE_CHECKING:
    import numpy

Colour = tuple[int, int, int, int]
"""Red, green, blue, alpha; 0 to 255."""


def palette_png(cells: "numpy.ndarray", palette: Sequence[Colour]) -> bytes:
    """The PNG of `cells`, uint8 [rows, columns] of indices into `palette`."""
    from PIL import Image

    image = Image.fromarray(cells)
    image.putpalette([channel for colour in palette for channel in colour[:3]])
    file = io.BytesIO()
    image.save(file, "PNG", transparency=bytes(colour[3] for colour in palette), optimize=True)
    return file.getvalue()


def data_uri(cells: "numpy.ndarray", palette: Sequence[Colour]) -> str:
    """The PNG as a `data:` URI, the `src` of an image without a file."""
    return "data:image/png;base64," + base64.b64encode(palette_png(cells, palette)).decode()


def blend(stops: Sequence[Colour], count: int = 256) -> list[Colour]:
    """`count` colours interpolated linearly between equidistant `stops`."""
    palette = []
    for index in range(count):
        position = index / (count - 1) * (len(stops) - 1)
        left = min(int(position), len(stops) - 2)
        weight = position - left
        red, green, blue, alpha = (
            round(a + (b - a) * weight) for a, b in zip(stops[left], stops[left + 1], strict=True)
        )
        palette.append((red, green, blue, alpha))
    return palette


COLOUR_STOPS: tuple[Colour, ...] = (
    (24, 40, 92, 255),
    (62, 110, 176, 255),
    (158, 190, 216, 255),
    (240, 237, 228, 255),
    (244, 186, 122, 255),
    (217, 107, 46, 255),
    (128, 32, 20, 255),
)
"""From an eighth of the mean load, over the mean, to eight times the mean; readable without red and green."""
DOUBLINGS_SHOWN = 3.0
"""Doublings from the middle to either end of the colours."""
UNKNOWN: Colour = (128, 128, 128, 60)


def heatmap(
    layer: str, columns: Sequence[Sequence[float]], dropped: Sequence[float], ends: Sequence[float]
) -> str:
    """A figure for `layer`: loads [columns][E], the dropped fraction [columns], tokens at each column's end."""
    experts = max(len(column) for column in columns)
    # A file that something else wrote may lack experts in some columns.
    columns = [[*column, *[math.nan] * (experts - len(column))] for column in columns]
    height = min(320, max(96, 12 * experts))
    picture = data_uri(load_colours(columns), [*blend(COLOUR_STOPS, 255), UNKNOWN])
    last = [load for load in columns[-1] if math.isfinite(load)]
    note = f"{experts} experts"
    if last and sum(last) > 0:
        mean = sum(last) / experts
        least, most = min(last) / mean, max(last) / mean
        low = f"{least:.2g}×" if least >= 0.01 else "less than 0.01×"
        note += f"; at the end the least used gets {low} the mean load, the most used {most:.2g}×"
    strip, dropped_note = _dropped(dropped)
    return (
        f'<figure class="heat"><figcaption><code>{escape(layer)}</code></figcaption>'
        f'<div class="plot"><span class="first">0</span><span class="last">{experts - 1}</span>'
        f'<img src="{picture}" style="height:{height}px" alt="load of {experts} experts over time"></div>'
        f'{strip}<p class="ends"><span>0</span><span>{number(ends[-1])} tokens</span></p>'
        f'<p class="note">{note}{dropped_note}.</p></figure>'
    )


def load_colours(columns: Sequence[Sequence[float]]) -> "numpy.ndarray":
    """Palette indices, uint8 [E, columns]: log2 of each expert's load over the mean load; 255: unknown."""
    import numpy

    loads = numpy.array(columns, dtype=float).T  # [E, columns]
    total = numpy.nansum(loads, axis=0)
    with numpy.errstate(divide="ignore", invalid="ignore"):
        doublings = numpy.log2(loads * len(loads) / total)
    index = numpy.clip((doublings + DOUBLINGS_SHOWN) / (2 * DOUBLINGS_SHOWN), 0, 1) * 254
    unknown = numpy.isnan(index)
    cells: numpy.ndarray = numpy.where(
        unknown, 255, numpy.rint(numpy.where(unknown, 0, index))
    ).astype(numpy.uint8)
    return cells


def legend() -> str:
    """The legend of the colours."""
    ramp = ", ".join(f"rgb({red} {green} {blue})" for red, green, blue, _ in COLOUR_STOPS)
    return (
        f'<p class="legend"><span>⅛ of the mean load</span><i style="background:linear-gradient(90deg,{ramp})"></i>'
        "<span>8 times</span></p>"
    )


def _dropped(values: Sequence[float]) -> tuple[str, str]:
    """A strip under the picture, scaled to the highest fraction dropped, and a note on it."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "", ""
    worst = max(known)
    if worst == 0:
        return "", "; no token was dropped"
    note = f"; dropped (the strip): {percentage(known[-1])} of the tokens at the end, {percentage(worst)} at most"
    bars = "".join(
        f"M{index} 24V{24 - 22 * value / worst:.1f}H{index + 1}V24Z"
        for index, value in enumerate(values)
        if math.isfinite(value) and value > 0
    )
    strip = (
        f'<svg class="strip" viewBox="0 0 {len(values)} 24" preserveAspectRatio="none" role="img" '
        f'aria-label="dropped tokens over time"><path d="{bars}"/></svg>'
    )
    return strip, note
