"""Seconds of a step by phase: data, forward, backward, communicate, optimizer."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function


class PhaseTimer:
    """Sums seconds by phase: wall time on a CPU, on a GPU the device's time between two events.

    It never waits for the device. A pipeline has a receive in flight there, whose sender may wait for this very rank.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_phase: Callable[[str], object] = str
        """Called with the name of each phase as it begins."""
        self._split: dict[str, float] = {}
        self._totals: dict[str, float] = {}
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        """Phases, as (name, begin, end), that the device may not have finished."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body under `name`."""
        self.on_phase(name)
        with record_function(name):  # the phase's name in a profile
            yield from self._timed(name)

    def _timed(self, name: str) -> Iterator[None]:
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            try:
                yield
            finally:
                end.record()
                self._pending.append((name, begin, end))
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, time.perf_counter() - start)

    def flush(self) -> dict[str, float]:
        """Return the sums so far and reset them to zero. What a GPU has not finished counts in a later call."""
        self._add_finished()
        split, self._split = self._split, {}
        return split

    def totals(self) -> dict[str, float]:
        """Return the sums since the start, of what a GPU has finished."""
        self._add_finished()
        return dict(self._totals)

    def _add_finished(self) -> None:
        while self._pending and self._pending[0][2].query():  # type: ignore[no-untyped-call]
            name, begin, end = self._pending.popleft()
            self._add(name, begin.elapsed_time(end) / 1e3)

    def _add(self, name: str, seconds: float) -> None:
        self._split[name] = self._split.get(name, 0.0) + seconds
        self._totals[name] = self._totals.get(name, 0.0) + seconds
