"""Streams that are closed and arguments of any bytes: a command does its work or says a sentence, never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLOSED = {
    "standard output": (">&-", 0),
    "standard output and error": (">&- 2>&-", 0),
    "all three": ("<&- >&- 2>&-", 0),
    "a reader that leaves at once": ("| true", 1),
    "an encoding without the letters": ("", 0),
}


def shell(command: str, **variables: str) -> "subprocess.CompletedProcess[bytes]":
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "launch"))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, timeout=600, check=False, cwd=ROOT
    )


@pytest.mark.parametrize("name", CLOSED)
def test_a_closed_stream_is_no_traceback(name: str, tmp_path: Path) -> None:
    redirection, status = CLOSED[name]
    trace = tmp_path / "stderr"
    encoding = {"PYTHONIOENCODING": "ascii"} if name.startswith("an encoding") else {}
    command = f"{sys.executable} -X utf8=0 -m xscale explain optimizer.lr {redirection or ''}"
    done = shell(f"{command}; exit ${{PIPESTATUS[0]}}", **encoding)
    trace.write_bytes(done.stderr)
    assert done.returncode == status, done.stderr
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_is_no_fault_with_and_without_a_buffer(unbuffered: str) -> None:
    command = f"{sys.executable} -m xscale explain optimizer.lr | true; exit ${{PIPESTATUS[0]}}"
    done = shell(command, PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_file_never_gets_the_number_of_a_closed_stream() -> None:
    program = (
        "import os, sys\nfrom xscale.cli.terminal.streams import open_closed_streams\nopen_closed_streams()\n"
        "number = os.open('/dev/null', os.O_RDONLY)\nprint('printed')\nsys.exit(0 if number > 2 else 1)"
    )
    done = shell(f'{sys.executable} -c "{program}" <&- >&- 2>&-')
    assert done.returncode == 0


@pytest.mark.parametrize(
    "words", [[b"train", b"quickstart", b"run.dir=r\xff"], [b"train", b"c\xff.yaml"], [b"report", b"\xff"]]
)
def test_an_argument_that_is_not_utf_8_is_a_sentence(words: list[bytes], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable.encode(), b"-m", b"xscale", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "launch"))},
        capture_output=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    assert b"this argument is not UTF-8 text" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
