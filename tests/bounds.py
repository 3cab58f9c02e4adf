"""Bounds within which a command reads hostile input: of memory, of processor time, and of what it writes."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

GIGABYTE = 1 << 30
HANG_SECONDS = 20
"""Ends a hang: the processor's time of this process alone, so that a busy machine does not count."""


@contextmanager
def bounded(memory: int = GIGABYTE) -> Iterator[None]:
    """Run what is inside with at most `memory` more bytes than now; MemoryError beyond it, TimeoutError for a hang."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGVTALRM, _hangs)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, before[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGVTALRM, handler)


class HangError(BaseException):
    """Not an Exception: nothing that is under test may catch it."""


def resident(name: str = "VmRSS") -> int:
    """Memory of this process in bytes, by its name in /proc/self/status: VmRSS now, VmHWM at its peak."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def peak_above(before: int) -> int:
    """How many bytes the peak since `begin_peak` is above `before`."""
    return max(0, resident("VmHWM") - before)


def begin_peak() -> int:
    """Count the peak of memory from here on; the memory now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


def _hangs(number: int, frame: FrameType | None) -> None:
    raise HangError(f"it took more than {HANG_SECONDS} s")


def listing(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return what lies in `folder`, with contents: nothing outside of a run's folder may change."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }
