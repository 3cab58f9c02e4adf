"""Keys of config.json and of the `model` section that have the same value, as one table for both directions.

A table maps a key of the library to the dotted key of xscale: `{"n_head": "stack.block.mixer.heads"}`. Keys whose
values are computed are no part of it.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

BLOCK = "stack.block."
"""Begin of the keys of a stack whose blocks are all equal."""
Data = dict[str, Any]


def keys_to_hf(table: Mapping[str, str], config: Any) -> Data:
    """Read the values of a table from xscale's model config, whose blocks are all equal."""
    block = config.stack.block_config(0)
    data: Data = {}
    for hf_key, path in table.items():
        in_block = path.startswith(BLOCK)
        value = block if in_block else config
        for name in path.removeprefix(BLOCK).split("."):
            value = getattr(value, name)
        data[hf_key] = value
    return data


def keys_from_hf(table: Mapping[str, str], data: Data, section: Data) -> Data:
    """Return `section`, the rest of the `model` section, with the values of a table from config.json."""
    section = deepcopy(section)
    for hf_key, path in table.items():
        # Files have 0 for a dropout of 0.0.
        value = float(data[hf_key]) if path.endswith("dropout") else data[hf_key]
        *outer, name = path.split(".")
        inner = section
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[name] = value
    return section
