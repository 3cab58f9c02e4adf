"""Parts shared by the verbs of `xscale launch`: config, overrides, the trainer's command, and what is printed."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from xscale_launch.files import shown
from xscale_launch.paths import expand
from xscale_launch.status import LaunchError

PYTHON = sys.executable
CONFIGS = (Path(__file__).parents[2] / "configs", Path(__file__).parents[1] / "xscale" / "configs")
"""Folders with the configs that come with xscale: in a checkout, and in an installed package."""


def write(text: str, end: str = "\n") -> None:
    """Print a result on standard output; what of it a terminal would carry out is escaped."""
    print(shown(text), end=end, flush=True)


def say(message: str) -> None:
    """Print a message of the launcher on standard error, as `write` does."""
    print(shown(f"xscale launch: {message}"), file=sys.stderr, flush=True)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG and its overrides. `--xscale` replaces the trainer's command in the launcher's tests."""
    parser.add_argument(
        "config", metavar="CONFIG", help="a run's config, or a recipe's name, such as quickstart"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides of config values"
    )
    parser.add_argument("--xscale", help=argparse.SUPPRESS)


def check_config(config: str, overrides: Sequence[str]) -> Path:
    """Return the config's path; raise `LaunchError` when the file does not exist or an override is not `key=value`.

    The name of a recipe, such as quickstart, or of a variant, such as bigbird, stands for its file. Where there is no
    folder `configs`, a path in it is that of a file that comes with xscale.
    """
    path = _recipe(config) or _shipped_file(config) or expand(config)
    if (path / "config.yaml").is_file():
        raise LaunchError(
            f"{config} is the folder of a run, and no config; {path / 'config.yaml'} is its config, which resumes it"
        )
    if not path.is_file():
        files = [file.name for file in path.parent.glob("*.yaml")]
        near = [
            str(path.parent / name) for name in difflib.get_close_matches(path.name, files, n=3)
        ]
        recipes = [file.stem for folder in CONFIGS for file in (folder / "run").glob("*.yaml")]
        near += difflib.get_close_matches(path.stem, recipes, n=2)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise LaunchError(
            f"config {config} does not exist; {hint}`xscale list recipes` shows the recipes"
        )
    for override in overrides:
        if "=" not in override:
            raise LaunchError(
                f"{override!r} is not an override: write key=value, such as train.steps=100"
            )
    return path


def is_config(word: str) -> bool:
    """Whether the word is a config: a file, or the name of a recipe."""
    try:
        return (_recipe(word) or expand(word)).is_file()
    except LaunchError:
        # Several recipes begin so.
        return True


def _recipe(word: str) -> Path | None:
    """Return the recipe called `word`, else the variant's whose id it is or begins; None: `word` is a path."""
    if Path(word).suffix in (".yaml", ".yml") or Path(word).is_file() or Path(word).name != word:
        return None
    for folder in CONFIGS:
        if (file := folder / "run" / f"{word}.yaml").is_file():
            return file
    id = word.lower().replace("_", "-")
    variants = [file for folder in CONFIGS for file in sorted((folder / "xformer").glob("*.yaml"))]
    recipes = {file.stem: file for file in variants if file.stem.startswith(id)}
    if id in recipes:
        return recipes[id]
    like = [file for stem, file in recipes.items() if stem.startswith(f"{id}-")]
    if len(like) > 1:
        raise LaunchError(
            f"several recipes have names that begin with {word}: {', '.join(file.stem for file in like)}"
        )
    return like[0] if like else None


def _shipped_file(config: str) -> Path | None:
    """The file that comes with xscale under a path such as configs/run/quickstart.yaml; None in a checkout."""
    parts = Path(config).parts
    if parts[:1] != ("configs",) or ".." in parts or os.path.lexists("configs"):
        return None
    return next(
        (file for folder in CONFIGS if (file := folder.joinpath(*parts[1:])).is_file()), None
    )


def override(overrides: Sequence[str], key: str) -> str | None:
    """Return the value of `key` on the command line (the last one), or None."""
    values = [text.partition("=")[2] for text in overrides if text.partition("=")[0] == key]
    return values[-1] if values else None


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of text as a table: pad each cell to the width of its column."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(lines)
