"""The type of every config key that names a file or folder: `~` and `$VARIABLE` become what a shell makes of them."""

import os.path
import re
from pathlib import Path
from typing import Annotated, Any

import pydantic

from xscale.core.errors import ConfigError

VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")
"""A variable of the environment, as `os.path.expandvars` reads it."""


def expand_path(path: str) -> str:
    """Return a path with `~`, `~user` and `$VARIABLE` expanded; ValueError for a user or a variable that is not there.

    A config names folders of one machine, and without it a folder called `~` would be made.
    """
    expanded = os.path.expandvars(os.path.expanduser(path))
    if expanded.startswith("~") and not os.path.lexists(expanded):
        raise ValueError(
            f"{path.split('/')[0]} is no user with a home folder; for a folder of that name write ./{path}"
        )
    if variable := VARIABLE.search(expanded):
        raise ValueError(f"the variable {variable.group()} of the environment is not set")
    return expanded


PathText = Annotated[str, pydantic.AfterValidator(expand_path)]
"""A path in a config, also one with `*` in it."""


def one_or_several(value: Any) -> Any:
    """Return a text as a tuple of that text, and a list as a tuple."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


Texts = Annotated[tuple[str, ...], pydantic.BeforeValidator(one_or_several)]
"""Texts in a config, which may have one without the brackets of a list."""
PathTexts = Annotated[tuple[PathText, ...], pydantic.BeforeValidator(one_or_several)]
"""Paths in a config, which may have one without the brackets of a list."""


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
