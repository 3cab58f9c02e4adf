"""A run folder from anybody, with something else where the launcher writes: a sentence, and nothing outside changes."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults.planted_entries import dangling_link, fifo, folder, link_to_file, link_to_folder
from xscale_launch import attempts, local, snapshot, supervise
from xscale_launch.files import make_run_folder, open_append, open_run_file, read_run_file
from xscale_launch.nodes.preflight import write_speed
from xscale_launch.slurm import submit, watch
from xscale_launch.status import LaunchError

KINDS = (link_to_file, link_to_folder, dangling_link, fifo, folder)
ATTEMPT = "launch/attempts/7.0"


def members(run: Path) -> None:
    submit.write_run_file(run / "launch" / "members.txt", "a\n")


def started_locally(run: Path) -> None:
    options = SimpleNamespace(
        config=run / "c.yaml",
        overrides=[f"run.dir={run}"],
        processes=2,
        port=None,
        xscale="true",
        dry_run=False,
        grace_seconds=1.0,
    )
    (run / "c.yaml").write_text("{}")
    local.run(options)  # type: ignore[arg-type]


WRITERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a task that ended": (f"{ATTEMPT}/ended-0", lambda run: attempts.record_task(run / ATTEMPT, 0, 0, "")),
    "a worker that was stopped": (f"{ATTEMPT}/go_on", lambda run: attempts.record_task(run / ATTEMPT, None, 75, "")),
    "a refused config": (f"{ATTEMPT}/said", lambda run: attempts.report_config_refused(run / ATTEMPT, True, True)),
    "the folder of an attempt": (ATTEMPT, lambda run: attempts.record_task(run / ATTEMPT, 0, 0, "")),
    "the config of a job": ("launch/config.yaml", lambda run: snapshot.config(run, "a: 1\n")),
    "the folder of a config": ("launch", lambda run: snapshot.config(run, "a: 1\n")),
    "the folder of the code": ("launch", lambda run: snapshot.code(run, [])),
    "the members of a sweep": ("launch/members.txt", members),
    "the folder of a submission": ("launch", submit.prepare),
    "the folder of Slurm's output": ("launch/output", submit.prepare),
    "the folder of the attempts": ("launch/attempts", submit.prepare),
    "the jobs of a run": ("launch/jobs.jsonl", lambda run: open_append(run / "launch" / "jobs.jsonl")),
    "a rank's log": ("logs/rank-1.log", lambda run: open_append(run / "logs" / "rank-1.log")),
    "the folder of the logs": ("logs", lambda run: open_append(run / "logs" / "rank-1.log")),
    "the folder of the logs of local ranks": ("logs", started_locally),
}
"""Entries that the launcher writes, each with the call."""


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    other = tmp_path / "outside"
    (other / "folder" / "code").mkdir(parents=True)
    for path in (other / "file", other / "folder" / "over", other / "folder" / "rank-1.log"):
        path.write_text("yours\n")
    return other


@pytest.fixture(autouse=True)
def limit_seconds() -> Iterator[None]:
    """End a test that waits for the other end of a FIFO."""

    def hangs(*_: Any) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def contents(top: Path) -> dict[str, Any]:
    return {str(path): path.read_bytes() if path.is_file() else path.lstat().st_mode for path in top.rglob("*")}


CASES = [
    pytest.param(what, kind, id=f"{what}-{kind.__name__}")
    for what in WRITERS
    for kind in KINDS
    # A folder is what belongs there.
    if kind is not folder or not what.startswith("the folder")
]


@pytest.mark.parametrize(("what", "kind"), CASES)
def test_the_launcher_writes_nothing_elsewhere(
    what: str, kind: Callable[[Path, Path], None], tmp_path: Path, outside: Path
) -> None:
    entry, write = WRITERS[what]
    run = tmp_path / "run"
    (run / entry).parent.mkdir(parents=True)
    kind(run / entry, outside)
    before = contents(outside)
    with pytest.raises(LaunchError, match=r"not a (regular )?(file|folder)"):
        write(run)
    assert contents(outside) == before


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_failure_is_recorded_as_the_first_one_alone(
    kind: Callable[[Path, Path], None], tmp_path: Path, outside: Path
) -> None:
    """An entry in its place is taken for that of another task."""
    (tmp_path / ATTEMPT).mkdir(parents=True)
    kind(tmp_path / ATTEMPT / "fault", outside)
    before = contents(outside)
    assert attempts.record_task(tmp_path / ATTEMPT, 0, 3, "it failed") == 3
    assert contents(outside) == before


@pytest.mark.parametrize("kind", [link_to_file, dangling_link, fifo], ids=lambda kind: kind.__name__)
def test_a_probe_of_the_disk_replaces_what_stands_there(
    kind: Callable[[Path, Path], None], tmp_path: Path, outside: Path
) -> None:
    kind(tmp_path / ".write-probe-n1", outside)
    before = contents(outside)
    assert write_speed(tmp_path, "n1") > 0
    assert contents(outside) == before
    assert not os.path.lexists(tmp_path / ".write-probe-n1")


@pytest.mark.parametrize("mode", ["rb", "wb", "ab"])
@pytest.mark.parametrize("kind", [*KINDS], ids=lambda kind: kind.__name__)
def test_a_file_of_a_run_is_a_regular_one(
    kind: Callable[[Path, Path], None], mode: str, tmp_path: Path, outside: Path
) -> None:
    kind(tmp_path / "entry", outside)
    before = contents(outside)
    with pytest.raises(LaunchError, match=r"not a (regular )?file"):
        open_run_file(tmp_path / "entry", mode)
    assert contents(outside) == before


def test_files_and_folders_of_a_run_are_made(tmp_path: Path) -> None:
    """The control."""
    folder = make_run_folder(tmp_path / "new" / "run", "launch", "attempts")
    assert make_run_folder(tmp_path / "new" / "run", "launch", "attempts") == folder
    attempts.record_task(folder / "7.0", 0, 0, "")
    attempts.record_task(folder / "7.0", 0, 0, "")
    assert read_run_file(folder / "7.0" / "ended-0") == b"0\n"
    assert attempts.read_attempt(folder / "7.0", 1, 0) == (0, "")
    with open_run_file(folder / "new", "xb") as file:
        file.write(b"a")
    with pytest.raises(FileExistsError):
        open_run_file(folder / "new", "xb")
    assert supervise.last_lines(folder / "new") == "a"
    (folder / "link").symlink_to(folder / "new")
    assert "not a file" in supervise.last_lines(folder / "link")


def test_the_log_of_a_run_that_is_a_link_is_not_shown(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "log.txt").symlink_to(outside / "file")
    with pytest.raises(LaunchError, match="not a file"):
        watch.GrowingLog(tmp_path / "log.txt").read()
