"""Sweeps: `--sweep key=a,b,c`, given once or several times, as the list of runs that they make."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from xscale_launch.errors import LaunchError


@dataclass(frozen=True)
class Member:
    """One run of a sweep: its folder's name below the sweep's, and the overrides that make it what it is."""

    name: str
    overrides: tuple[str, ...]


def members(sweeps: Sequence[str]) -> list[Member]:
    """Every combination, the last key turning fastest. Commas in brackets do not part: `a=[1,2],[3,4]` is two."""
    axes: list[list[str]] = []
    for sweep in sweeps:
        key, equals, text = sweep.partition("=")
        values = _values(text)
        if not equals or not key or not all(values):
            raise LaunchError(f"--sweep {sweep}: write key=value,value, such as --sweep optim.lr=1e-4,3e-4")
        if len(set(values)) < len(values):
            raise LaunchError(f"--sweep {sweep} names a value twice: both would be the same run")
        axes.append([f"{key}={value}" for value in values])
    keys = [axis[0].partition("=")[0] for axis in axes]
    if len(set(keys)) < len(keys):
        raise LaunchError("--sweep names one key twice: give all its values in one")
    found = [Member(",".join(map(_file_name, combination)), combination) for combination in itertools.product(*axes)]
    if len({member.name for member in found}) < len(found):
        return [Member(f"{place}-{member.name}", member.overrides) for place, member in enumerate(found)]
    return found


def _values(text: str) -> list[str]:
    values, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    return values


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=+-]+", "_", text)
