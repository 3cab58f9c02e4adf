"""Whether a corpus is the one that was read: clocks that go wrong say nothing, its content does."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from xscale.data.corpus.corpus_state import CorpusState, state_of
from xscale.data.source.source import ByteRange

A, B = "one text\n", "two text\n"
LONG_AGO, FAR_AHEAD = 0, 4 * 10**9
"""Seconds since the epoch: 1970, and 2096."""


def dated(file: Path, seconds: int) -> None:
    os.utime(file, (seconds, seconds))


def edit(folder: Path, seconds: int) -> None:
    """Write another text of the same size, by a clock that says `seconds`."""
    (folder / "a").write_text(B)
    dated(folder / "a", seconds)


def exchange(folder: Path) -> None:
    (folder / "a").rename(folder / "c")
    (folder / "b").rename(folder / "a")
    (folder / "c").rename(folder / "b")


def restore(folder: Path) -> None:
    """Edit a file and write its first text again, as another program of version control does."""
    edit(folder, 1)
    (folder / "a").write_text(A)


def replace_by_copy(folder: Path) -> None:
    shutil.copy(folder / "a", folder / "c")
    (folder / "c").replace(folder / "a")


def link_to_copy(folder: Path) -> None:
    (folder / "a").rename(folder / "c")
    (folder / "a").symlink_to("c")


CASES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "nothing": (lambda folder: None, True),
    "touched in 1970": (lambda folder: dated(folder / "a", LONG_AGO), True),
    "touched in 2096": (lambda folder: dated(folder / "a", FAR_AHEAD), True),
    "replaced by a copy": (replace_by_copy, True),
    "moved and linked": (link_to_copy, True),
    "edited and restored": (restore, True),
    "edited by a clock that went back": (lambda folder: edit(folder, LONG_AGO), False),
    "edited by a clock that is ahead": (lambda folder: edit(folder, FAR_AHEAD), False),
    "two files exchanged": (exchange, False),
    "removed": (lambda folder: (folder / "a").unlink(), False),
    "a folder in its place": (lambda folder: ((folder / "a").unlink(), (folder / "a").mkdir()), False),
}
"""Changes to a corpus of two files of one size -> whether it is still the same."""


@pytest.mark.parametrize("case", CASES)
def test_the_content_says_whether_a_corpus_is_the_same(case: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(A)
    (tmp_path / "b").write_text(B)
    ranges = [ByteRange(str(tmp_path / name), 0, len(A), is_full_file=True) for name in "ab"]
    state = state_of(ranges)
    change, is_same = CASES[case]
    change(tmp_path)
    assert state.is_of(ranges) is is_same
    assert CorpusState().is_of(ranges), "data of earlier versions says nothing of its corpus"
