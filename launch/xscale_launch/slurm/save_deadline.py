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


def with_save_deadline(config: str, signal_seconds: int) -> str:
    """Return the resolved config with a deadline for the save that fits `signal_seconds`, unless it has its own.

    LaunchError where its own is longer: the workers would be ended in the middle of a save that they still wait for.
    """
    match = DEADLINE.search(config)
    if match is None:
        return config
    longest = stop_seconds(signal_seconds) - MARGIN_SECONDS
    if match["origin"] != "default":
        if float(match["value"]) > longest:
            margin = 2 * MARGIN_SECONDS
            needed = math.ceil(float(match["value"])) + margin
            raise LaunchError(
                f"checkpoint.deadline_seconds is {match['value']} s ({match['origin']}), but Slurm signals the job "
                f"only {signal_seconds} s before it ends it (signal_seconds), of which {margin} s are not the save's: "
                f"leave checkpoint.deadline_seconds out, which makes it {longest} s, or use --signal-seconds {needed}"
            )
        return config
    line = f"{match['before']}{float(longest)}{match['space']}# signal_seconds of the cluster"
    return config[: match.start()] + line + config[match.end() :]
