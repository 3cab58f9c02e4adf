"""Slurm's compressed node lists, such as `gpu[001-128,130],login1`, as names."""

import re

from xscale_launch.errors import LaunchError

_BRACKET = re.compile(r"\[([^\[\]]*)\]")


def expand(nodes: str) -> list[str]:
    """The names of a node list, in its order: `gpu[008-010]` is gpu008, gpu009, gpu010. Several brackets multiply."""
    names: list[str] = []
    for part in _split(nodes):
        names += _expand_one(part)
    return names


def _split(nodes: str) -> list[str]:
    """Cuts at the commas that stand outside brackets."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(nodes):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise LaunchError(f"node list {nodes!r} has a bracket too many; it should look like gpu[001-128,130]")
        if letter == "," and depth == 0:
            parts.append(nodes[start:place])
            start = place + 1
    parts.append(nodes[start:])
    if depth:
        raise LaunchError(f"node list {nodes!r} does not close its bracket; it should look like gpu[001-128,130]")
    return [part.strip() for part in parts if part.strip()]


def _expand_one(part: str) -> list[str]:
    found = _BRACKET.search(part)
    if found is None:
        return [part]
    before, after = part[: found.start()], _expand_one(part[found.end() :])
    return [before + number + tail for number in _numbers(found.group(1), part) for tail in after]


def _numbers(inside: str, part: str) -> list[str]:
    numbers: list[str] = []
    for piece in inside.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise LaunchError(f"{piece!r} in node list {part!r} is not a range of numbers such as 001-128")
        numbers += [str(value).zfill(len(first)) for value in range(int(first), int(last or first) + 1)]
    return numbers
