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


def _hangs(number: int, frame: FrameType | None) -> None:
    raise HangError(f"it took more than {HANG_SECONDS} s")


def listing(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return what lies in `folder`, with contents: nothing outside of a run's folder may change."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }
