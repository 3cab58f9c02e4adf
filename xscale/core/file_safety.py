"""Files that somebody else may have written: names that stay in their folder, regular files only, and all removal."""

import errno
import io
import json
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

NAME_BYTES = 255
"""Longest name of a file on Linux."""


def check_name(name: str) -> str:
    """Return `name` if it names an entry of a folder; ValueError, with a clause, for `..` or a separator."""
    _check_entry(name)
    if not name.isprintable():
        raise ValueError(f"{name!r} contains a control character")
    if len(name.encode("utf-8", errors="replace")) > NAME_BYTES:
        raise ValueError(f"'{name[:20]}...' is longer than {NAME_BYTES} bytes")
    return name


def _check_entry(name: str) -> None:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the name of a file")


def check_relative(path: str) -> str:
    """Return `path` if it stays below the folder that it is joined to; ValueError with a clause otherwise."""
    for name in path.split("/"):
        try:
            check_name(name)
        except ValueError as error:
            raise ValueError(f"the path {path!r} leaves its folder or is not a plain name ({error})") from None
    return path


def open_regular(path: Path, *, follow: bool = True) -> io.BufferedReader:
    """Open a regular file for reading. OSError for a device, a FIFO or a folder, whose readers would wait forever.

    Without `follow` a symbolic link is an error too.
    """
    # Without O_NONBLOCK the opening of a FIFO waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "this is not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path) -> bytes:
    """Read a regular file. OSError as `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def decode_json(content: bytes | str, *, unique: bool = False) -> Any:
    """Decode JSON. ValueError with a clause, also for nesting or numbers that Python refuses.

    With `unique` a key that an object has twice is an error: readers would differ on what it means.
    """
    try:
        return json.loads(content, object_pairs_hook=_unique_keys if unique else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a key occurs twice")
    return entries


def is_regular(path: Path) -> bool:
    """Whether `path` is a regular file, or a symbolic link to one."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def make_private_folder(path: Path) -> None:
    """Create `path` for this user alone, unless it exists and is that. OSError where it is not."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_private_folder(path)


def check_private_folder(path: Path) -> None:
    """Raise OSError where `path` is a symbolic link, of another user, or writable by others; it need not exist."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.ENOTDIR, "this is a symbolic link or a file, not a folder", str(path))
    if status.st_uid != os.getuid():
        raise OSError(errno.EPERM, f"the folder belongs to another user (uid {status.st_uid})", str(path))
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(errno.EPERM, f"others may write into the folder (mode {status.st_mode & 0o777:o})", str(path))


def remove_file(folder: Path, name: str) -> None:
    """Remove the file `name` of `folder`, if it exists; of a symbolic link the link. ValueError for `..` or a path."""
    _check_entry(name)
    (folder / name).unlink(missing_ok=True)


def remove_empty_folder(folder: Path, name: str) -> None:
    """Remove the folder `name` of `folder`, if it exists and is empty. ValueError for `..` or a path."""
    _check_entry(name)
    with suppress(OSError):
        (folder / name).rmdir()


def remove_folder(folder: Path, name: str) -> None:
    """Remove the folder `name` of `folder` with its content, as far as possible; of a symbolic link the link.

    ValueError for `..` or a path: nothing outside `folder` can be named.
    """
    _check_entry(name)
    path = folder / name
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
