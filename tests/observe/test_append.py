"""A text is in the file when `write` returns, or the write raises."""

import pytest

from xscale.core.files.atomic_write import AppendFile


def test_it_appends_below_what_was_there(tmp_path):
    path = tmp_path / "new" / "a.txt"
    for text in ("one\n", "zwei é\n"):
        file = AppendFile(path)
        file.write(text)
        assert path.read_text(encoding="utf-8").endswith(text)
        file.close()
        file.close()
    assert path.read_text(encoding="utf-8") == "one\nzwei é\n"


def test_a_full_disk_is_noticed_at_the_write(tmp_path, limited_files):
    file = AppendFile(tmp_path / "full")
    with limited_files(0), pytest.raises(OSError, match="too large"):
        file.write("a")


@pytest.mark.parametrize("room", [0, 1, 3, 4, 7])
def test_nothing_stays_of_an_entry_that_did_not_fit(tmp_path, limited_files, room):
    """The system takes what fits of an entry, and refuses the rest."""
    path = tmp_path / "a.txt"
    file = AppendFile(path)
    file.write("one\n")
    with limited_files(4 + room), pytest.raises(OSError, match="too large"):
        file.write("another\n")
    assert path.read_text() == "one\n"
    file.write("two\n")
    assert path.read_text() == "one\ntwo\n"


def test_what_could_not_be_cut_off_is_cut_off_first(tmp_path, limited_files, monkeypatch):
    """The disk refuses to shorten the file too, as a read-only one does."""
    path = tmp_path / "a.txt"
    file = AppendFile(path)
    file.write("one\n")
    with monkeypatch.context() as patch, limited_files(6):
        patch.setattr(AppendFile, "_mend", lambda *_: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
        with pytest.raises(OSError, match="too large"):
            file.write("another\n")
    assert path.read_text() == "one\nan"
    file.write("two\n")
    assert path.read_text() == "one\ntwo\n"


def test_a_file_that_somebody_emptied_is_not_grown_by_zeros(tmp_path, limited_files):
    path = tmp_path / "a.txt"
    file = AppendFile(path)
    file.write("one\n")
    with limited_files(5), pytest.raises(OSError, match="too large"):
        file.write("another\n")
    path.write_text("")
    file.write("two\n")
    assert path.read_text() == "two\n"
