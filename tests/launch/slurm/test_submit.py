"""Files that a submission writes, with an sbatch that only numbers its jobs; a real one is in tests/slurm."""

import os
import sys
from pathlib import Path

import pytest

from xscale_launch.main import main
from xscale_launch.slurm import submit

TRAINER = f"{sys.executable} {Path(__file__).parents[1] / 'fake_train.py'}"
PROFILE = """
[here]
time = "1:00:00"
environment = {HF_TOKEN = "t0ken"}
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config, a profile with a secret, and a cluster that accepts every job."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (programs / "sbatch").chmod(0o755)
    (tmp_path / "run.yaml").write_text(f"run.dir: {tmp_path / 'run'}\n")
    (tmp_path / "clusters.toml").write_text(PROFILE)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(submit, "check_cluster", lambda job, dry_run: ([], False))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(*words: str) -> int:
    return main(["slurm", "run.yaml", "--xscale", TRAINER, "--cluster", "here", *words])


def test_the_script_that_is_submitted_is_for_this_user_alone(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has the values of a profile's variables, which the printed script of a dry run has not."""
    assert launch("--dry-run") == 0
    assert "t0ken" not in capsys.readouterr().out
    umask = os.umask(0)
    try:
        assert launch() == 0
    finally:
        os.umask(umask)
    assert "submitted job 7" in capsys.readouterr().out
    script = site / "run" / "launch" / "job.sbatch"
    assert "export HF_TOKEN=t0ken" in script.read_text()
    assert script.stat().st_mode & 0o777 == 0o600
    others = [path for path in (site / "run").rglob("*") if path.is_file() and path != script]
    assert others
    assert not [path for path in others if "code" not in path.parts and b"t0ken" in path.read_bytes()]


def test_members_of_a_file_are_an_array(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run folder for each, with the names of the file."""
    (site / "members.json").write_text('{"small": ["train.steps=2"], "large": ["train.steps=3"]}')
    assert launch("--members", "members.json", f"run.dir={site / 'ladder'}") == 0
    assert "an array of 2 runs" in capsys.readouterr().out
    listed = (site / "ladder" / "launch" / "members.txt").read_text().splitlines()
    assert listed == [str(site / "ladder" / name) for name in ("small", "large")]
    assert "--array=0-1" in (site / "ladder" / "launch" / "job.sbatch").read_text()


@pytest.mark.parametrize("words", [("--sweep", "train.steps=1,2"), ("--chain", "2")])
def test_members_are_not_combined(words: tuple[str, ...], site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("--members", "members.json", *words) == 2
    assert "cannot be combined with" in capsys.readouterr().err


TOO_LARGE = ("fake.gigabytes=300", "--gpu-memory-gigabytes", "80")


def test_what_does_not_fit_is_not_submitted_unless_no_plan_is_wanted(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(*TOO_LARGE) == 2
    said = capsys.readouterr().err
    assert "rank 0 needs 300.00 GB" in said
    assert "Take more devices. Submit it without a plan: --no-plan." in said
    assert not (site / "run" / "launch").exists()
    assert launch(*TOO_LARGE, "--no-plan") == 0
    assert "submitted job 7" in capsys.readouterr().out
