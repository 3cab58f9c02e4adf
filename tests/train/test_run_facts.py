"""Facts of a run in its record: what started it, on what machine, from what source and data."""

import platform
import subprocess
import time
from pathlib import Path

import pytest

from tests.train.tiny import ROOT, recipe, run
from xscale.core.errors import EXIT_DONE
from xscale.observe import events
from xscale.observe.record import read_record
from xscale.run.run_facts import command_line


def test_a_run_records_what_started_it_and_what_it_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/lib/xscale/__main__.py", "train", "my run.yaml", "train.steps=4"])
    asked = recipe(tmp_path, train={"steps": 4, "eval_every": 0}, observe={"report": True})
    before = time.time()
    assert run(asked) == EXIT_DONE
    record = read_record(tmp_path / "run")
    facts, end = record.facts, record.end
    assert end is not None
    assert facts.command == "xscale train 'my run.yaml' train.steps=4"
    assert facts.host == platform.node()
    assert facts.started is not None
    assert end.ended is not None
    assert before <= facts.started <= end.ended <= time.time()
    assert end.peak_memory is not None
    assert end.peak_memory > 2**26, "a process with torch has more"
    assert "documents" in facts.data["training data"]
    samples = float(facts.data["epochs"].split("of ")[1].split(" ")[0].replace(",", ""))
    assert float(facts.data["epochs"].split(",")[0]) == pytest.approx(4 * asked.train.batch_size / samples, rel=0.01)


def test_the_commit_is_that_of_the_source_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    if head.returncode == 0:
        assert head.stdout.startswith(events.source_commit().removesuffix("-dirty"))
        assert len(events.source_commit()) >= 7
    # Installed inside another project's repository: not that one's commit.
    monkeypatch.setattr(events, "__file__", str(tmp_path / "site-packages" / "xscale" / "observe" / "events.py"))
    assert events.source_commit() == ""


def test_the_command_of_a_script_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/home/me/train_all.py", "--fast"])
    assert command_line() == "train_all.py --fast"
