"""Balanced assignments: tokens to experts at the highest total score, and token ids to experts by frequency."""

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xscale.nn.compiling.eager import eager

Array = NDArray[Any]
SWEEPS = 12
"""Rounds of coordinate descent on the prices; more rounds leave less to correct, and take longer."""


@eager
def balanced_assignment(scores: Tensor) -> Tensor:
    """Experts [N] that maximise the sum of `scores` [N, E] over tokens, with at most ceil(N / E) tokens per expert.

    Exact (Lewis et al. 2021, equation 3). Runs on the CPU, on whatever device the scores are. Scores that are not
    finite count as 0.
    """
    tokens, experts = scores.shape
    capacity = -(-tokens // experts)
    # Padding tokens with score 0 fill the last slots, so that every expert is exactly full and any price is allowed.
    table = np.zeros((capacity * experts, experts))
    table[:tokens] = scores.detach().nan_to_num(0.0, 0.0, 0.0).double().cpu().numpy()
    prices = _prices(table, capacity)
    # At any prices, the tokens' best experts are the best assignment among all with the same loads. Moving the excess
    # along the cheapest paths keeps that true.
    assigned = (table - prices).argmax(1)
    _move_excess(table, assigned, capacity)
    return torch.from_numpy(assigned[:tokens]).to(scores.device)


def _prices(table: Array, capacity: int) -> Array:
    """Prices [E] at which few experts exceed the capacity: coordinate descent on the dual problem."""
    tokens, experts = table.shape
    prices = np.zeros(experts)
    if experts == 1:
        return prices
    for _ in range(SWEEPS):
        if np.bincount((table - prices).argmax(1), minlength=experts).max() <= capacity:
            break
        for expert in range(experts):
            best_other = np.delete(table - prices, expert, axis=1).max(1)
            gain = np.partition(table[:, expert] - best_other, tokens - capacity - 1)
            # At this price exactly `capacity` tokens prefer this expert.
            prices[expert] = gain[tokens - capacity - 1]
    return prices


def _move_excess(table: Array, assigned: Array, capacity: int) -> None:
    """Change `assigned` [N] in place until no expert has more than `capacity`, one cheapest path at a time."""
    experts = table.shape[1]
    loads = np.bincount(assigned, minlength=experts)
    cost = np.full((experts, experts), np.inf)
    mover = np.zeros((experts, experts), dtype=np.int64)

    def update_moves(expert: int) -> None:
        """Update the cheapest token to move from `expert` to each other expert, and its cost."""
        members = np.flatnonzero(assigned == expert)
        if len(members) == 0:
            cost[expert] = np.inf
            return
        losses = table[members, expert][:, None] - table[members]
        best = losses.argmin(0)
        cost[expert], mover[expert] = losses[best, np.arange(experts)], members[best]
        cost[expert, expert] = np.inf

    for expert in range(experts):
        update_moves(expert)
    while loads.max() > capacity:
        path = _cheapest(cost, loads > capacity, loads < capacity)
        for source, target in itertools.pairwise(path):
            assigned[mover[source, target]] = target
        loads[path[0]] -= 1
        loads[path[-1]] += 1
        for expert in path:
            update_moves(expert)


def _cheapest(cost: Array, full: Array, free: Array) -> list[int]:
    """Experts on the cheapest path from a full one to a free one (Bellman and Ford: costs can be negative)."""
    experts = len(cost)
    distance = np.where(full, 0.0, np.inf)
    parent = np.full(experts, -1)
    for _ in range(experts):
        through = distance[:, None] + cost
        before = through.argmin(0)
        shorter = through[before, np.arange(experts)]
        # Rounding must not close a cycle of moves at no cost.
        better = shorter < distance - 1e-12 * (
            1 + np.abs(np.where(np.isfinite(distance), distance, 0.0))
        )
        if not better.any():
            break
        distance, parent = np.where(better, shorter, distance), np.where(better, before, parent)
    path = [int(np.where(free, distance, np.inf).argmin())]
    while parent[path[-1]] >= 0:
        path.append(int(parent[path[-1]]))
        assert len(path) <= experts, "the cheapest path has a cycle"
    return path[::-1]


def balanced_hash(frequencies: Sequence[float], experts: int, seed: int = 0) -> Tensor:
    """Expert of each token id, int64 [V] (Roller et al. 2021, section 3.2).

    Ids in order of falling frequency, each to the expert with the lowest total so far; ids that do not occur, each to
    the expert with the fewest of them. `seed` breaks ties.
    """
    order = np.random.default_rng(seed).permutation(experts).tolist()
    heap = [(0.0, tie_break, expert) for tie_break, expert in enumerate(order)]
    table = [0] * len(frequencies)
    used = sorted(
        (token for token, frequency in enumerate(frequencies) if frequency),
        key=lambda token: -frequencies[token],
    )
    for token in used:
        total, tie_break, expert = heap[0]
        table[token] = expert
        heapq.heapreplace(heap, (total + frequencies[token], tie_break, expert))
    unused = (token for token, frequency in enumerate(frequencies) if not frequency)
    for number, token in enumerate(unused):
        table[token] = order[number % experts]
    return torch.tensor(table, dtype=torch.int64, device="cpu")
