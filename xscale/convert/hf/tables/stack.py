"""The stack of a table: its depth, and the table of its blocks, which is read for each layer and written for all."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from xscale.convert.hf.architecture import Data, ModelSizes
from xscale.convert.hf.layers import layer_rules
from xscale.convert.hf.tables.keys import (
    KeyMapping,
    Reading,
    Table,
    Writing,
    merged,
    names_in,
    read_table,
    write_table,
)
from xscale.core.config import encode
from xscale.nn.blocks.stack import OVERRIDES
from xscale.nn.ffn.ffn import gated_hidden

STACKS = ("stack", "encoder", "decoder")


@dataclass(frozen=True)
class StackTable(KeyMapping):
    """A stack of blocks."""

    depth: str
    """Key of config.json with the number of layers."""
    block: Table
    """Table of a block."""
    keys: Table = field(default_factory=dict)
    """Table of the stack's other keys."""

    def read(self, reading: Reading, name: str) -> Data:
        depth = reading.data[self.depth]
        blocks = [
            read_table(self.block, Reading(reading.data, reading.require, layer))
            for layer in range(depth)
        ]
        rules = [
            rule
            for part in OVERRIDES
            if part in blocks[0]
            for rule in layer_rules([block[part] for block in blocks], part)
        ]
        return {
            "depth": depth,
            "block": blocks[0],
            "rules": rules,
            **read_table(self.keys, reading),
        }

    def write(self, values: Sequence[Any], path: str, writing: Writing) -> None:
        (stack,) = values
        writing.put(self.depth, stack["depth"], f"{path}.depth")
        write_table(self.block, stack["blocks"], f"{path}.block", writing)
        write_table(self.keys, [stack], path, writing)

    def names(self) -> set[str]:
        return {self.depth, *names_in(self.block), *names_in(self.keys)}

    def changed(self, block: Table, keys: Table) -> "StackTable":
        """Return a stack with changes of its tables."""
        return StackTable(self.depth, merged(self.block, block), merged(self.keys, keys))


def resolved(config: Any, sizes: ModelSizes) -> Data:
    """Return a model's config as data with the blocks of all layers, and the value of each null that stands for one."""
    data = encode(config)
    for name in STACKS:
        if name in data:
            stack = getattr(config, name)
            blocks = [encode(stack.block_config(layer)) for layer in range(stack.depth)]
            for block in blocks if name == "decoder" else ():
                # Attention to an encoder is as that to the text where it is not given.
                block["cross"] = block["cross"] or block["mixer"]
            data[name] = {key: value for key, value in data[name].items() if key != "rules"}
            data[name] |= {"block": None, "blocks": blocks}
    _resolve(data, config.width)
    if config.kind == "decoder":
        _without_later_keys(data)
    if data["position"].get("length", 0) is None:
        data["position"]["length"] = sizes.length
    return data


def _resolve(data: Any, width: int) -> None:
    """Replace, in data and everything in it, each null that stands for another value."""
    if isinstance(data, list):
        for part in data:
            _resolve(part, width)
        return
    if not isinstance(data, dict):
        return
    if data.get("kind") == "gated":
        data["hidden"] = gated_hidden(data["hidden"], width)
    if data.get("kind") == "dense":
        data["hidden"] = data["hidden"] or 4 * width
    if data.get("method") == "yarn":
        data["attention_factor"] = data["attention_factor"] or 0.1 * math.log(data["factor"]) + 1.0
    if "heads" in data:
        _resolve_heads(data, width)
    for part in data.values():
        _resolve(part, width)


def _resolve_heads(mixer: Data, width: int) -> None:
    if "head_width" in mixer:
        inner = 2 * width if mixer["kind"] == "mamba2" else width
        mixer["head_width"] = mixer["head_width"] or inner // mixer["heads"]
    for key, other in (
        ("kv_heads", "heads"),
        ("value_width", "head_width"),
        ("output_bias", "bias"),
    ):
        if key in mixer and mixer[key] is None:
            mixer[key] = mixer[other]
    if mixer.get("shared_qk") is None and "shared_qk" in mixer:
        mixer["shared_qk"] = False
    if mixer.get("scale", 0) is None and mixer["kind"] != "mla":
        mixer["scale"] = mixer["head_width"] ** -0.5
    if mixer.get("qk_norm", 0) is None:
        mixer["qk_norm_over"] = "head"


def _without_later_keys(data: Any) -> None:
    """Take the tokens after the query out of every window: a causal model sees none."""
    if isinstance(data, list):
        for part in data:
            _without_later_keys(part)
    elif isinstance(data, dict):
        if data.get("kind") == "band":
            data["right"] = 0
        for part in data.values():
            _without_later_keys(part)
