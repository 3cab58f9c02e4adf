"""A file that a command writes, at a path where none can be: one sentence, status 2, and nothing half-made."""

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bounds import listing
from tests.train.tiny import recipe, run
from xscale.cli.file_errors import OF_THE_DISK, PLACES, file_sentence
from xscale.cli.main import main
from xscale.core.errors import EXIT_FAULT, EXIT_USER


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    assert run(recipe(folder, train={"steps": 1, "eval_every": 0}, observe={"report": True})) == 0
    return folder / "run"


COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "report": lambda run, out: ["report", str(run), "--output", str(out)],
    "a report of two": lambda run, out: ["report", str(run), str(run), "--output", str(out)],
    "consolidate": lambda run, out: ["checkpoint", "consolidate", str(run), str(out)],
    "export": lambda run, out: ["checkpoint", "export", str(run), str(out), "--to", "deepspeed-universal"],
    "init": lambda run, out: ["init", "quickstart", "--out", str(out)],
    "plot": lambda run, out: ["plot", "pattern", "fixed", "--tokens", "256", "--out", str(out)],
}


def a_folder(top: Path) -> Path:
    (top / "there").mkdir()
    (top / "there" / "notes.txt").write_text("mine")
    return top / "there"


def below_a_file(top: Path) -> Path:
    (top / "file").write_text("mine")
    return top / "file" / "out.png"


def a_loop(top: Path) -> Path:
    (top / "loop").symlink_to("loop")
    return top / "loop" / "out.png"


PATHS: dict[str, Callable[[Path], Path]] = {
    "a folder": a_folder,
    "below a file": below_a_file,
    "in a loop of links": a_loop,
    "a name of 300 characters": lambda top: top / ("x" * 300 + ".png"),
    "in a folder of the kernel": lambda top: Path("/proc/xscale/out.png"),
    "a path of 5,000 characters": lambda top: Path("/".join([str(top), *["x" * 100] * 50])),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_no_file_can_have_is_a_sentence(
    command: str,
    path: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = PATHS[path](tmp_path)
    before = listing(tmp_path)
    monkeypatch.setattr(sys, "argv", ["xscale", *COMMANDS[command](trained, out)])
    with pytest.raises(SystemExit) as left:
        main()
    lines = capsys.readouterr().err.splitlines()
    # A checkpoint whose folder is not there is a fault of the disk, as when it was unmounted.
    assert left.value.code in (EXIT_USER, EXIT_FAULT if command == "consolidate" else EXIT_USER), lines
    assert len(lines) == 1, lines
    assert "Errno" not in lines[0]
    assert listing(tmp_path) == before


def test_a_folder_in_the_place_of_the_report_is_a_sentence(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink()
    (tmp_path / "run" / "report.html").mkdir()
    monkeypatch.setattr(sys, "argv", ["xscale", "report", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as left:
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == EXIT_USER
    assert line.startswith(f"xscale: {tmp_path / 'run' / 'report.html'}: cannot be read or written (Is a directory).")
    assert not list((tmp_path / "run").glob("*.part"))


@pytest.mark.parametrize("number", sorted(PLACES), ids=errno.errorcode.get)
def test_an_error_of_the_file_system_is_a_sentence(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever in a command it is raised, with the file that it names; nothing in a name steers a terminal."""

    def fails() -> None:
        raise OSError(number, os.strerror(number), "/a/b\x1b[2J\nc")

    monkeypatch.setattr(sys, "argv", ["xscale"])
    with pytest.raises(SystemExit) as left:
        main(fails)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"xscale: /a/b\\x1b[2J c: cannot be read or written ({os.strerror(number)}). ")
    assert left.value.code == (EXIT_FAULT if number in OF_THE_DISK else EXIT_USER)


def test_of_a_rename_the_file_that_the_user_knows_is_named() -> None:
    error = OSError(errno.EISDIR, "Is a directory", "/a/b.part", None, "/a/b")
    assert str(file_sentence(error)).startswith("/a/b: ")


@pytest.mark.parametrize("error", [OSError("odd"), OSError(errno.EBADF, "Bad file descriptor"), BrokenPipeError()])
def test_a_fault_of_ours_keeps_its_traceback(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["xscale"])
    with pytest.raises(OSError) as raised:  # noqa: PT011
        main(fails)
    assert raised.value is error
