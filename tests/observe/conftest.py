"""A run that never was: facts and reports with experts and layouts, for observers to see."""

import math
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest

from xscale.observe import EvalReport, RunFacts, StepReport


@pytest.fixture
def facts(tmp_path: Path) -> Callable[..., RunFacts]:
    """Makes facts of a run in `tmp_path`; any field can be given."""

    def make(**fields: Any) -> RunFacts:
        blocks = numpy.arange(16)
        window = (blocks[:, None] >= blocks) & (blocks[:, None] - blocks < 4)
        strided = (blocks[:, None] >= blocks) & ((blocks[:, None] - blocks) % 4 == 0)
        known: dict[str, Any] = {
            "folder": tmp_path,
            "config": {"run": {"dir": "A", "seed": 1}, "train": {"steps": 40}, "note": "<b>&amp;</b>"},
            "resumed_from": None,
            "first_step": 1,
            "last_step": 40,
            "parameters": 12_345_678,
            "active_parameters": 4_000_000,
            "flops_per_token": 2.4e7,
            "tokens_per_step": 4096,
            "devices": 2,
            "device": "CPU",
            "layouts": {
                "stack.blocks.0.mixer.core": numpy.stack([window] * 4),
                "stack.blocks.1.mixer.core": numpy.stack([window, window, strided, strided]),
                "stack.blocks.2.mixer.core": numpy.stack([window] * 4),
            },
            "notes": ("grouped_gemm: torch (no GPU)",),
            "versions": {"python": "3.11.2", "torch": "2.13.0"},
        }
        return RunFacts(**(known | fields))

    return make


@pytest.fixture
def step() -> Callable[..., StepReport]:
    """Makes the report of a step; any field can be given."""

    def make(number: int, **fields: Any) -> StepReport:
        known: dict[str, Any] = {
            "step": number,
            "loss": 2.0 + 6.0 * math.exp(-number / 10),
            "lr": 1e-3 / 3,
            "grad_norm": 1.1,
            "tokens": 4096 * number,
            "seconds": 3.0 + 0.5 * number,
            "step_seconds": 0.5,
            "tokens_per_second": 8192.0,
            "mfu": 0.312,
            "split": {"data": 0.01, "forward": 0.15, "backward": 0.3, "communicate": 0.02, "optimizer": 0.02},
            "statistics": {
                "stack.blocks.1.ffn.part/load": [0.4, 0.3, 0.2, 0.1],
                "stack.blocks.1.ffn.part/dropped": 0.02,
            },
        }
        return StepReport(**(known | fields))

    return make


@pytest.fixture
def run(step: Callable[..., StepReport]) -> Callable[..., Iterator[StepReport | EvalReport]]:
    """Reports of a loop from step `first` to step `last`, evaluated every ten steps."""

    def make(first: int = 1, last: int = 40) -> Iterator[StepReport | EvalReport]:
        for number in range(first, last + 1):
            yield step(number)
            if number % 10 == 0:
                loss = 2.1 + 5.0 * math.exp(-number / 10)
                yield EvalReport(number, loss, math.exp(loss), loss / math.log(2) / 3, 1.5)

    return make


@pytest.fixture
def limited_files() -> Iterator[Callable[[int], AbstractContextManager[None]]]:
    """`with limited_files(size)`: no file of this process can grow beyond so many bytes, as on a full disk."""

    @contextmanager
    def limit(size: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield limit
    signal.signal(signal.SIGXFSZ, handler)
