"""Plugins: modules of the user, named in a recipe, that register parts."""

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from xscale.core.errors import ConfigError, Problem
from xscale.core.foreign import foreign_errors


def plugin_names(config: dict[str, Any]) -> list[str]:
    """The modules that the key `plugins` of a config names."""
    plugins = config.get("plugins", [])
    return (
        [name for name in plugins if isinstance(name, str)]
        if isinstance(plugins, list | tuple)
        else []
    )


def import_plugins(names: Iterable[str], folders: Iterable[Path] = ()) -> list[Problem]:
    """Import the modules, and list those that cannot be imported.

    A module that is not installed is looked for in `folders`, such as that of the config, and where the command was
    started; a folder that has it is added behind Python's path, where it hides no installed module.
    """
    problems: list[Problem] = []
    for name in names:
        _find(name, [Path.cwd(), *folders])
        try:
            with foreign_errors("plugins", f"'{name}' cannot be imported", _where(name)):
                importlib.import_module(name)
        except ConfigError as error:
            problems += error.problems
    return problems


def _find(name: str, folders: list[Path]) -> None:
    """Add the first of the folders that has the module to Python's path, unless the path leads to it already."""
    first = name.partition(".")[0]
    try:
        if first in sys.modules or importlib.util.find_spec(first) is not None:
            return
    except (ImportError, ValueError):
        return
    for folder in folders:
        if (folder / f"{first}.py").is_file() or (folder / first / "__init__.py").is_file():
            sys.path.append(str(folder))
            return


def _where(name: str) -> str:
    first = name.partition(".")[0]
    return f"Install it, or put {first}.py beside the config or where the command is started."
