"""Disks that fill up, refuse or vanish, and a power cut: the save ends with a sentence, the last checkpoint stays."""

import errno
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.faults.dying import fork, good, ranks, save_step, tensors, visible, wait
from xscale.checkpoint.disk import Disk
from xscale.checkpoint.errors import CheckpointError
from xscale.checkpoint.load import load_tensors, restore
from xscale.checkpoint.save import save
from xscale.checkpoint.search import find_newest


def expect(folder: Path, words: str, disk: Disk | None = None) -> None:
    with pytest.raises(CheckpointError) as failure:
        save_step(folder, 2, disk)
    text = str(failure.value)
    assert words in text, text
    assert text.startswith(f"{folder}/step-00000002: "), text
    assert text.endswith("."), text


def in_child(work: Callable[[], None], folder: Path) -> None:
    log = folder / "log.txt"
    assert wait([fork(work, log)]) == [0], log.read_text() if log.exists() else ""


@pytest.mark.parametrize("size", [1000, 100_000, 2_000_000])
def test_files_may_not_grow(tmp_path: Path, size: int, count_cases: Callable[[int, str], None]) -> None:
    """A limit on file sizes stands for a quota: the system takes a part and refuses the rest."""
    folder = tmp_path / "run"
    save_step(folder, 1)

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        expect(folder, "File too large. Raise the limit on file sizes")

    in_child(limited, tmp_path)
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    count_cases(1, "a limit on file sizes")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a small file system needs the right to mount: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Unforeseen(Disk):
    """Space that is free when it is asked for and gone when it is wanted."""

    def require(self, folder: Path, size: int) -> None:
        assert size > sum(one.nbytes for one in tensors(1).values())


def test_the_disk_is_full(small: Path, count_cases: Callable[[int, str], None]) -> None:
    folder = small / "run"
    save_step(folder, 1)
    (small / "other").write_bytes(bytes(4 << 20))
    expect(folder, "needed, ")
    expect(folder, "No space left on device", Unforeseen())
    assert visible(folder) == [1]
    assert find_newest(folder, hashes=True).path == folder / "step-00000001"
    (small / "other").unlink()
    save_step(folder, 2)
    assert good(load_tensors(folder / "step-00000002"), 2)
    count_cases(2, "the disk is full: seen before, and met in the middle")


class Narrow(Disk):
    """A disk with room for the files of so many checkpoints in `checkpoints`."""

    def __init__(self, checkpoints: Path, room: int = 3) -> None:
        super().__init__()
        self.checkpoints, self.room = checkpoints, room

    def require(self, folder: Path, size: int) -> None:
        if len(visible(self.checkpoints)) >= self.room:
            raise OSError(errno.ENOSPC, "no room", str(folder))


@pytest.mark.parametrize(("keep", "left"), [(4, None), (3, [2, 3, 4]), (2, [3, 4]), (None, None)])
def test_old_checkpoints_make_room(tmp_path: Path, keep: int | None, left: list[int] | None) -> None:
    """Retention deletes before the save instead of after it, if two good checkpoints stay; else prune is named."""
    folder = tmp_path / "run"
    for step in (1, 2, 3):
        save(folder, step, tensors(step), {}, {})
    if left is not None:
        save(folder, 4, tensors(4), {}, {}, keep_last=keep, disk=Narrow(folder))
    else:
        (folder / "step-00000001" / "config.json").unlink()
        with pytest.raises(
            CheckpointError, match=rf"no room\. Free space, keep .*`xscale checkpoint prune {folder} --keep"
        ):
            save(folder, 4, tensors(4), {}, {}, keep_last=keep, disk=Narrow(folder))
    assert visible(folder) == (left or [1, 2, 3])


@pytest.mark.parametrize("keep", [1, 2])
def test_two_good_checkpoints_stay_however_full_the_disk_is(tmp_path: Path, keep: int) -> None:
    """The next one is not written yet, and one of the two may turn out to be damaged."""
    folder = tmp_path / "run"
    for step in (1, 2, 3):
        save(folder, step, tensors(step), {}, {})
    with pytest.raises(CheckpointError, match="no room"):
        save(folder, 4, tensors(4), {}, {}, keep_last=keep, disk=Narrow(folder, room=1))
    assert visible(folder) == [2, 3]


def full_on_all(folder: Path) -> Callable[[int], None]:
    def work(rank: int) -> None:
        expect(folder, "No space left on device", Unforeseen())
        dist.barrier()

    return work


def test_the_disk_is_full_for_two_ranks(small: Path, tmp_path: Path, count_cases: Callable[[int, str], None]) -> None:
    folder = small / "run"
    save_step(folder, 1)
    (small / "other").write_bytes(bytes(4 << 20))
    assert ranks(2, full_on_all(folder), tmp_path) == [0, 0], (tmp_path / "log.txt").read_text()
    assert visible(folder) == [1]
    count_cases(1, "the disk is full for two ranks")


def test_the_disk_is_read_only(small: Path, count_cases: Callable[[int, str], None]) -> None:
    save_step(small, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    expect(small, "Read-only file system. Mount it for writing")
    held = {name: torch.zeros_like(one) for name, one in tensors(0).items()}
    restored = restore(small, held)
    assert restored.loaded is not None
    assert restored.loaded.step == 1
    count_cases(1, "the disk is read-only")


class Vanishing(Disk):
    """The folder is gone, or is something else, at the `at`-th change."""

    def __init__(self, folder: Path, at: int) -> None:
        super().__init__()
        self.folder, self.at = folder, at
        self.count = 0

    def touch(self, what: str, path: Path) -> None:
        self.count += 1
        if self.count == self.at:
            shutil.rmtree(self.folder)


def test_the_folder_vanishes(quick_path: Path, count_cases: Callable[[int, str], None]) -> None:
    folder = quick_path / "run"
    plain = Vanishing(folder, -1)
    save_step(folder, 2, plain)
    for at in range(1, plain.count + 1):
        save_step(folder, 1)
        disk = Vanishing(folder, at)
        if at <= 2:
            # Gone before the folder was made.
            save_step(folder, 2, disk)
        else:
            with pytest.raises(CheckpointError, match=r"No such file or directory\. Put the folder back"):
                save_step(folder, 2, disk)
        shutil.rmtree(folder, ignore_errors=True)
    count_cases(plain.count, "the folder vanishes before each change")


def test_a_file_stands_where_the_folder_should(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.write_text("")
    expect(folder, "the checkpoint cannot be written: ")


class Volatile(Disk):
    """Remembers what was forced out, to say what a power cut may leave."""

    def __init__(self, forgetful: bool = False) -> None:
        super().__init__()
        self.loose: set[Path] = set()
        self.forgetful = forgetful
        self.cuts: list[tuple[str, list[Path]]] = []

    def touch(self, what: str, path: Path) -> None:
        if what == "write":
            self.loose.add(path)
        if what == "close" and not self.forgetful:
            self.loose.discard(path)
        if what == "rename":
            # The rename may be on the disk at once, and nothing that is loose ever.
            self.cuts.append((path.name, sorted(self.loose)))


@pytest.mark.parametrize("forgetful", [False, True], ids=["forced", "not forced"])
def test_a_power_cut(tmp_path: Path, forgetful: bool, count_cases: Callable[[int, str], None]) -> None:
    """A renamed file has been forced out before; the second case is the control, in which it has not."""
    save_step(tmp_path, 1)
    disk = Volatile(forgetful)
    save_step(tmp_path, 2, disk)
    (cut,) = [loose for name, loose in disk.cuts if name == "step-00000002"]
    for path in cut:
        lost = tmp_path / "step-00000002" / path.relative_to(tmp_path / ".step-00000002.writing")
        os.truncate(lost, 0)
    held = {name: torch.zeros_like(one) for name, one in tensors(0).items()}
    restored = restore(tmp_path, held)
    assert restored.loaded is not None
    assert restored.loaded.step == (1 if forgetful else 2)
    assert good(held, restored.loaded.step)
    count_cases(1, "power cut after the rename, with and without forcing out")
