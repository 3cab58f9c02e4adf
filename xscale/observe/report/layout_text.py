"""Attention layouts as text and as files: which blocks of keys (across) each block of queries (down) attends to."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

Layout = npt.NDArray[np.bool_]
CELLS = 256
"""Most rows and columns shown; a cell of a larger layout is the density of several blocks."""
INK = (58, 108, 168)
SHADES = ".:-=+*#"
"""Characters for the density of a cell, from 0 to 1."""


def cells(layout: Layout, most: int = CELLS) -> npt.NDArray[np.uint8]:
    """Darkness, uint8 [rows, columns], of a layout bool [Q, K]; beyond `most` a cell is the mean of several blocks."""
    size = max(1, -(-max(layout.shape) // most))
    if size == 1:
        plain: npt.NDArray[np.uint8] = layout.astype(np.uint8) * np.uint8(255)
        return plain
    rows, columns = (-(-length // size) for length in layout.shape)
    padded = np.full((rows * size, columns * size), np.nan)
    padded[: layout.shape[0], : layout.shape[1]] = layout
    mean = np.nanmean(padded.reshape(rows, size, columns, size), axis=(1, 3))
    # A low density must not look like zero.
    grey: npt.NDArray[np.uint8] = np.where(mean > 0, 64 + np.rint(191 * mean), 0).astype(np.uint8)
    return grey


def distinct_heads(layout: Layout) -> list[tuple[Layout, list[int]]]:
    """The distinct head layouts of [H, Q, K], each with the indices of the heads that have it."""
    distinct: list[tuple[Layout, list[int]]] = []
    for head, picture in enumerate(layout):
        same = next((group for other, group in distinct if (other == picture).all()), None)
        if same is None:
            distinct.append((picture, [head]))
        else:
            same.append(head)
    return distinct


def density(layout: Layout) -> tuple[float, str]:
    """Fraction of the blocks [Q, K] that are computed, and of which blocks: all, or those a causal model can have."""
    lower = np.tri(*layout.shape) > 0
    if layout.shape[0] == layout.shape[1] and not (layout & ~lower).any():
        return float(layout[lower].mean()), "of the causal blocks"
    return float(layout.mean()), "of the blocks"


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 -> '0–2, 5'."""
    runs: list[list[int]] = []
    for value in sorted(numbers):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def caption(picture: Layout, group: list[int], heads: int) -> str:
    """'heads 0–2: 12.5% of the blocks'."""
    fraction, of_what = density(picture)
    label = (
        ""
        if heads == 1
        else "all heads: "
        if len(group) == heads
        else f"head{'s' * (len(group) > 1)} "
    )
    return (
        f"{label}{ranges(group) + ': ' if label.startswith('head') else ''}{fraction:.1%} {of_what}"
    )


def text(picture: Layout, columns: int = 64) -> str:
    """One line for each row of cells, with darker characters for higher densities."""
    grey = cells(picture, columns)
    return "\n".join(
        "".join(SHADES[-(-int(cell) * (len(SHADES) - 1) // 255)] for cell in row) for row in grey
    )


def save(layouts: Mapping[str, Layout], path: Path) -> None:
    """Draw layouts [H, Q, K] by their names to `path`, in the format of its suffix (.png, .svg, .pdf)."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    rows = [(name, distinct_heads(layout), len(layout)) for name, layout in layouts.items()]
    across = max(len(heads) for _, heads, _ in rows)
    figure = Figure(figsize=(2.6 * across + 0.6, 2.9 * len(rows) + 0.3), layout="constrained")
    axes = figure.subplots(len(rows), across, squeeze=False)
    ink = LinearSegmentedColormap.from_list("ink", ["white", "#" + bytes(INK).hex()])
    for row, (name, heads, count) in enumerate(rows):
        for column, panel in enumerate(axes[row]):
            panel.set_axis_off()
            if column < len(heads):
                picture, group = heads[column]
                panel.set_axis_on()
                panel.imshow(cells(picture), cmap=ink, vmin=0, vmax=255, interpolation="nearest")
                panel.set_xticks([])
                panel.set_yticks([])
                panel.set_title(f"{name}\n{caption(picture, group, count)}", fontsize=7)
    figure.savefig(path)
