"""Where fault tests write."""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

MEMORY = Path("/dev/shm")


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is room: a kill of a process loses nothing there either, and nothing waits."""
    if not os.access(MEMORY, os.W_OK) or shutil.disk_usage(MEMORY).free < 1 << 30:
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="faults-", dir=MEMORY))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def limit_seconds() -> Iterator[None]:
    """End a test that hangs, before the watchdog of a run ends the process of the tests."""

    def hangs(*_: Any) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(500)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


CASES = pytest.StashKey[dict[str, int]]()


@pytest.fixture
def count_cases(request: pytest.FixtureRequest) -> Callable[[int, str], None]:
    """`count_cases(number, what)`: so many faults were made and survived; told at the end of the test run."""
    counts = request.config.stash.setdefault(CASES, {})

    def count(number: int, what: str) -> None:
        counts[what] = counts.get(what, 0) + number

    return count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash.get(CASES, {})
    if counts:
        terminalreporter.section("fault cases")
        for what, number in counts.items():
            terminalreporter.line(f"{number:>6}  {what}")
        terminalreporter.line(f"{sum(counts.values()):>6}  in all")
