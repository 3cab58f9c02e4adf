"""A file that a job resumes: complete or absent, never with a line twice, and never of two requests."""

from contextlib import suppress
from pathlib import Path

import pytest

from xscale.core.errors import ConfigError
from xscale_tinybert.resumable_file import ResumableFile

REQUEST = {"--seed": 0, "--model": ["run", 3]}


def begin(path: Path, *lines: str) -> None:
    """Write the lines, a state after each, and be interrupted."""
    with suppress(KeyboardInterrupt), ResumableFile(path, REQUEST) as file:
        for number, line in enumerate(lines, 1):
            file.append(line, {"done": number})
        raise KeyboardInterrupt


def test_it_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResumableFile(path, REQUEST) as file:
        assert file.state is None
        file.append("ä\n", {"done": 1})
        assert not path.exists()
        file.finish()
    assert path.read_text(encoding="utf-8") == "ä\n"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="exists already"), ResumableFile(path, REQUEST):
        pass


def test_it_resumes_after_the_last_state(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    begin(path, "a\n", "b\n")
    with (tmp_path / "out.jsonl.partial").open("a") as stream:
        stream.write("half of a li")
    with ResumableFile(path, REQUEST) as file:
        assert file.state == {"done": 2}
        file.append("c\n", {"done": 3})
        file.finish()
    assert path.read_text() == "a\nb\nc\n"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interruption_before_the_first_state_leaves_nothing(tmp_path: Path) -> None:
    begin(tmp_path / "out.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_another_request_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    begin(path, "a\n")
    message = r"it was begun with another --seed. Give the same, or remove .*out.jsonl.partial and out.jsonl.progress"
    with pytest.raises(ConfigError, match=message), ResumableFile(path, {**REQUEST, "--seed": 1}):
        pass
    assert (tmp_path / "out.jsonl.partial").read_text() == "a\n"
    (tmp_path / "out.jsonl.partial").write_text("")
    with pytest.raises(ConfigError, match=r"it has less than 2 bytes. Remove "), ResumableFile(path, REQUEST):
        pass
    (tmp_path / "out.jsonl.progress.json").write_text("{")
    with pytest.raises(ConfigError, match=r"progress.json: the interrupted job cannot be resumed"):
        ResumableFile(path, REQUEST).__enter__()
    assert not (tmp_path / "out.jsonl.lock").exists()
