"""SIGKILL before every change that a save makes on the disk: there is always a good checkpoint, found by itself."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.faults.dying import DIED, RAISED, Counting, fork, good, ranks, save_step, tensors, visible, wait
from xscale.checkpoint.load import load_tensors, restore
from xscale.checkpoint.search import find_newest


def changes(folder: Path, step: int, again: bool = False) -> list[str]:
    """Disk operations of a save of `step`, after two that were made before; with `again`, one of the same step is
    there."""
    for before in (1, 2, *([step] if again else [])):
        save_step(folder, before)
    disk = Counting()
    save_step(folder, step, disk)
    return disk.seen


def check(folder: Path, case: str, steps: tuple[int, ...]) -> int:
    """The step that is gone on from; after it the folder is clean and another save works."""
    held = {name: torch.zeros_like(one) for name, one in tensors(0).items()}
    restored = restore(folder, held)
    assert restored.loaded is not None, case
    step = restored.loaded.step
    assert step in steps, case
    assert good(held, step), case
    assert restored.loaded.state == {"step": step}, case
    assert not [reason for reason in restored.reasons if "set aside" in reason], (case, restored.reasons)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")], case
    save_step(folder, 9)
    assert find_newest(folder, hashes=True).path == folder / "step-00000009", case
    return step


@pytest.mark.parametrize("again", [pytest.param(False, marks=pytest.mark.long), True], ids=["new", "replacing"])
def test_killed_before_each_change(quick_path: Path, again: bool, count_cases: Callable[[int, str], None]) -> None:
    seen = changes(quick_path / "plain", 3, again)
    assert {one.split()[0] for one in seen} == {"mkdir", "open", "write", "sync", "close", "rename", "delete"}
    reached = []
    for at, what in enumerate(seen, 1):
        folder = quick_path / str(at)
        for before in (1, 2, *([3] if again else [])):
            save_step(folder, before)
        child = fork(partial(save_step, folder, 3, Counting(at)), quick_path / "log.txt")
        assert wait([child]) == [DIED], (at, what)
        reached.append(check(folder, f"killed before change {at}: {what}", (3,) if again else (2, 3)))
    if not again:
        # The save counts from the rename on, and not a moment before.
        renamed = seen.index("rename step-00000003")
        assert reached == [2] * (renamed + 1) + [3] * (len(seen) - renamed - 1)
    count_cases(len(seen), "killed before each change of a save on one process")


def changes_of(world: int, folder: Path) -> list[list[str]]:
    """Disk operations of each of `world` ranks in a save."""

    def work(rank: int) -> None:
        disk = Counting()
        save_step(folder, 3, disk)
        (folder / f"seen-{rank}").write_text("\n".join(disk.seen))

    folder.mkdir()
    assert ranks(world, work, folder) == [0] * world
    return [(folder / f"seen-{rank}").read_text().splitlines() for rank in range(world)]


@pytest.mark.long
def test_one_of_two_ranks_killed_before_each_change(quick_path: Path, count_cases: Callable[[int, str], None]) -> None:
    seen = changes_of(2, quick_path / "plain")
    cases = 0
    for killed in (0, 1):
        for at, what in enumerate(seen[killed], 1):
            folder = quick_path / f"{killed}-{at}"
            folder.mkdir()
            save_step(folder / "checkpoints", 2)

            def work(rank: int, killed: int = killed, at: int = at, folder: Path = folder) -> None:
                save_step(folder / "checkpoints", 3, Counting(at if rank == killed else None))

            statuses = ranks(2, work, folder)
            assert statuses[killed] == DIED, (killed, at, what)
            # Past its last message to the rank that dies, the other may have done all there was to do.
            assert statuses[1 - killed] in (RAISED, 0), (killed, at, what, statuses)
            check(folder / "checkpoints", f"rank {killed} killed before change {at}: {what}", (2, 3))
            cases += 1
    count_cases(cases, "one of two ranks killed before each of its changes")


def test_a_kill_is_seen_at_all(quick_path: Path) -> None:
    """The negative control: were the rename first, a kill would leave what looks like a checkpoint and is none."""
    path = save_step(quick_path, 2)
    save_step(quick_path, 1)
    (path / "manifest.sha256").unlink()
    with pytest.raises(AssertionError):
        check(quick_path, "not sealed", (1, 2))
    assert visible(quick_path) == [1]
    assert good(load_tensors(quick_path / "step-00000001"), 1)
