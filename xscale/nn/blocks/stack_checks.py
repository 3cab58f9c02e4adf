"""Checks of a stack's config: what its blocks must have in common."""

import re
from dataclasses import replace
from typing import Any

from xscale.core.choices import Choice
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.depth import PASSES
from xscale.nn.dims import Dims
from xscale.nn.mixer.mixer import MIXERS
from xscale.nn.position.position import POSITIONS
from xscale.nn.residual.checks import check_stream


def check_blocks_together(config: Any, dims: Dims, path: str, *, cross: bool) -> list[Problem]:
    """List the problems of a `StackConfig` besides those of single blocks and of what happens over the depth."""
    return [
        *_check_parts(config, path, cross=cross),
        *_check_shared_position(config, dims, path),
        *_check_layer_tables(config, dims, path),
        *check_stream(config, path, PASSES, cross=cross),
    ]


def with_keys(problem: Problem, config: Any, path: str) -> Problem:
    """Return the problem of one block of the stack at `path`, with the keys of the rule that gives the part."""
    in_block = re.compile(re.escape(path) + r" \(block (\d+)\)\.")

    def key_of(key: str) -> str:
        match = in_block.match(key or problem.path)
        if match is None:
            return key
        layer, inner = int(match[1]), (key or problem.path)[match.end() :]
        rules = [
            index
            for index, rule in enumerate(config.rules)
            if rule.applies_to(layer, config.depth)
            and getattr(rule, inner.partition(".")[0], None) is not None
        ]
        return f"{path}.rules.{rules[-1]}.{inner}" if rules else f"{path}.block.{inner}"

    choices = [
        Choice(tuple((key_of(key), value) for key, value in choice.edits))
        for choice in problem.choices
    ]
    return replace(problem, choices=tuple(choices))


def _check_parts(config: Any, path: str, *, cross: bool) -> list[Problem]:
    """Check that some block moves information between tokens, and in a decoder with a source some reads it."""
    parts = {
        entry.part
        for layer in range(config.depth)
        for entry in config.block_config(layer).listed(cross=cross)
    }
    missing = {"mixer", *["cross"] * cross} - parts
    what = "no block has a sublayer '{}', without which {}"
    lost = {"mixer": "no token sees another", "cross": "the decoder does not read the source"}
    return [
        Problem(
            f"{path}.block.sublayers",
            what.format(part, lost[part]),
            f"Or add {{part: {part}}}.",
            choices=take(None),
        )
        for part in sorted(missing)
    ]


def _check_layer_tables(config: Any, dims: Dims, path: str) -> list[Problem]:
    """Check that the mixers whose cores share tables over the layers have the same tables."""
    tables = {}
    mixer: Any
    for mixer in config.mixers():
        for table in MIXERS.of(mixer).part.layer_tables(mixer, dims):
            tables[table] = table[0]
    if len(tables) < 2:
        return []
    what = f"the blocks share tables of their cores ({', '.join(tables.values())}), which differ in heads or config"
    return [
        Problem(
            f"{path}.rules", what, "Or take cores with the same heads and config.", choices=take([])
        )
    ]


def _check_shared_position(config: Any, dims: Dims, path: str) -> list[Problem]:
    """Check that the mixers which share parameters of a position part have those of the same shape."""
    tables, key = set(), "shared"
    mixer: Any
    for mixer in config.mixers():
        position: Any = getattr(mixer, "position", None) or dims.position
        if not hasattr(mixer, "heads") or position is None:
            continue
        if getattr(position, "shared", False):
            tables.add((mixer.heads if POSITIONS.of(position).part.has_heads else None, position))
        elif getattr(position, "shared_biases", False):
            # Each head has vectors as wide as its keys.
            key = "shared_biases"
            widths = [getattr(mixer, name, None) for name in ("head_width", "shared_width")]
            tables.add((mixer.heads, position, mixer.kind == "collaborative", *widths))
    if len(tables) < 2:
        return []
    heads = ", ".join(
        str(count) for count in sorted({count for count, *_ in tables if count is not None})
    )
    differ = f"heads or position (heads: {heads})" if heads else "position"
    what = f"the blocks share parameters of their position, and their mixers differ in {differ}"
    fix = "Or take mixers with the same heads and position."
    choices = take([]) + take(False, key=f"model.position.{key}")
    return [Problem(f"{path}.rules", what, fix, choices=choices)]
