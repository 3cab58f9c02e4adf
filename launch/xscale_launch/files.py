"""Files of the launcher: read and written safely, removed by name, and texts that a script or terminal can hold.

The launcher runs where xscale is not installed, so it does not share `xscale.core.files.file_safety`.
"""

import errno
import os
import re
import shutil
import stat
import unicodedata
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from xscale_launch.status import LaunchError

SECRET = re.compile("TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
"""Part of the name of an environment variable whose value is never shown."""
MASK = "***"


def check_line(what: str, text: str) -> str:
    """Return `text` if it fits on one line of a script; raise `LaunchError`, naming `what` it is, otherwise."""
    if not text.isprintable():
        raise LaunchError(
            f"{what} {text!r} contains a line end or another control character: choose another"
        )
    return text


def shown(text: str) -> str:
    """Return `text` with its control and format characters escaped, but for newlines and tabs.

    A terminal would carry them out: the rule is that of `xscale.core.say`.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(letter if _is_shown(letter) else ascii(letter)[1:-1] for letter in text)


def _is_shown(letter: str) -> bool:
    return letter in "\n\t" or letter.isprintable() or unicodedata.category(letter) == "Zs"


def check_variable(where: str, name: str) -> str:
    """Return `name` if it can name an environment variable; raise `LaunchError` otherwise: a script has it."""
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
        raise LaunchError(
            f"{where}: {name!r} cannot name an environment variable; use letters, digits and _"
        )
    return name


def masked(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables as they may be shown: a value whose name says that it is secret is hidden."""
    return {name: MASK if SECRET.search(name) else value for name, value in variables.items()}


def read_regular(path: Path) -> bytes:
    """Read a regular file. OSError for a device, a FIFO or a folder, whose readers would wait forever."""
    # Without O_NONBLOCK the opening of a FIFO waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", closefd=True) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "this is not a regular file", str(path))
        return file.read()


FLAGS = {
    "rb": os.O_RDONLY,
    "wb": os.O_WRONLY | os.O_CREAT,
    "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}
"""Flags of each mode in which a file of a run folder is opened."""
FIX = "remove it, or choose another run.dir"


def open_run_file(path: Path, mode: str) -> IO[bytes]:
    """Open a regular file of a run folder; "rb", "wb", "ab" or "xb". `LaunchError` for a link, FIFO, device or folder.

    OSError for all else, such as FileExistsError in mode "xb", and FileNotFoundError.
    """
    try:
        # Without O_NONBLOCK the opening of a FIFO waits for its other end.
        descriptor = os.open(
            path, FLAGS[mode] | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
        )
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise LaunchError(f"{path} is a link, a FIFO or a folder, not a file: {FIX}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise LaunchError(f"{path} is not a regular file: {FIX}")
        if mode == "wb":
            os.truncate(descriptor, 0)
        return os.fdopen(descriptor, mode)
    except BaseException:
        os.close(descriptor)
        raise


def read_run_file(path: Path) -> bytes:
    """Read a file of a run folder; errors as `open_run_file`."""
    with open_run_file(path, "rb") as file:
        return file.read()


def write_run_file(path: Path, text: str) -> None:
    """Write a file of a run folder; errors as `open_run_file`."""
    with open_run_file(path, "wb") as file:
        file.write(text.encode())


def make_run_folder(run: Path, *names: str) -> Path:
    """Make the folder `names[0]/names[1]/...` of a run folder. `LaunchError` where one of them is a link or a file."""
    run.mkdir(parents=True, exist_ok=True)
    folder = run
    for name in names:
        folder = _entry(folder, name)
        # Two nodes may make it at once.
        with suppress(FileExistsError):
            folder.mkdir()
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise LaunchError(f"{folder} is a link or a file, not a folder: {FIX}")
    return folder


def open_append(path: Path) -> IO[bytes]:
    """Open a file in a folder of a run folder to append to it, and make that folder; errors as `open_run_file`."""
    make_run_folder(path.parent.parent, path.parent.name)
    return open_run_file(path, "ab")


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, in one step; an earlier one may have been readable."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    remove_file(part.parent, part.name)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    part.replace(path)


def remove_file(folder: Path, name: str) -> None:
    """Remove the file `name` of `folder`, if it exists; of a symbolic link the link."""
    _entry(folder, name).unlink(missing_ok=True)


def remove_folder(folder: Path, name: str) -> None:
    """Remove the folder `name` of `folder` with its content, as far as possible; a link or FIFO is removed itself."""
    path = _entry(folder, name)
    # rmtree opens what it is given: a link would be followed, and a FIFO waited for, for ever.
    with suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _entry(folder: Path, name: str) -> Path:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the name of a file in {folder}")
    return folder / name
