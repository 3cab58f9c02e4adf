"""How long the save of a signalled job may take: `signal_seconds` of the cluster sets the trainer's deadline too."""

import math
import re

from xscale_launch.status import LaunchError

MARGIN_SECONDS = 10
"""The agent ends the workers this long before Slurm ends the job, and a worker gives up its save this long before."""
LEAST_STOP_SECONDS = 30
DEADLINE = re.compile(
    r"""^(?P<before>checkpoint:[ ]*(?:\#.*)?\n  # the section, which may have a comment with its origin
    (?:[ ]+.*\n)*?                              # its other keys
    [ ]+deadline_seconds:[ ]+)(?P<value>[^ \n]+)(?P<space>[ ]*)(?:\#[ ](?P<origin>.*))?$""",
    re.MULTILINE | re.VERBOSE,
)
"""Finds checkpoint.deadline_seconds in a resolved config, where a comment gives the origin of each value."""


def stop_seconds(signal_seconds: int) -> int:
    """Return how long the agent waits for the workers after Slurm's signal."""
    return max(LEAST_STOP_SECONDS, signal_seconds - MARGIN_SECONDS)


def contradiction(deadline: float, origin: str, signal_seconds: int) -> str | None:
    """Say why a save may not take as long as `checkpoint.deadline_seconds`, from `origin`, says; None: it may."""
    longest = stop_seconds(signal_seconds) - MARGIN_SECONDS
    if deadline <= longest:
        return None
    margin = 2 * MARGIN_SECONDS
    return (
        f"checkpoint.deadline_seconds is {deadline:g} s ({origin}), but Slurm signals the job only {signal_seconds} s "
        f"before it ends it (signal_seconds), of which {margin} s are not the save's: leave "
        f"checkpoint.deadline_seconds out, which makes it {longest} s, or use --signal-seconds "
        f"{math.ceil(deadline) + margin}"
    )


def with_save_deadline(config: str, signal_seconds: int) -> str:
    """Return the resolved config with a deadline for the save that fits `signal_seconds`, unless it has its own.

    LaunchError where its own is longer: the workers would be ended in the middle of a save that they still wait for.
    """
    match = DEADLINE.search(config)
    if match is None:
        return config
    if match["origin"] != "default":
        if sentence := contradiction(float(match["value"]), str(match["origin"]), signal_seconds):
            raise LaunchError(sentence)
        return config
    longest = stop_seconds(signal_seconds) - MARGIN_SECONDS
    line = f"{match['before']}{float(longest)}{match['space']}# signal_seconds of the cluster"
    return config[: match.start()] + line + config[match.end() :]
