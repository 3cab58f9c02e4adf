"""Attention layouts as pictures: which blocks of keys (across) each block of queries (down) attends to."""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from xscale.train.observe.notation import percentage
from xscale.train.observe.page.raster import Colour, source

if TYPE_CHECKING:
    import numpy

CELLS = 256
"""A larger layout is shown by the density of its parts."""
INK = (58, 108, 168)


def layouts(known: "Mapping[str, numpy.ndarray]") -> str:
    """A figure for each different layout [H, Q, K], named by the layers that have it."""
    kinds: list[tuple[numpy.ndarray, list[str]]] = []
    for layer, layout in known.items():
        for other, layers in kinds:
            if other.shape == layout.shape and (other == layout).all():
                layers.append(layer)
                break
        else:
            kinds.append((layout, [layer]))
    return "".join(_figure(layout, layers) for layout, layers in kinds)


def _figure(layout: "numpy.ndarray", layers: Sequence[str]) -> str:
    heads: list[tuple[numpy.ndarray, list[int]]] = []
    for head, picture in enumerate(layout):
        same = next((group for other, group in heads if (other == picture).all()), None)
        if same is None:
            heads.append((picture, [head]))
        else:
            same.append(head)
    palette: list[Colour] = [(*INK, alpha) for alpha in range(256)]
    pictures = "".join(
        f'<div class="head"><img src="{source(cells(picture), palette)}" alt="blocks attended to"><p class="note">'
        f"{_heads(group, len(layout))} {_density(picture)}</p></div>"
        for picture, group in heads
    )
    names = " ".join(f"<code>{escape(name)}</code>" for name in together(layers))
    rows, columns = layout.shape[1:]
    return (
        f'<figure class="layout"><figcaption>{names}</figcaption><div class="heads">{pictures}</div>'
        f'<p class="note">{rows} blocks of queries (down) × {columns} of keys (across), '
        f"{len(layout)} {'head' if len(layout) == 1 else 'heads'}</p></figure>"
    )


def _density(layout: "numpy.ndarray") -> str:
    """How much of all blocks [Q, K] is there, or of those that a causal model could have."""
    import numpy

    lower = numpy.tri(*layout.shape) > 0
    if layout.shape[0] == layout.shape[1] and not (layout & ~lower).any():
        return f"{percentage(float(layout[lower].mean()))} of the causal blocks"
    return f"{percentage(float(layout.mean()))} of the blocks"


def cells(layout: "numpy.ndarray") -> "numpy.ndarray":
    """Darkness, uint8 [rows, columns], of a layout bool [Q, K]; beyond `CELLS` a cell is the mean of several blocks."""
    import numpy

    size = max(1, -(-max(layout.shape) // CELLS))
    if size == 1:
        plain: numpy.ndarray = layout.astype(numpy.uint8) * 255
        return plain
    rows, columns = (-(-length // size) for length in layout.shape)
    padded = numpy.full((rows * size, columns * size), numpy.nan)
    padded[: layout.shape[0], : layout.shape[1]] = layout
    mean = numpy.nanmean(padded.reshape(rows, size, columns, size), axis=(1, 3))
    # What is thinly there must not look absent.
    grey: numpy.ndarray = numpy.where(mean > 0, 64 + numpy.rint(191 * mean), 0).astype(numpy.uint8)
    return grey


def together(paths: Iterable[str]) -> list[str]:
    """Paths that differ in their first number become one: a.0.b, a.1.b, a.3.b -> 'a.{0–1, 3}.b'."""
    found: dict[tuple[str, str], list[int]] = {}
    alone = []
    for path in paths:
        match = re.fullmatch(r"(.*?)\b(\d+)\b(.*)", path)
        if match is None:
            alone.append(path)
        else:
            found.setdefault((match[1], match[3]), []).append(int(match[2]))
    for (before, after), numbers in found.items():
        alone.append(f"{before}{numbers[0]}{after}" if len(numbers) == 1 else f"{before}{{{ranges(numbers)}}}{after}")
    return alone


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 -> '0–2, 5'."""
    runs: list[list[int]] = []
    for value in sorted(numbers):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _heads(group: Sequence[int], heads: int) -> str:
    if len(group) == heads:
        return "all heads:" if heads > 1 else ""
    return f"{'head' if len(group) == 1 else 'heads'} {ranges(group)}:"
