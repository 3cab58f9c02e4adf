"""Expand Slurm's compressed node lists, such as `gpu[001-128,130],login1`."""

import re

from xscale_launch.status import LaunchError

_BRACKET = re.compile(r"\[([^\[\]]*)\]")


def expand(nodes: str) -> list[str]:
    """Return the node names in order: `gpu[008-010]` is gpu008, gpu009, gpu010. Several brackets multiply."""
    names: list[str] = []
    for part in _split(nodes):
        names += _expand_one(part)
    return names


def _split(nodes: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(nodes):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise LaunchError(
                f"node list {nodes!r} has unbalanced brackets; it should look like gpu[001-128,130]"
            )
        if character == "," and depth == 0:
            parts.append(nodes[start:index])
            start = index + 1
    parts.append(nodes[start:])
    if depth:
        raise LaunchError(
            f"node list {nodes!r} does not close its bracket; it should look like gpu[001-128,130]"
        )
    return [part.strip() for part in parts if part.strip()]


def _expand_one(part: str) -> list[str]:
    match = _BRACKET.search(part)
    if match is None:
        return [part]
    before, after = part[: match.start()], _expand_one(part[match.end() :])
    return [before + number + tail for number in _numbers(match.group(1), part) for tail in after]


def _numbers(inside: str, part: str) -> list[str]:
    numbers: list[str] = []
    for piece in inside.split(","):
        first, dash, last = piece.strip().partition("-")
        if (
            not first.isdigit()
            or (dash and not last.isdigit())
            or (dash and int(last) < int(first))
        ):
            raise LaunchError(
                f"{piece!r} in node list {part!r} is not a range of numbers such as 001-128"
            )
        numbers += [
            str(value).zfill(len(first)) for value in range(int(first), int(last or first) + 1)
        ]
    return numbers
