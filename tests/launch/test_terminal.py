"""Text of logs, run folders and nodes that the launcher prints: a terminal shows it, and carries out nothing."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from xscale.core import say
from xscale_launch import files
from xscale_launch.local import report_failure
from xscale_launch.main import main
from xscale_launch.slurm import queue, watch
from xscale_launch.supervise import SupervisorResult, Worker

ESCAPE = "\x1b[2J\x1b]0;mine\x07\x9b31m\u202e"
"""Clears a screen, names a window, colours and turns text round."""
SHOWN = "\\x1b[2J\\x1b]0;mine\\x07\\x9b31m\\u202e"


def test_the_rule_is_that_of_xscale() -> None:
    """For each character; the launcher runs where xscale is not installed. The planes between hold none."""
    letters = "".join(map(chr, (*range(0x33000), *range(0xE0000, 0xE0400), sys.maxunicode)))
    are_equal = files.shown(letters) == say.shown(letters)
    assert are_equal


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one job, whose folder, log, sweep and job name a terminal would carry out."""
    folder = tmp_path / f"run{ESCAPE}"
    (folder / "launch/output").mkdir(parents=True)
    (folder / "launch/jobs.jsonl").write_text('{"id": "7", "script": "job.sbatch"}\n')
    (folder / "launch/output/7.log").write_text(f"one {ESCAPE}\n")
    (folder / "log.txt").write_text(f"one {ESCAPE}\n")
    return folder


JOB = {"JobId": "7", "JobState": "COMPLETED", "Reason": ESCAPE, "NodeList": ESCAPE}


@pytest.mark.parametrize("words", [["logs"], ["logs", "--follow"], ["status"], ["cancel"], ["resume"], ["unknown"]])
def test_no_verb_lets_a_run_folder_steer_a_terminal(
    words: list[str], run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(queue, "known_jobs", lambda ids: [JOB])
    status = main([words[0], str(run), *words[1:]])
    said = "".join(capsys.readouterr())
    assert said
    assert status in (0, 2)
    assert [letter for letter in said if letter not in "\n\t" and not letter.isprintable()] == []
    if words != ["unknown"]:
        assert SHOWN in said


def test_json_stays_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run\x1b\x7f\u202e"
    run.mkdir()
    (run / "config.yaml").touch()
    assert main(["status", str(run), "--json"]) == 0
    said = capsys.readouterr().out
    assert said.rstrip("\n").isprintable()
    assert json.loads(said)["run"] == str(run)


@pytest.mark.parametrize(
    "parts",
    [
        ["one\n", "two\n"],
        ["one\nt", "wo\n"],
        ["é".encode()[:1], "é".encode()[1:], "\n"],
        ["10%\r20%", "\r30%\r", "\ndone\r", "\nend\r\n"],
        [b"\xff\xfe\n", "a\n"],
        [f"{ESCAPE[:1]}", f"{ESCAPE[1:]}\n"],
    ],
)
def test_a_log_is_followed_wherever_it_was_cut(
    parts: list[str | bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text is shown as it would be whole, whatever of it is there at each look."""
    pieces = [part.encode() if isinstance(part, str) else part for part in parts]
    run = tmp_path / "run"
    (run / "launch/output").mkdir(parents=True)
    (run / "launch/jobs.jsonl").write_text('{"id": "7", "script": "job.sbatch"}\n')
    file = run / "launch/output/7.log"
    file.write_bytes(b"")
    left = list(pieces)

    def known(ids: list[str]) -> list[dict[str, str]]:
        with file.open("ab") as log:
            log.write(left.pop(0))
        return [{"JobId": "7", "JobState": "RUNNING" if left else "COMPLETED"}]

    monkeypatch.setattr(queue, "known_jobs", known)
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: None)
    options = argparse.Namespace(rank=None, member=None, lines=40, follow=True, run=run)
    watch.follow(run, options, watch.GrowingLog(file))
    said = capsys.readouterr().out
    whole = b"".join(pieces).decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    assert said == files.shown(whole)


def test_the_last_lines_of_a_worker_steer_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "rank-1.log"
    log.write_text(f"fault {ESCAPE}\n")
    workers = [Worker(0, ("a",), {}), Worker(1, ("a",), {}, log)]
    report_failure(SupervisorResult(1, f"rank 1 failed {ESCAPE}", 1, {1: 1}), workers)
    said = capsys.readouterr().err
    assert said.count(SHOWN) == 2
    assert "\x1b" not in said
