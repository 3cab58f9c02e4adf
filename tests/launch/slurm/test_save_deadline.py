"""One key, signal_seconds, says when the trainer gives up a save and when the agent and Slurm end it, in this order."""

import re
import sys
from pathlib import Path

import pytest

from xscale_launch.profile import Profile
from xscale_launch.slurm.save_deadline import stop_seconds, with_save_deadline
from xscale_launch.status import LaunchError

CONFIG = """checkpoint:  # default
  every_steps: 200                        # default
  deadline_seconds: {deadline}                 # {origin}
  failure_limit: 3                        # default
observe:
  deadline_seconds: 7                     # default
"""
SECONDS = {120: 100.0, 600: 580.0, 60: 40.0, 30: 20.0, 0: 20.0}
"""signal_seconds -> deadline of the save."""


def test_the_default_of_a_cluster_is_a_case() -> None:
    assert Profile().signal_seconds in SECONDS


@pytest.mark.parametrize("signal_seconds", SECONDS)
def test_the_save_ends_before_the_agent_ends_the_workers(signal_seconds: int) -> None:
    config = with_save_deadline(CONFIG.format(deadline=240.0, origin="default"), signal_seconds)
    (deadline,) = re.findall(r"deadline_seconds: (\S+) +# signal_seconds of the cluster", config)
    assert float(deadline) == SECONDS[signal_seconds] < stop_seconds(signal_seconds)
    assert config.endswith("observe:\n  deadline_seconds: 7                     # default\n")


def test_a_deadline_of_its_own_stays_or_is_refused() -> None:
    fitting = CONFIG.format(deadline=100, origin="a.yaml")
    assert with_save_deadline(fitting, 120) == fitting
    contradiction = r"is 240.5 s \(command line\), but Slurm signals the job only 120 s before.*--signal-seconds 261$"
    with pytest.raises(LaunchError, match=contradiction):
        with_save_deadline(CONFIG.format(deadline=240.5, origin="command line"), 120)


def test_a_config_without_the_section_is_left_as_it_is() -> None:
    assert with_save_deadline("train:\n  steps: 3\n", 120) == "train:\n  steps: 3\n"


def test_the_real_config_has_the_line() -> None:
    """The pattern is of the text that the trainer prints, with comments that give the origins."""
    from xscale.core.compose import compose, dump
    from xscale.core.config import decode, encode
    from xscale.recipe import Recipe

    composed = compose(Path(__file__).parents[3] / "configs/run/quickstart.yaml", [])
    text = dump(encode(decode(Recipe, composed.data)), composed.origin)
    assert "  deadline_seconds: 100.0   " in with_save_deadline(text, 120)


CLUSTERS = """default = "alps"
[alps]
signal_seconds = {signal_seconds}
"""
PLANNED = {
    "longer": (240, "checkpoint.deadline_seconds=240", "is 240 s (command line), but Slurm signals the job only 240 s"),
    "fitting": (600, "checkpoint.deadline_seconds=240", ""),
    "equal": (260, "checkpoint.deadline_seconds=240", ""),
    "default": (120, "train.steps=3", ""),
    "no clusters": (None, "checkpoint.deadline_seconds=240", ""),
}
"""signal_seconds of the default cluster, None without a file; override; what `xscale plan --check` says of them."""


@pytest.mark.parametrize("case", PLANNED)
def test_a_check_says_when_deadline_and_warning_contradict(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from xscale.cli.plan import plan

    signal_seconds, override, sentence = PLANNED[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    if signal_seconds is not None:
        (tmp_path / "clusters.toml").write_text(CLUSTERS.format(signal_seconds=signal_seconds))
    config = Path(__file__).parents[3] / "configs/run/quickstart.yaml"
    plan(config, [override], 1, check=True)
    said = [line for line in capfd.readouterr().err.splitlines() if "deadline_seconds" in line]
    assert len(said) == bool(sentence)
    assert all(sentence in line for line in said)
    assert all(line.endswith(f"--signal-seconds 260 ({tmp_path}/clusters.toml)") for line in said)


@pytest.mark.parametrize(("stop", "warns"), [("60", True), ("300", False), (None, False), ("x", False)])
def test_a_run_says_when_its_launcher_would_kill_it_in_a_save(
    stop: str | None, warns: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from xscale.cli.train import _warn_of_deadline
    from xscale_launch.supervise import STOP_VARIABLE

    monkeypatch.delenv(STOP_VARIABLE, raising=False)
    if stop is not None:
        monkeypatch.setenv(STOP_VARIABLE, stop)
    _warn_of_deadline(240.0)
    assert ("deadline_seconds is 240 s, but the launcher kills a rank 60 s" in capfd.readouterr().err) == warns


def test_a_worker_is_told_how_long_its_launcher_waits(capfd: pytest.CaptureFixture[str]) -> None:
    from xscale_launch.supervise import STOP_VARIABLE, Supervisor, Timeouts, Worker

    program = f"import os; print(os.environ['{STOP_VARIABLE}'])"
    worker = Worker(0, (sys.executable, "-c", program), {})
    assert Supervisor([worker], print, Timeouts(stop=45)).run().status == 0
    assert capfd.readouterr().out == "45\n"
