"""Progress of a long job over bytes: a bar on a terminal, a plain line now and then elsewhere."""

import sys
import time
from typing import TextIO

from xscale.core.progress_bar import TerminalBar

EVERY_SECONDS = 10.0
"""Between plain lines."""


class ProgressBar:
    """A context; call `advance(bytes)` as work gets done. Silent where `shown` is False.

    Work of unknown length (`total` None) shows its time; call `advance(0)` now and then.
    """

    def __init__(
        self, title: str, total: int | None, *, shown: bool = True, stream: TextIO | None = None
    ) -> None:
        self.title = title
        self.total = None if total is None else max(1, total)
        self.done = 0
        self.stream = stream or sys.stderr
        self.shown = shown
        self.bar: TerminalBar | None = None
        self.started = self.last_line = time.monotonic()

    def __enter__(self) -> "ProgressBar":
        if self.shown and self.stream.isatty():
            self.bar = TerminalBar(self.title, self.total, self.stream)
        elif self.shown:
            size = "" if self.total is None else f": {self.total / 1e6:.1f} MB"
            print(f"{self.title}{size}", file=self.stream, flush=True)
        return self

    def advance(self, size: int) -> None:
        self.done += size
        if self.bar is not None:
            self.bar.update(self.done, self._text(time.monotonic()))
        elif self.shown and (now := time.monotonic()) - self.last_line > EVERY_SECONDS:
            self.last_line = now
            print(f"{self.title}: {self._text(now)}", file=self.stream, flush=True)

    def _text(self, now: float) -> str:
        """'25 %, 3.1 MB/s, 4 s left', or '12 s' for work of unknown length."""
        if self.total is None:
            return f"{now - self.started:.0f} s"
        rate = self.done / max(now - self.started, 1e-9)
        left = (self.total - self.done) / max(rate, 1e-9)
        return f"{100 * self.done / self.total:.0f} %, {rate / 1e6:.1f} MB/s, {left:.0f} s left"

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif self.shown and error is None:
            print(
                f"{self.title}: done in {time.monotonic() - self.started:.1f} s",
                file=self.stream,
                flush=True,
            )
