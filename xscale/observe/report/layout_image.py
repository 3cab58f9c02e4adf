"""Attention layouts as pictures: which blocks of keys (across) each block of queries (down) attends to."""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from xscale.observe.format import percentage
from xscale.observe.report.heatmap import Colour, data_uri
from xscale.observe.report.layout_text import INK, cells, density, distinct_heads, ranges

if TYPE_CHECKING:
    import numpy


def layout_figures(layouts: "Mapping[str, numpy.ndarray]") -> str:
    """A figure for each different layout [H, Q, K], named by the layers that have it."""
    figures: list[tuple[numpy.ndarray, list[str]]] = []
    for layer, layout in layouts.items():
        for other, layers in figures:
            if other.shape == layout.shape and (other == layout).all():
                layers.append(layer)
                break
        else:
            figures.append((layout, [layer]))
    return "".join(_figure(layout, layers) for layout, layers in figures)


def _figure(layout: "numpy.ndarray", layers: Sequence[str]) -> str:
    heads = distinct_heads(layout)
    palette: list[Colour] = [(*INK, alpha) for alpha in range(256)]
    pictures = "".join(
        f'<div class="head"><img src="{data_uri(cells(picture), palette)}" alt="blocks attended to"><p class="note">'
        f"{_heads(group, len(layout))} {_density(picture)}</p></div>"
        for picture, group in heads
    )
    names = " ".join(f"<code>{escape(name)}</code>" for name in join_paths(layers))
    rows, columns = layout.shape[1:]
    return (
        f'<figure class="layout"><figcaption>{names}</figcaption><div class="heads">{pictures}</div>'
        f'<p class="note">{rows} blocks of queries (down) × {columns} of keys (across), '
        f"{len(layout)} {'head' if len(layout) == 1 else 'heads'}</p></figure>"
    )


def _density(layout: "numpy.ndarray") -> str:
    """The density of a layout [Q, K] in words."""
    fraction, of_what = density(layout)
    return f"{percentage(fraction)} {of_what}"


def join_paths(paths: Iterable[str]) -> list[str]:
    """Join paths that differ in their first number: a.0.b, a.1.b, a.3.b -> 'a.{0–1, 3}.b'."""
    groups: dict[tuple[str, str], list[int]] = {}
    names = []
    for path in paths:
        match = re.fullmatch(r"(.*?)\b(\d+)\b(.*)", path)
        if match is None:
            names.append(path)
        else:
            groups.setdefault((match[1], match[3]), []).append(int(match[2]))
    for (before, after), numbers in groups.items():
        names.append(
            f"{before}{numbers[0]}{after}"
            if len(numbers) == 1
            else f"{before}{{{ranges(numbers)}}}{after}"
        )
    return names


def _heads(group: Sequence[int], heads: int) -> str:
    if len(group) == heads:
        return "all heads:" if heads > 1 else ""
    return f"{'head' if len(group) == 1 else 'heads'} {ranges(group)}:"
