"""Balanced assignments: of tokens to experts at the highest total score, and of token ids by their frequency."""

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xscale.nn.eager import eager

Array = NDArray[Any]
SWEEPS = 12
"""Rounds of setting prices one by one; more make less to correct, and cost more themselves."""


@eager
def assign(scores: Tensor) -> Tensor:
    """Experts [N] that maximise the sum of `scores` [N, E] over tokens, no expert with more than ceil(N / E) of them.

    Exact (Lewis et al. 2021, equation 3). On the CPU, wherever the scores are. Scores that are not finite count as 0.
    """
    tokens, experts = scores.shape
    room = -(-tokens // experts)
    # Tokens that want nothing fill up the last places, so that every expert is exactly full and any price allowed.
    table = np.zeros((room * experts, experts))
    table[:tokens] = scores.detach().nan_to_num(0.0, 0.0, 0.0).double().cpu().numpy()
    prices = _prices(table, room)
    # At any prices, tokens at their best experts form the best of all assignments with the same loads. What is left is
    # to move the excess along the cheapest paths, which keeps that true.
    chosen = (table - prices).argmax(1)
    _move_excess(table, chosen, room)
    return torch.from_numpy(chosen[:tokens]).to(scores.device)


def _prices(table: Array, room: int) -> Array:
    """A price for each expert [E] at which few have more takers than room: descent on the dual, one at a time."""
    tokens, experts = table.shape
    prices = np.zeros(experts)
    if experts == 1:
        return prices
    for _ in range(SWEEPS):
        if np.bincount((table - prices).argmax(1), minlength=experts).max() <= room:
            break
        for expert in range(experts):
            others = np.delete(table - prices, expert, axis=1).max(1)
            gain = np.partition(table[:, expert] - others, tokens - room - 1)
            # With the price at this gain, exactly `room` tokens would rather be here.
            prices[expert] = gain[tokens - room - 1]
    return prices


def _move_excess(table: Array, chosen: Array, room: int) -> None:
    """Change `chosen` [N] in place until no expert has more than `room`, one cheapest path at a time."""
    experts = table.shape[1]
    loads = np.bincount(chosen, minlength=experts)
    cost = np.full((experts, experts), np.inf)
    mover = np.zeros((experts, experts), dtype=np.int64)

    def look(expert: int) -> None:
        """The cheapest token to move from `expert` to each other one, and what it costs."""
        members = np.flatnonzero(chosen == expert)
        if len(members) == 0:
            cost[expert] = np.inf
            return
        losses = table[members, expert][:, None] - table[members]
        best = losses.argmin(0)
        cost[expert], mover[expert] = losses[best, np.arange(experts)], members[best]
        cost[expert, expert] = np.inf

    for expert in range(experts):
        look(expert)
    while loads.max() > room:
        path = _cheapest(cost, loads > room, loads < room)
        for source, target in itertools.pairwise(path):
            chosen[mover[source, target]] = target
        loads[path[0]] -= 1
        loads[path[-1]] += 1
        for expert in path:
            look(expert)


def _cheapest(cost: Array, full: Array, free: Array) -> list[int]:
    """Experts on the cheapest path from a full one to a free one (Bellman and Ford: a cost can be below zero)."""
    experts = len(cost)
    distance = np.where(full, 0.0, np.inf)
    parent = np.full(experts, -1)
    for _ in range(experts):
        through = distance[:, None] + cost
        before = through.argmin(0)
        shorter = through[before, np.arange(experts)]
        # Rounding must not close a circle of moves that cost nothing.
        better = shorter < distance - 1e-12 * (1 + np.abs(np.where(np.isfinite(distance), distance, 0.0)))
        if not better.any():
            break
        distance, parent = np.where(better, shorter, distance), np.where(better, before, parent)
    path = [int(np.where(free, distance, np.inf).argmin())]
    while parent[path[-1]] >= 0:
        path.append(int(parent[path[-1]]))
        assert len(path) <= experts, "the cheapest path of moves goes in a circle"
    return path[::-1]


def deal(frequencies: Sequence[float], experts: int, seed: int = 0) -> Tensor:
    """Expert of each token id, int64 [V]: ids from the most frequent on, each to the expert with the least so far
    (Roller et al. 2021, section 3.2). `seed` breaks ties."""
    order = np.random.default_rng(seed).permutation(experts).tolist()
    heap = [(0.0, place, expert) for place, expert in enumerate(order)]
    table = [0] * len(frequencies)
    for token in sorted(range(len(frequencies)), key=lambda token: -frequencies[token]):
        total, place, expert = heap[0]
        table[token] = expert
        heapq.heapreplace(heap, (total + frequencies[token], place, expert))
    return torch.tensor(table, dtype=torch.int64, device="cpu")
