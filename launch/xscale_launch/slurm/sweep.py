"""Sweeps: expand `--sweep key=a,b,c`, given once or several times, into a list of runs."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xscale_launch.status import LaunchError
from xscale_launch.typed_json import decode_json


@dataclass(frozen=True)
class SweepMember:
    """One run of a sweep: the name of its subfolder and its overrides."""

    name: str
    overrides: tuple[str, ...]


def members(sweeps: Sequence[str]) -> list[SweepMember]:
    """Return every combination; the last key varies fastest. Commas in brackets do not separate values."""
    axes: list[list[str]] = []
    for sweep in sweeps:
        key, equals, text = sweep.partition("=")
        values = _values(text)
        if not equals or not key or not all(values):
            raise LaunchError(
                f"--sweep {sweep}: write key=value,value, such as --sweep optimizer.lr=1e-4,3e-4"
            )
        if len(set(values)) < len(values):
            raise LaunchError(
                f"--sweep {sweep} repeats a value: both members would be the same run"
            )
        axes.append([f"{key}={value}" for value in values])
    keys = [axis[0].partition("=")[0] for axis in axes]
    if len(set(keys)) < len(keys):
        raise LaunchError("--sweep names a key twice: give all its values in one option")
    combinations = [
        SweepMember(",".join(map(_file_name, combination)), combination)
        for combination in itertools.product(*axes)
    ]
    if len({member.name for member in combinations}) < len(combinations):
        return [
            SweepMember(f"{number}-{member.name}", member.overrides)
            for number, member in enumerate(combinations)
        ]
    return combinations


def read_members(file: Path) -> list[SweepMember]:
    """Read the members from a JSON file: the name of each run -> its list of overrides."""
    try:
        data = decode_json(file.read_bytes(), dict[str, list[str]])
    except OSError as error:
        raise LaunchError(f"--members {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise LaunchError(
            f'--members {file}: {error}; write {{"name": ["key=value", ...], ...}}'
        ) from None
    if not data or not all("=" in text for overrides in data.values() for text in overrides):
        raise LaunchError(
            f'--members {file}: write {{"name": ["key=value", ...], ...}}, with at least one run'
        )
    for name in data:
        if _file_name(name) != name or name.startswith("."):
            raise LaunchError(
                f"--members {file}: {name!r} is no name of a folder: use letters, digits and . = + -"
            )
    return [SweepMember(name, tuple(overrides)) for name, overrides in data.items()]


def _values(text: str) -> list[str]:
    values, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    return values


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=+-]+", "_", text)
