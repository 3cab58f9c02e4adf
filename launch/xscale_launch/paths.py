"""The type of every path on the launcher's command line: `~` and `$VARIABLE` expanded, as in the keys of a config.

A shell leaves `--folder=~/a` and `run.dir=~/a` as they are. `xscale.core.paths` has the same rules for configs.
"""

import argparse
import os.path
import re
from pathlib import Path

from xscale_launch.status import LaunchError

VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")


def expand(path: str) -> Path:
    """Return a path with `~`, `~user` and `$VARIABLE` expanded; LaunchError for one that is not there."""
    expanded = os.path.expandvars(os.path.expanduser(path))
    if expanded.startswith("~") and not os.path.lexists(expanded):
        name = path.split("/")[0]
        raise LaunchError(
            f"{name} is no user with a home folder; for a folder of that name write ./{path}"
        )
    if variable := VARIABLE.search(expanded):
        raise LaunchError(f"{path}: the variable {variable.group()} of the environment is not set")
    return Path(expanded)


def path_argument(text: str) -> Path:
    """Return the path that an argument is: `type` of argparse."""
    try:
        return expand(text)
    except LaunchError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
