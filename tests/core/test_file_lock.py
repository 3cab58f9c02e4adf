"""File locks: one process has it, the others are told which; it ends with the process."""

import fcntl
import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xscale.core.files.file_lock import FileLock, LockedError

HOLDER = """
import sys, time
from pathlib import Path
from xscale.core.files.file_lock import FileLock
lock = FileLock(Path(sys.argv[1]))
lock.acquire()
print("locked", flush=True)
time.sleep(600)
"""


def holder(path: Path) -> subprocess.Popen[str]:
    """Another process that has the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def test_another_process_is_refused_with_the_holders_name_until_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lock"
    process = holder(path)
    try:
        with pytest.raises(LockedError, match=rf"process {process.pid} on \S+, since \d{{4}}-"):
            FileLock(path).acquire()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    lock = FileLock(path)
    lock.acquire(timeout_seconds=60)
    assert str(os.getpid()) in path.read_text(encoding="utf-8")
    lock.release()
    assert path.read_text(encoding="utf-8") == ""


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    process = holder(tmp_path / "lock")
    with pytest.raises(LockedError):
        FileLock(tmp_path / "lock").acquire(timeout_seconds=0.3)
    process.kill()
    process.wait()
    FileLock(tmp_path / "lock").acquire(timeout_seconds=60)


def test_a_file_that_says_nothing_of_its_holder_is_no_fault(tmp_path: Path) -> None:
    process = holder(tmp_path / "lock")
    try:
        # A record lock is advisory: the text can be damaged while the lock stands.
        (tmp_path / "lock").write_text("{not JSON", encoding="utf-8")
        with pytest.raises(LockedError, match=r"^$"):
            FileLock(tmp_path / "lock").acquire()
    finally:
        process.kill()
        process.wait()


def test_a_lock_on_a_removed_file_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the opening and the locking of the file its holder removes it."""
    path, lockf = tmp_path / "new" / "lock", fcntl.lockf
    removed: list[Path] = []

    def remove_first(*arguments: Any) -> None:
        if not removed:
            removed.append(path)
            shutil.rmtree(path.parent)
        lockf(*arguments)

    monkeypatch.setattr(fcntl, "lockf", remove_first)
    lock = FileLock(path)
    lock.acquire()
    assert removed
    assert lock.is_in_place()
    assert path.exists()
    lock.remove()
    assert not path.exists()


def test_a_lock_deleted_from_its_folder_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    with FileLock(path) as lock:
        lock.acquire()
        path.unlink()
        assert lock.is_in_place()
        # Not read here: a process that closes a file gives up its record locks on it.
        command = [sys.executable, "-c", HOLDER, str(path)]
        other = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert f"LockedError: process {os.getpid()} on " in other.stderr
        path.unlink()
        path.write_text("", encoding="utf-8")
        assert lock.is_in_place(), "a file that nobody has locked is taken"


def test_a_lock_is_lost_with_its_folder_and_to_another_process(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    lock = FileLock(path)
    lock.acquire()
    path.unlink()
    process = holder(path)
    try:
        assert not lock.is_in_place()
    finally:
        process.kill()
        process.wait()
    assert lock.is_in_place(), "the other one has ended"
    shutil.rmtree(path.parent)
    assert not lock.is_in_place()
    path.parent.mkdir()
    assert not lock.is_in_place(), "another folder"
    assert list(path.parent.iterdir()) == []


def test_a_lock_that_cannot_be_made_again_now_is_an_error_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run" / "lock"
    lock = FileLock(path)
    lock.acquire()
    path.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(
            "xscale.core.files.file_lock.open_run_file", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
        )
        with pytest.raises(OSError, match="full"):
            lock.is_in_place()
    assert lock.is_in_place()
    assert path.exists()


def test_a_lock_holds_without_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk has room for a name, and for no content."""

    class Full(io.FileIO):
        def write(self, _: Any) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("xscale.core.files.run_files.FileIO", Full)
    lock = FileLock(tmp_path / "lock")
    lock.acquire()
    assert lock.is_in_place()
