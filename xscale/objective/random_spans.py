"""Random spans of a sequence, which an objective masks or shuffles."""

from collections.abc import Sequence

import torch
from torch import Tensor


def draw_spans(
    free: Tensor,
    budget: int,
    weights: Sequence[float],
    generator: torch.Generator,
    *,
    least: int = 1,
    gap: int = 0,
) -> list[tuple[int, int]]:
    """Draw disjoint spans [first, end) of positions that are `free` [T], until they have `budget` positions together.

    Starts come in random order, and a length of n is drawn with probability proportional to `weights[n - 1]`. A span
    ends early where a position is not free or the budget is spent; one shorter than `least` is not taken. `gap`
    positions on each side of a span are in no other span. The draws depend on the length of the sequence alone.
    """
    order = torch.randperm(len(free), generator=generator).tolist()
    probabilities = torch.tensor(weights, dtype=torch.float64)
    lengths = torch.multinomial(
        probabilities, len(free), replacement=True, generator=generator
    ).tolist()
    available: list[bool] = free.tolist()
    spans: list[tuple[int, int]] = []
    for start, length in zip(order, lengths, strict=True):
        end = start
        while end < min(start + length + 1, start + budget, len(available)) and available[end]:
            end += 1
        if end - start < least:
            continue
        spans.append((start, end))
        budget -= end - start
        first, last = max(start - gap, 0), min(end + gap, len(available))
        available[first:last] = [False] * (last - first)
        if not budget:
            break
    return spans
