"""Standard streams that may be closed, and arguments of any bytes, before any command runs."""

import io
import os
import sys

from xscale.core.errors import ConfigError


def open_closed_streams() -> None:
    """Open the null device in the place of standard streams that are closed, as under cron and `>&-`.

    Otherwise the next file that is opened has the number of such a stream, and what a library prints is written to it.
    """
    for descriptor, mode in enumerate("rww"):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is taken, and those below are open.
            os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A name or a sign that the terminal's encoding lacks is escaped, as Python does on stderr.
        sys.stdout.reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """Write what is left in the buffer of standard output; exit status 1 where its reader has left.

    Python would write it when it ends, and say that it could not, with status 120.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)


def check_arguments(arguments: list[str]) -> None:
    """Raise ConfigError for an argument that is not UTF-8: no config, message or file of a run could hold it."""
    for argument in arguments:
        if any("\udc80" <= letter <= "\udcff" for letter in argument):
            shown = argument.encode(errors="replace").decode()
            raise ConfigError(
                shown, "this argument is not UTF-8 text", "Rename the file, or write it in UTF-8."
            )
