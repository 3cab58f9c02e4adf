"""How far a long job is: a bar on a terminal, now and then a plain line elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any, TextIO

EVERY_SECONDS = 10.0


class Progress:
    """A context; `advance(bytes)` as work gets done. Silent when `shown` is False."""

    def __init__(self, title: str, total: int, *, shown: bool = True, stream: TextIO | None = None) -> None:
        self.title = title
        self.total = max(1, total)
        self.done = 0
        self.stream = stream or sys.stderr
        self.shown = shown
        self.bar: Any = None
        self.task: Any = None
        self.begun = self.spoken = time.monotonic()

    def __enter__(self) -> "Progress":
        if self.shown and self.stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self.bar = Bar(*columns, TimeRemainingColumn(), console=Console(file=self.stream))
            self.task = self.bar.add_task(self.title, total=self.total)
            self.bar.start()
        elif self.shown:
            print(f"{self.title}: {self.total / 1e6:.1f} MB", file=self.stream, flush=True)
        return self

    def advance(self, size: int) -> None:
        self.done += size
        if self.bar is not None:
            self.bar.advance(self.task, size)
        elif self.shown and time.monotonic() - self.spoken > EVERY_SECONDS:
            self.spoken = time.monotonic()
            rate = self.done / (self.spoken - self.begun)
            left = (self.total - self.done) / max(rate, 1e-9)
            percent = 100 * self.done / self.total
            text = f"{self.title}: {percent:.0f} %, {rate / 1e6:.1f} MB/s, {left:.0f} s left"
            print(text, file=self.stream, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif self.shown and error is None:
            print(f"{self.title}: done in {time.monotonic() - self.begun:.1f} s", file=self.stream, flush=True)
