"""What every way to start shares: the config, its overrides, and the trainer's command."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from xscale_launch.errors import LaunchError

PYTHON = sys.executable


def add_config(parser: argparse.ArgumentParser) -> None:
    """CONFIG and its overrides; `--xscale` is for the launcher's own tests, which have a stand-in."""
    parser.add_argument("config", metavar="CONFIG", help="a run's config, such as configs/run/tiny.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that go over the config's")
    parser.add_argument("--xscale", help=argparse.SUPPRESS)


def checked(config: str, overrides: Sequence[str]) -> Path:
    """The config's path; raises `LaunchError` when there is no such file or an override is no `key=value`."""
    path = Path(config)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.yaml")], n=3, cutoff=0.4)
        there = f"; near it: {', '.join(str(path.parent / name) for name in near)}" if near else ""
        raise LaunchError(f"there is no config {config}{there}")
    for override in overrides:
        if "=" not in override:
            raise LaunchError(f"{override!r} is no override: write key=value, such as train.steps=100")
    return path


def override(overrides: Sequence[str], key: str) -> str | None:
    """The value that the command line gives `key`, the last one winning."""
    values = [text.partition("=")[2] for text in overrides if text.partition("=")[0] == key]
    return values[-1] if values else None
