"""The bench of saves measures what it says and leaves nothing."""

from pathlib import Path

from xscale.checkpoint.bench import stall


def test_stall(tmp_path: Path) -> None:
    found = stall(tmp_path, megabytes=16, repeats=3)
    assert found.size == 16 << 20
    # A copy of 16 MiB beside writing, hashing and forcing it out; the bench itself is for the figure.
    assert found.ratio > 1.5, found
    assert not list(tmp_path.iterdir())
