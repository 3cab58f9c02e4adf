"""Atomic writes: the old content or the new, and no temporary file is left."""

from pathlib import Path

import pytest

from xscale.core.files.atomic_write import TEMPORARY_SUFFIX, atomic_write, write_atomically


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
