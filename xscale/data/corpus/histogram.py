"""Histogram of document lengths, with rows that double, as numbers and as bars of text."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

BAR_WIDTH = 40


def length_rows(lengths: NDArray[Any]) -> list[tuple[int, int, int]]:
    """Count `lengths` [N] by powers of two: (least, most, how many), from the first row that has any to the last."""
    if len(lengths) == 0:
        return []
    # The exponent of `frexp` is the number of bits: 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7.
    counts = np.bincount(np.frexp(lengths)[1])
    first = int(np.flatnonzero(counts)[0])
    return [
        (2**bits // 2, max(0, 2**bits - 1), int(counts[bits])) for bits in range(first, len(counts))
    ]


def bars(rows: list[tuple[int, int, int]]) -> list[str]:
    """Format the rows of a histogram, each with a bar; the longest has `BAR_WIDTH` characters."""
    largest = max((count for _, _, count in rows), default=0)
    return [
        f"{least:>10,} - {most:<10,} {count:>9,} {'#' * round(BAR_WIDTH * count / largest)}".rstrip()
        for least, most, count in rows
    ]
