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
FILE_BYTES = 256 << 20
"""Largest file that is read whole, unless its reader says otherwise."""
JSON_DEPTH = 100
"""Deepest nesting of lists and objects in JSON."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
LFS_BYTES = 1024
"""A pointer of Git LFS has fewer bytes (the specification of Git LFS)."""
JSON_VALUES = 4_000_000
"""Most values in JSON, about: the largest tokenizers have half of it, and each may take 200 bytes of memory."""
JSON_BLOCK = 4 << 20
INTEGER_DIGITS = 20
"""Longest integer in JSON, with its sign: one of 64 bits."""


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
            raise ValueError(
                f"the path {path!r} leaves its folder or is not a plain name ({error})"
            ) from None
    return path


def open_regular(path: Path, *, follow: bool = True) -> io.BufferedReader:
    """Open a regular file for reading. OSError for a device, a FIFO or a folder, whose readers would wait forever,
    and for a pointer of Git LFS.

    Without `follow` a symbolic link is an error too.
    """
    # Without O_NONBLOCK the opening of a FIFO waits for a writer.
    descriptor = os.open(
        path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    )
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "this is not a regular file", str(path))
        if _is_lfs_pointer(descriptor):
            what = "this is a pointer of Git LFS, and `git lfs pull` fetches the file that it stands for"
            raise OSError(errno.EINVAL, what, str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _is_lfs_pointer(descriptor: int) -> bool:
    if os.fstat(descriptor).st_size >= LFS_BYTES:
        return False
    return os.pread(descriptor, len(LFS_POINTER), 0) == LFS_POINTER


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is a pointer of Git LFS, which stands for a file that was not fetched. OSError."""
    if not is_regular(path):
        return False
    with path.open("rb") as file:
        return _is_lfs_pointer(file.fileno())


def check_readable(path: Path) -> None:
    """Raise OSError as `open_regular` does, for a file that a library opens."""
    open_regular(path).close()


def read_regular(path: Path, limit: int | None = FILE_BYTES) -> bytes:
    """Read a regular file of at most `limit` bytes. OSError as `open_regular`, and where it is larger."""
    with open_regular(path) as file:
        # Not read(limit), which would take that much memory for a file of any size.
        if limit is not None and os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"the file is larger than {limit} bytes", str(path))
        return file.read()


def decode_json(content: bytes | str, *, unique: bool = False, any_integer: bool = False) -> Any:
    """Decode JSON. ValueError with a clause, also for values, nesting or integers that no file of ours or a model has.

    With `unique` a key that an object has twice is an error: readers would differ on what it means. With `any_integer`
    an integer may be larger than 64 bits, as in rows of a corpus, whose other fields nobody reads.
    """
    _check_values(content)
    try:
        data = json.loads(
            content,
            object_pairs_hook=_unique_keys if unique else None,
            parse_int=None if any_integer else _integer_of_64_bits,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError) or "set_int_max_str_digits" not in str(error):
            raise
        raise ValueError("it has an integer of thousands of digits") from None
    _check_depth(content, data)
    return data


def _integer_of_64_bits(digits: str) -> int:
    if len(digits) > INTEGER_DIGITS:
        raise ValueError(f"it has an integer of {len(digits)} digits")
    return int(digits)


def _check_values(content: bytes | str) -> None:
    """Raise ValueError where there are more than `JSON_VALUES` values, before any is made."""
    if _separators(content) <= JSON_VALUES:
        return
    # Latin 1 has a letter for each byte, and those of JSON's syntax are ASCII.
    text = content.decode("latin-1") if isinstance(content, bytes) else content
    if _separators_outside_texts(text) > JSON_VALUES:
        raise ValueError(f"it has more than {JSON_VALUES} values")


def _separators(content: bytes | str) -> int:
    if isinstance(content, bytes):
        return content.count(b",") + content.count(b"[") + content.count(b"{")
    return content.count(",") + content.count("[") + content.count("{")


def _separators_outside_texts(text: str) -> int:
    """Count them up to about `JSON_VALUES`, a block at a time: a document may have millions of commas within."""
    count = begin = 0
    in_text = False
    while begin < len(text) and count <= JSON_VALUES:
        end = min(begin + JSON_BLOCK, len(text))
        # What a backslash escapes is in its block.
        while end < len(text) and text[end - 1] == "\\":
            end += 1
        block = text[begin:end].replace("\\\\", "").replace('\\"', "")
        pieces = block.split('"')
        count += _separators("".join(pieces[in_text::2]))
        in_text ^= len(pieces) % 2 == 0
        begin = end
    return count


def _check_depth(content: bytes | str, data: Any) -> None:
    """Raise ValueError where lists and objects are nested more than `JSON_DEPTH` deep: who walks them would recurse."""
    if isinstance(content, bytes):
        brackets = content.count(b"[") + content.count(b"{")
    else:
        brackets = content.count("[") + content.count("{")
    if brackets <= JSON_DEPTH:
        return
    level, depth = [data], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > JSON_DEPTH:
            raise ValueError("it is nested too deeply")
        level = [
            value for item in level for value in (item.values() if isinstance(item, dict) else item)
        ]


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


def make_private_file(path: Path, content: bytes) -> None:
    """Create a file that this user alone may read. FileExistsError where it is there, else OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)


def check_private_folder(path: Path) -> None:
    """Raise OSError where `path` is a symbolic link, of another user, or writable by others; it need not exist."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.ENOTDIR, "this is a symbolic link or a file, not a folder", str(path))
    if status.st_uid != os.getuid():
        raise OSError(
            errno.EPERM, f"the folder belongs to another user (uid {status.st_uid})", str(path)
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(
            errno.EPERM,
            f"others may write into the folder (mode {status.st_mode & 0o777:o})",
            str(path),
        )


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
    """Remove the folder `name` of `folder` with its content, as far as possible; what is no folder is removed itself.

    ValueError for `..` or a path: nothing outside `folder` can be named.
    """
    _check_entry(name)
    path = folder / name
    # rmtree opens what it is given: a link would be followed, and a FIFO waited for, for ever.
    with suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
