"""Libraries are silent on the terminal: their warnings and log lines are no messages for a user of xscale.

What is an error, or of the user's own code, is printed. `PYTHONWARNINGS=default xscale ...` shows all of it, and
so do the variables of the libraries, such as TORCH_LOGS.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xscale.mesh.environment import silence_native_logs, wants_library_messages

OURS = ("xscale", "xscale_kernels", "xscale_launch", "xscale_tinybert")
PACKAGES = ("site-packages", "dist-packages", *OURS[1:])
"""Folders of packages; one that is called `xscale` may be the user's."""
FOLDERS = (Path(warnings.__file__).parent, Path(__file__).parents[2])
"""The standard library and this package."""


def is_of_library(file: str) -> bool:
    """Whether a message about `file` is a library's: installed, of Python itself, or a call from a file of xscale."""
    path = Path(file)
    return (
        file.startswith("<")
        or any(part in PACKAGES for part in path.parts[:-1])
        or any(path.is_relative_to(folder) for folder in FOLDERS)
    )


class LibraryLogger(logging.Logger):
    """A logger that hands on what is an error, of xscale, or of the user's own code."""

    def handle(self, record: logging.LogRecord) -> None:
        is_ours = self.name.partition(".")[0] in OURS
        if is_ours or record.levelno >= logging.ERROR or not is_of_library(record.pathname):
            super().handle(record)


@contextmanager
def silent_libraries() -> Iterator[None]:
    """Make the loggers that are created from now on `LibraryLogger`s, unless the user wants to see libraries' messages.

    Commands import libraries when they run, so that this is before the libraries create their loggers.
    """
    if sys.warnoptions or wants_library_messages():
        yield
        return
    silence_native_logs()
    before = logging.getLoggerClass()
    logging.setLoggerClass(LibraryLogger)
    try:
        yield
    finally:
        logging.setLoggerClass(before)


def without_libraries(show: Callable[..., None]) -> Callable[..., None]:
    """Return a `warnings.showwarning` that leaves libraries' warnings out, unless Python was told what to show."""

    def show_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        *location: Any,
        **options: Any,
    ) -> None:
        if sys.warnoptions or not is_of_library(filename):
            show(message, category, filename, *location, **options)

    return show_warning
