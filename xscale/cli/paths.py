"""The type of every path on the command line: `~` and `$VARIABLE` expanded, as in the keys of a config.

A shell leaves `--out=~/a` as it is.
"""

from pathlib import Path

from xscale.core.errors import ConfigError
from xscale.core.paths import expand_path


def path(text: str | Path) -> Path:
    """Return the path that an argument is: `parser` of typer. ConfigError for a user or variable that is not there."""
    try:
        return Path(expand_path(str(text)))
    except ValueError as error:
        refused = ConfigError(str(text), str(error))
        refused.same_on_all_ranks = True
        raise refused from None


def path_or_pattern(text: str) -> str:
    """Return a text that may be a path, a pattern or a name, expanded as a path is; a mapping stays as it is."""
    if text.startswith("{"):
        return text
    return f"{path(text)}/" if text.endswith("/") else str(path(text))
