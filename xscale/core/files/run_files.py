"""Files of a run folder: one way to open them, by which no symbolic link leads out and no FIFO is waited for.

A run folder may come from anybody. What stands in the place of a file is refused unless it is a regular file.
"""

import errno
import os
import stat
from io import FileIO
from pathlib import Path
from typing import Literal

from xscale.core.files.file_safety import FILE_BYTES, check_name

Mode = Literal["rb", "wb", "ab", "xb", "a+b"]
FLAGS: dict[Mode, int] = {
    "rb": os.O_RDONLY,
    "wb": os.O_WRONLY | os.O_CREAT,
    "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    "a+b": os.O_RDWR | os.O_CREAT | os.O_APPEND,
}
"""Flags of each mode of `open`; "wb" empties the file only once it is known to be a regular one."""
KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
}


class IrregularFileError(OSError):
    """A link, FIFO, device or folder stands where a run has a file, or something else where it has a folder."""

    def __init__(self, path: Path, kind: str, wanted: str) -> None:
        super().__init__(errno.EINVAL, f"this is {kind}, not {wanted}", str(path))


def kind_of(path: Path) -> str | None:
    """Name what stands at `path`, itself and not what it links to; None: nothing. Raises OSError."""
    try:
        return KINDS.get(stat.S_IFMT(path.lstat().st_mode), "a special file")
    except (FileNotFoundError, NotADirectoryError):
        return None


def open_run_file(path: Path, mode: Mode = "rb") -> FileIO:
    """Open a file of a run, without a buffer. OSError; an IrregularFileError for all that is no regular file."""
    # Asked before it is opened: the opening of a device may do something. O_EXCL opens nothing that is there.
    kind = None if mode == "xb" else kind_of(path)
    if kind not in (None, "a file"):
        raise IrregularFileError(path, str(kind), "a file")
    # Without O_NONBLOCK the opening of a FIFO, put here since, would wait for its other end.
    flags = FLAGS[mode] | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = FileIO(path, mode, opener=lambda name, _: os.open(name, flags, 0o666))
    try:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise IrregularFileError(path, "a special file", "a file")
        if mode == "wb":
            file.truncate()
        return file
    except BaseException:
        file.close()
        raise


def read_run_file(path: Path, limit: int | None = FILE_BYTES) -> bytes:
    """Read a file of a run, of at most `limit` bytes. Errors as `open_run_file`, and where it is larger."""
    with open_run_file(path) as file:
        # Not read(limit), which would take that much memory for a file of any size.
        if limit is not None and os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"the file is larger than {limit} bytes", str(path))
        return file.readall()


def read_nested_run_file(path: Path) -> bytes:
    """Read a file in a folder of a run, neither of which may be a link. Errors as `read_run_file`."""
    require_folder(path.parent)
    return read_run_file(path)


def require_own_files(folder: Path) -> None:
    """Raise IrregularFileError where `folder` of a run, or an entry of it, is neither a file nor a folder. OSError.

    What reads the files by a library, or as those that a user names, follows no link then.
    """
    require_folder(folder)
    for path in sorted(folder.iterdir()):
        if (kind := kind_of(path)) not in (None, "a file", "a folder"):
            raise IrregularFileError(path, str(kind), "a file")


def make_run_folder(run: Path, *names: str) -> Path:
    """Make the folder `names[0]/names[1]/...` of the run folder `run`, each unless it exists; return its path.

    OSError; an IrregularFileError where one of them is a symbolic link or a file. ValueError for `..` or a path.
    """
    folder = run
    for name in names:
        folder = folder / check_name(name)
        folder.mkdir(exist_ok=True) if kind_of(folder) is None else require_folder(folder)
    return folder


def require_folder(folder: Path) -> None:
    """Raise IrregularFileError where `folder` is a symbolic link or a file. OSError."""
    if (kind := kind_of(folder)) not in (None, "a folder"):
        raise IrregularFileError(folder, str(kind), "a folder")
