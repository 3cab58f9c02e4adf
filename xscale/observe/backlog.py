"""Entries that an observer has not written yet: kept in memory, in order, and tried again."""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
LIMIT_BYTES = 32 << 20
"""Bytes of entries that an observer keeps, some 30,000 rows of metrics.jsonl; later ones are dropped and counted."""
LONGEST_PAUSE = 63
"""Most entries that are added between two attempts to write."""


class Backlog(Generic[T]):
    """Writes entries in order by `write`. One that fails with an OSError stays, with those after it.

    An entry that is added tries again. After each failure in a row twice as many entries are added first, as an attempt
    may take long. No method raises the error: `error` is the last one until all is written.
    """

    def __init__(
        self, what: str, write: Callable[[T], None], longest_pause: int = LONGEST_PAUSE
    ) -> None:
        """`what` is the name of what is written to."""
        self.what = what
        self.error: OSError | None = None
        self.dropped = 0
        """Entries that it had no room to keep."""
        self._write, self._longest_pause = write, longest_pause
        self._entries: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._pause = self._wait = 0

    @property
    def missing(self) -> int:
        """Entries that are not written, kept or not."""
        return len(self._entries) + self.dropped

    def add(self, entry: T, size: int) -> None:
        """Write an entry that takes `size` bytes of memory, after those that are kept; keep it where that fails."""
        if self._entries and size and self._bytes + size > LIMIT_BYTES:
            self.dropped += 1
        else:
            self._entries.append((entry, size))
            self._bytes += size
        self.retry()

    def retry(self) -> None:
        """Write what is kept, unless it is too early for another attempt."""
        if self._wait:
            self._wait -= 1
        else:
            self.flush()

    def flush(self) -> None:
        """Write what is kept."""
        while self._entries:
            entry, size = self._entries[0]
            try:
                self._write(entry)
            except OSError as error:
                self.error = error
                self._pause = self._wait = min(2 * self._pause + 1, self._longest_pause)
                return
            self._entries.popleft()
            self._bytes -= size
        self.error = None
        self._pause = self._wait = 0
