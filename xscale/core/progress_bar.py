"""The progress bar that a terminal shows, drawn by rich."""

from typing import TextIO


class TerminalBar:
    """A bar with a title before it and a text after it; for a stream that is a terminal."""

    def __init__(
        self,
        title: str,
        total: int | None,
        stream: TextIO,
        *,
        completed: int = 0,
        counts: bool = False,
    ) -> None:
        """`counts`: show 'completed/total' before the bar. Without a `total` the bar only moves."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = [
            TextColumn(title, markup=False),
            *([MofNCompleteColumn()] if counts else []),
            BarColumn(None),
        ]
        self._progress = Progress(
            *columns,
            TextColumn("{task.fields[text]}", markup=False),
            console=Console(file=stream),
            expand=True,
            # Twice a second is enough for eyes; the drawing thread takes time from the work.
            refresh_per_second=2,
        )
        self._task = self._progress.add_task("", total=total, completed=completed, text="")
        self._progress.start()

    def update(self, completed: int, text: str = "") -> None:
        self._progress.update(self._task, completed=completed, text=text)

    def print(self, text: str) -> None:
        """Print lines above the bar."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        self._progress.stop()
