"""Keys of config.json and of the `model` section that have the same value, as one table for both directions.

A table maps a key of the library to the dotted key of xscale: `{"n_head": "stack.block.mixer.heads"}`. Where one value
of the library is that of several keys of xscale, the table has them all: an export reads the first, and an import
writes each. Paths are those of a model, or of the part whose config is given. Keys whose values are computed are no
part of it.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

Data = dict[str, Any]
Keys = Mapping[str, str | tuple[str, ...]]
FLOATS = ("dropout", "scale", "clamp_value")
"""Keys of xscale that are numbers: files have 0 or null for 0.0."""
FLAGS = ("bias", "normalise", "scale_embeddings")
"""Keys of xscale that are true or false: files have null, or nothing, for false."""


def keys_to_hf(table: Keys, config: Any) -> Data:
    """Read the values of a table from a config of xscale, each stack's from its first block."""
    return {hf_key: _value(config, paths[0]) for hf_key, paths in _paths(table)}


def keys_from_hf(table: Keys, data: Data, section: Data) -> Data:
    """Return `section`, the rest of the section of the config, with the values of a table from config.json."""
    section = deepcopy(section)
    for hf_key, paths in _paths(table):
        for path in paths:
            *outer, name = path.split(".")
            inner = section
            for part in outer:
                inner = inner.setdefault(part, {})
            inner[name] = _from_hf(data, hf_key, name)
    return section


def _paths(table: Keys) -> Iterator[tuple[str, tuple[str, ...]]]:
    for hf_key, paths in table.items():
        yield hf_key, (paths,) if isinstance(paths, str) else paths


def _value(config: Any, path: str) -> Any:
    value = config
    for name in path.split("."):
        # Rules may change every block, so that the config of `block` alone is that of none.
        value = value.block_config(0) if name == "block" else getattr(value, name)
    return value


def _from_hf(data: Data, hf_key: str, name: str) -> Any:
    if name in FLOATS:
        return float(data.get(hf_key) or 0)
    if name in FLAGS:
        return bool(data.get(hf_key))
    return data[hf_key]
