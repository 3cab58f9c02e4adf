"""Checks of a stack's config: what its blocks must have in common, and what they hand on to each other."""

from typing import Any

from xscale.core.errors import Problem
from xscale.core.requirements import instead, kinds, take
from xscale.nn.attention.core import CORES
from xscale.nn.dims import Dims
from xscale.nn.mixer.mixer import MIXERS
from xscale.nn.norm.norm import NORMS
from xscale.nn.position.position import POSITIONS
from xscale.nn.quaternion import check as check_quaternions
from xscale.nn.reversible import check as check_reversible
from xscale.nn.sequence_pooling import check as check_pooling
from xscale.nn.sharing import check as check_sharing


def check_blocks_together(config: Any, dims: Dims, path: str, *, cross: bool, hands_on: bool) -> list[Problem]:
    """List the problems of a `StackConfig` besides those of single blocks. `hands_on`: blocks hand on scores."""
    pooling = []
    if config.pooling is not None:
        pooling = check_pooling(config.pooling, config, dims, f"{path}.pooling", hands_on=hands_on)
    return [
        *_check_parts(config, path, cross=cross),
        *_check_shared_position(config, dims, path),
        *_check_layer_tables(config, dims, path),
        *_check_scores(config, path, cross=cross),
        *check_sharing(config, path, cross=cross),
        *check_reversible(config, path),
        *check_quaternions(config, dims.width, path, cross=cross),
        *_check_steps(config, dims, path),
        *pooling,
    ]


def _check_parts(config: Any, path: str, *, cross: bool) -> list[Problem]:
    """Check that some block moves information between tokens, and in a decoder with a source some reads it."""
    parts = {entry.part for layer in range(config.depth) for entry in config.block_config(layer).listed(cross=cross)}
    missing = {"mixer", *["cross"] * cross} - parts
    what = "no block has a sublayer '{}', without which {}"
    lost = {"mixer": "no token sees another", "cross": "the decoder does not read the source"}
    return [
        Problem(f"{path}.block.sublayers", what.format(part, lost[part]), f"Add {{part: {part}}} to the sublayers.")
        for part in sorted(missing)
    ]


def _check_steps(config: Any, dims: Dims, path: str) -> list[Problem]:
    """Check what is added before and after each block."""
    problems = []
    if config.step_signal and dims.width % 2:
        what = f"pairs of channels have a sine and a cosine, and width={dims.width} is odd"
        problems.append(Problem(f"{path}.step_signal", what, "Or take an even width.", choices=take(False)))
    hand_on_scores = [mixer for mixer in config.mixers() if MIXERS.of(mixer).part.score_heads(mixer)]
    cores = dict.fromkeys(mixer.core.kind for mixer in hand_on_scores if hasattr(mixer, "core"))
    without_scores = tuple(choice for kind in cores for choice in instead("core", kind, ["softmax"]))
    if config.halting is not None and hand_on_scores:
        what = "a token that has halted has no scores to hand on"
        problems.append(Problem(f"{path}.halting", what, choices=take(None) + without_scores))
    norm = NORMS.of(config.block.norm)
    if config.exits is not None and config.exits.norm and norm.traits.batch_statistics:
        what = f"'{norm.name}' collects statistics in every step, and an exit does not see the tokens of every step"
        others = kinds(NORMS.able(batch_statistics=False), f"{path}.block.norm")
        problems.append(Problem(f"{path}.exits.norm", what, choices=take(False) + others))
    if config.block.residual == "reversible" and hand_on_scores:
        what = "reversible blocks keep nothing for backward, and scores that blocks hand on would be kept"
        problems.append(Problem(f"{path}.block.residual", what, choices=take("sequential") + without_scores))
    value_keys = [key for mixer in config.mixers() if (key := MIXERS.of(mixer).part.values_key(mixer))]
    if config.block.residual == "reversible" and value_keys:
        what = "reversible blocks keep nothing for backward, and values that blocks hand on would be kept"
        without_values = take(None, key=f"{path}.block.mixer.{value_keys[0]}")
        problems.append(Problem(f"{path}.block.residual", what, choices=take("sequential") + without_values))
    return problems


def _check_scores(config: Any, path: str, *, cross: bool) -> list[Problem]:
    """Check that each mixer which reads the scores of the previous block gets those of as many heads."""
    problems = []
    previous: dict[str, int | None] = {}
    for layer in range(config.depth):
        block = config.block_config(layer)
        heads: dict[str, int | None] = {}
        for name, sublayer in block.named(cross=cross).items():
            if sublayer.part == "ffn":
                continue
            mixer: Any = block.config_of(sublayer)
            part = MIXERS.of(mixer).part
            heads[name] = part.score_heads(mixer)
            if part.reads_scores(mixer) and (layer > 0 or part.needs_previous_scores):
                available = previous.get(name)
                if available is None:
                    what = f"'{name}' reads the attention scores of the block before, which hands on none"
                    able = (CORES.get(name) for name in CORES.able(previous_scores=True))
                    # Not those that hand them on with some of their settings only.
                    can = ", ".join(
                        entry.name for entry in able if entry.part.traits_of(entry.part.Config()).previous_scores
                    )
                    fix = f"Give block {max(layer - 1, 0)} the mixer attention with one of these cores: {can}."
                    problems.append(Problem(f"{path} (block {layer})", what, fix))
                elif available != heads[name]:
                    what = f"'{name}' has {heads[name]} heads and reads the scores of the {available} before it"
                    problems.append(Problem(f"{path} (block {layer})", what, f"Take heads={available}."))
        previous = heads
    return problems[:1]


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
    return [Problem(f"{path}.rules", what, "Take cores with the same heads and config, or without shared tables.")]


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
    heads = ", ".join(str(count) for count in sorted({count for count, *_ in tables if count is not None}))
    differ = f"heads or position (heads: {heads})" if heads else "position"
    what = f"the blocks share parameters of their position, and their mixers differ in {differ}"
    fix = f"Take mixers with the same heads and position, or position.{key}=false."
    return [Problem(f"{path}.rules", what, fix)]
