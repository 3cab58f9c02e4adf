"""Atomic writes: the old content or the new, and no temporary file is left."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from xscale.core.errors import ConfigError, FaultError
from xscale.core.files.atomic_write import (
    TEMPORARY_SUFFIX,
    AppendFile,
    atomic_write,
    reporting_full_disk,
    write_atomically,
    writing_folder,
)
from xscale.core.files.file_errors import file_sentence


def test_content_is_replaced_at_the_end_of_the_block(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old", encoding="utf-8")
    with atomic_write(path) as file:
        file.write("näw")
        file.flush()
        assert path.read_text(encoding="utf-8") == "old"
        assert [other.name.endswith(TEMPORARY_SUFFIX) for other in tmp_path.iterdir() if other != path] == [True]
    assert path.read_bytes() == "näw".encode()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_a_failure_keeps_the_old_content(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail_half_way() -> None:
        with atomic_write(path, "wb") as file:
            file.write(b"half")
            raise error

    with pytest.raises(type(error)):
        fail_half_way()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_text_and_bytes(tmp_path: Path) -> None:
    write_atomically(tmp_path / "text", "ä")
    write_atomically(tmp_path / "bytes", b"\x00")
    assert (tmp_path / "text").read_bytes() == "ä".encode()
    assert (tmp_path / "bytes").read_bytes() == b"\x00"


def test_the_error_of_the_removal_does_not_hide_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that cannot be written both fail."""
    removals = [None, OSError("the removal")]

    def remove(*_: object) -> None:
        if (error := removals.pop(0)) is not None:
            raise error

    def refuse(*_: object) -> None:
        raise OSError("the first")

    monkeypatch.setattr("xscale.core.files.atomic_write.remove_file", remove)
    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError, match="the first"):
        write_atomically(tmp_path / "file", b"new")
    assert removals == []


DISKS = {
    "a full disk": (errno.ENOSPC, True),
    "a quota": (errno.EDQUOT, True),
    "a limit on the size of files": (errno.EFBIG, True),
    "a read-only disk": (errno.EROFS, True),
    "a folder of somebody else": (errno.EACCES, True),
    "an immutable folder": (errno.EPERM, True),
    "a broken disk": (errno.EIO, False),
    "a stale handle of NFS": (errno.ESTALE, False),
}
"""Error of a write -> whether it is the user's to mend: a sentence that names the file, the reason and the way out."""


@pytest.mark.parametrize("case", DISKS)
def test_a_disk_that_takes_no_data_is_a_sentence(case: str, tmp_path: Path) -> None:
    number, is_the_users = DISKS[case]
    path = tmp_path / "train.bin"
    with pytest.raises(ConfigError if is_the_users else OSError) as raised, reporting_full_disk(path):
        raise OSError(number, os.strerror(number), str(path))
    assert os.strerror(number) in str(raised.value)
    if isinstance(raised.value, ConfigError):
        assert str(raised.value).startswith(f"{path}: cannot be written")
        assert "data.folder" in str(raised.value)


@pytest.mark.parametrize("case", DISKS)
def test_an_entry_that_a_disk_does_not_take_leaves_none_of_it(case: str, tmp_path: Path) -> None:
    """Half of the entry is written before the error; the next entry follows the last whole one."""
    path = tmp_path / "metrics.jsonl"
    file = AppendFile(path)
    file.write("whole\n")
    file._file = TornFile(file._file, DISKS[case][0])  # type: ignore[assignment]
    with pytest.raises(OSError, match=re.escape(os.strerror(DISKS[case][0]))):
        file.write("torn entry\n")
    file.write("next\n")
    file.close()
    assert path.read_text() == "whole\nnext\n"


class TornFile:
    """A file that takes four bytes and then fails."""

    def __init__(self, file: Any, number: int) -> None:
        self._file, self._number, self._written = file, number, False

    def write(self, data: memoryview) -> int:
        if self._written:
            raise OSError(self._number, os.strerror(self._number))
        self._written = True
        return int(self._file.write(data[:4]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "Free space, or"),
        (errno.EDQUOT, "Free space within the quota, or"),
        (errno.EFBIG, "Raise the limit on file sizes (ulimit -f), or"),
        (errno.EROFS, "Mount it for writing, or"),
        (errno.EPERM, "Let this user write there, or"),
    ],
)
def test_each_disk_is_told_what_ends_its_error(number: int, words: str, tmp_path: Path) -> None:
    error = OSError(number, os.strerror(number), str(tmp_path / "file"))
    with pytest.raises(ConfigError) as refused, reporting_full_disk(tmp_path / "file"):
        raise error
    assert words in str(refused.value)
    sentence = file_sentence(error)
    assert sentence is not None
    assert words in sentence or number == errno.EPERM


@pytest.mark.parametrize("has_inodes", [True, False])
def test_a_disk_without_inodes_is_told_so(has_inodes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that makes them as it needs them has none in all, and does not lack any."""
    counts = os.statvfs_result((4096, 4096, 10, 10, 10, 0 if has_inodes else 10, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: counts)
    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "none" / "file"))
    assert ("no inode is left). Delete files there, or" in str(file_sentence(error))) != has_inodes


class LibraryError(Exception):
    """Raised by a library where it cannot write."""


@pytest.mark.parametrize("error", [LibraryError("failed"), ConfigError("a", "b"), FaultError("c"), KeyError("d")])
@pytest.mark.parametrize("is_full", [False, True])
def test_a_folder_is_written_whole_or_not(
    error: Exception, is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library's error on a full disk is that of the disk."""

    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    if is_full:
        monkeypatch.setattr("xscale.core.files.atomic_write.write_atomically", refuse)
    own = isinstance(error, ConfigError | FaultError)

    def fail_half_way() -> None:
        with writing_folder(tmp_path / "out") as part:
            (part / "half").touch()
            raise error

    with pytest.raises(OSError if is_full and not own else type(error)) as raised:
        fail_half_way()
    if is_full and not own:
        assert raised.value.filename == str(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    with writing_folder(tmp_path / "out") as part:
        (part / "whole").touch()
        part.rename(tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "whole"]
