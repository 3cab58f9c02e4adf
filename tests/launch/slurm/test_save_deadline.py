"""One key, signal_seconds, says when the trainer gives up a save and when the agent and Slurm end it, in this order."""

import re
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
