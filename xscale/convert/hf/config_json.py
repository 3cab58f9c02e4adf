"""config.json of a model from a hub: every size is held against the tensors' headers before anything is built.

A line of this file can ask for any memory: a number of layers, experts or words. No model has more layers than tensors,
or a size that is no axis of a tensor, up to constants that are cheap.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xscale.convert.hf.mxfp4 import BLOCK, BLOCKS
from xscale.core.errors import ConfigError, Problem
from xscale.core.files.file_safety import decode_json, read_regular
from xscale.core.foreign import foreign_errors

CONFIG_JSON, GENERATION_JSON = "config.json", "generation_config.json"
FIX = "Give a folder that `save_pretrained` wrote."
CONFIG_BYTES = 8 << 20
CHEAP_SIZE, CHEAP_LAYERS, CHEAP_EXPERTS = 1 << 16, 1 << 10, 1 << 16
"""Sizes, layers, and experts of all layers, that cost little whatever the tensors are: layers may share them."""
LONGEST = 1 << 24
"""Longest sequence of a model, which no tensor shows where positions are computed."""
NO_SIZE = re.compile(r".*_ids?|.*_index|mscale_all_dim")
LENGTH = re.compile(
    r"(original_)?max_position_embeddings|n_positions|n_ctx|max_seq.*|seq_length|max_length"
)
LAYERS = re.compile(r"(num|n)_(.*_)?layers?|.*_layers|num_nextn_predict_layers|num_hidden_groups")
EXPERTS = re.compile(r"(num|n)_(.*_)?experts|moe_num_experts")
SIZE = re.compile(r"(num|n|d)_.+|.*_(size|dim|dims|heads|rank|width|buckets|groups)|dim|hidden_dim")
POSITIVE = re.compile(
    r"(hidden|vocab)_size|dim|d_model|n_embd|n_heads?|num_heads|num_attention_heads|num_key_value_heads|n_layers?|num_layers"
    r"|num_hidden_layers|d_kv|d_head|head_dim|num_hidden_groups|embedding_size"
)


@dataclass(frozen=True)
class Headers:
    """Bounds of a model's sizes, from the headers of its folder's tensors."""

    tensors: int = 0
    largest_axis: int = 0

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]]) -> "Headers":
        """Return the bounds of tensors of these shapes, by name."""
        axes = [axis for shape in shapes.values() for axis in shape]
        # The last two axes of a weight in MXFP4 are blocks, and bytes of two elements each.
        axes += [
            shape[-2] * BLOCK
            for name, shape in shapes.items()
            if name.endswith(BLOCKS) and len(shape) > 1
        ]
        return cls(len(shapes), max(axes, default=0))


UNKNOWN = Headers(CHEAP_LAYERS, 1 << 20)
"""Bounds of a folder whose tensors cannot be opened, which is refused later."""


def read_config_json(folder: Path, headers: Headers) -> dict[str, Any]:
    """Read config.json with the library's defaults filled in. ConfigError when it cannot be read, or asks for sizes
    that the tensors do not have.
    """
    file = folder / CONFIG_JSON
    if not file.is_file():
        what = f"file {CONFIG_JSON} is missing" if folder.is_dir() else "the folder does not exist"
        raise ConfigError(str(folder), what, FIX)
    stored = _read_object(file)
    # The library reads it with the model, and its errors do not say which file it was.
    if (folder / GENERATION_JSON).exists():
        _read_object(folder / GENERATION_JSON)
    if problems := size_problems(stored, headers):
        raise ConfigError(
            [replace(problem, path=f"{file}: {problem.path}") for problem in problems]
        )
    from transformers import AutoConfig

    with foreign_errors(file, "the file is not a config that transformers reads", FIX):
        config: dict[str, Any] = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        ).to_dict()
    return config


def _read_object(file: Path) -> dict[str, Any]:
    with foreign_errors(file, "the file is not a config of transformers", FIX):
        stored = decode_json(read_regular(file, CONFIG_BYTES))
        if not isinstance(stored, dict):
            raise ValueError("it is not an object of JSON")
    return stored


def size_problems(config: Mapping[str, Any], headers: Headers) -> list[Problem]:
    """List the sizes of a config.json, also of its sections, that are none or exceed what the tensors can be."""
    problems = _problems(config, headers, "")
    for section, keys in [("", config), *((f"{name}.", value) for name, value in config.items())]:
        if not isinstance(keys, Mapping) or problems:
            continue
        layers, experts = _largest(keys, LAYERS), _largest(keys, EXPERTS)
        if layers * experts > max(CHEAP_EXPERTS, headers.tensors):
            what = f"{layers} layers of {experts} experts are more than the {headers.tensors} tensors can be"
            problems.append(Problem(f"{section}num_experts", what))
    return problems[:9]


def _largest(keys: Mapping[Any, Any], pattern: re.Pattern[str]) -> int:
    return max(
        (
            value
            for key, value in keys.items()
            if pattern.fullmatch(str(key)) and type(value) is int
        ),
        default=1,
    )


def _problems(config: Mapping[str, Any], headers: Headers, above: str) -> list[Problem]:
    problems = []
    for name, value in config.items():
        key = str(name)
        if isinstance(value, Mapping) and not above:
            problems += _problems(value, headers, f"{key}.")
        if NO_SIZE.fullmatch(key) or value is None or not (limit := _limit(key, headers)):
            continue
        if isinstance(value, list) and not POSITIVE.fullmatch(key):
            # A size of each layer, in architectures that are refused by name.
            continue
        path = f"{above}{key}"[:100]
        if type(value) is not int:
            problems.append(Problem(path, f"must be an integer, got {str(value)[:40]!r}"))
        elif value < (least := 1 if POSITIVE.fullmatch(key) else -1):
            problems.append(Problem(path, f"must be >= {least}, got {value}"))
        elif value > limit:
            problems.append(
                Problem(path, f"{value} is more than the tensors of the folder have ({limit})")
            )
    return problems


def _limit(key: str, headers: Headers) -> int:
    """Return the largest value of a size; 0 for a key that is none."""
    if LENGTH.fullmatch(key):
        return LONGEST
    if LAYERS.fullmatch(key):
        return max(CHEAP_LAYERS, headers.tensors)
    return (
        max(CHEAP_SIZE, headers.largest_axis)
        if SIZE.fullmatch(key) or EXPERTS.fullmatch(key)
        else 0
    )
