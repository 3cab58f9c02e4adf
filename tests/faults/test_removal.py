"""An entry in the place of a folder is removed without opening it, and the file that it names stays."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.planted_entries import KINDS
from xscale.core.files.file_safety import remove_folder
from xscale_launch import files


@pytest.mark.parametrize("remove", [remove_folder, files.remove_folder], ids=["xscale", "launcher"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_removal_waits_for_nothing(
    kind: Callable[[Path, Path], None], remove: Callable[[Path, str], None], tmp_path: Path, limit_seconds: None
) -> None:
    """Whatever stands where a folder is removed, it is gone, and what it names is there."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    kind(tmp_path / "entry", tmp_path)
    remove(tmp_path, "entry")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    remove(tmp_path, "entry")


def test_a_removal_of_a_link_leaves_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "other")
    remove_folder(tmp_path, "link")
    assert (tmp_path / "other" / "file").exists()
    assert not (tmp_path / "link").exists()
