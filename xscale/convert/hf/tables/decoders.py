"""Entries that tables of decoders have in common: sliding windows, rotary positions, weights of balance losses."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from xscale.convert.hf.architecture import Data, Requirements
from xscale.convert.hf.layers import METHODS, rope_from_hf, rope_to_hf
from xscale.convert.hf.tables.keys import (
    ByLayer,
    KeyMapping,
    LayerKinds,
    Reading,
    SameKey,
    Table,
    Writing,
    distinct,
    misfits,
    names_in,
    one_value,
    read_table,
    write_table,
)
from xscale.core.config import decode, encode
from xscale.core.requirements import divisors_of
from xscale.nn.position.rope import Rope as RopePosition

FULL, LOCAL = "full_attention", "sliding_attention"
CORE = {"kind": "softmax"}


@dataclass(frozen=True)
class WindowKey(KeyMapping):
    """An attention core with a sliding window; softmax where the window is none, or longer than every text."""

    full: Table = field(default_factory=lambda: CORE)
    """Table of the core without a window; the other has its keys too."""
    some: bool = False
    """Whether the layers are those of some kind: then the window is a number always."""
    key: str = "sliding_window"

    @property
    def local(self) -> Table:
        pattern = {"kind": "band", "left": _Left(self.key), "right": 0}
        return {**self.full, "kind": "block_sparse", "pattern": pattern}

    def read(self, reading: Reading, name: str) -> Any:
        window, length = reading.data.get(self.key), reading.data.get("max_position_embeddings")
        used = reading.data.get("use_sliding_window", True)
        has_window = used and window and window < length
        return read_table(self.local if has_window else self.full, reading, name)

    def write(self, values: Sequence[Any], path: str, writing: Writing) -> None:
        kinds = distinct(value["kind"] for value in values)
        if len(kinds) > 1 and set(kinds) == {"softmax", "block_sparse"}:
            what = f"{writing.require.architecture} has the same window in all layers"
            fix = "A stack whose blocks have one core would map."
            writing.require.reject("model.stack.rules", what, fix)
        elif kinds == ["block_sparse"]:
            write_table(self.local, values, path, writing)
        elif writing.require.one_of(path, kinds[0], "softmax", "block_sparse"):
            writing.put(self.key, writing.sizes.length if self.some else None, path)
            write_table(self.full, values, path, writing)

    def misfit(self, value: Any) -> int:
        return min(misfits(self.full, value), misfits(self.local, value))

    def names(self) -> set[str]:
        return {self.key, *names_in(self.full)}


@dataclass(frozen=True)
class _Left(KeyMapping):
    """Tokens before the query in a window, which counts its own too."""

    key: str

    def read(self, reading: Reading, name: str) -> int:
        return int(reading.data[self.key]) - 1

    def write(self, values: Sequence[Any], path: str, writing: Writing) -> None:
        windows = [value + 1 for value in distinct(values)]
        if len(windows) > 1:
            sizes = ", ".join(map(str, sorted(windows)))
            what = f"{writing.require.architecture} has one size of window, not {sizes}"
            fix = f"Windows of {min(windows)} in all of these layers would map."
            writing.require.reject("model.stack.rules", what, fix)
        writing.put(self.key, windows[0], path)


def _types(data: Data) -> Sequence[str]:
    return data.get("layer_types") or [LOCAL] * data["num_hidden_layers"]


LAYER_TYPES = LayerKinds(_types, lambda kinds: {"layer_types": list(kinds)})


def some_windows(further: Callable[[Sequence[str]], Data]) -> ByLayer:
    """Return the cores of layers with and without a window, with further keys that follow from their kinds."""
    kinds = LayerKinds(_types, lambda kinds: {"layer_types": list(kinds), **further(kinds)})
    return ByLayer(kinds, {FULL: CORE, LOCAL: WindowKey(some=True)})


def _first_window(kinds: Sequence[str]) -> Data:
    # Readers that do not know `layer_types` count the first layers, which have no window.
    first = kinds.index(LOCAL) if LOCAL in kinds else len(kinds)
    return {"use_sliding_window": LOCAL in kinds, "max_window_layers": first}


SOME_WINDOWS = some_windows(_first_window)
"""The core of Qwen2, whose config.json also says from which layer on there are windows."""


def windows_by_layer(full: Table = None, local: Table = None) -> ByLayer:
    """Return the mixers, or cores, of layers with and without a window; by default those of softmax."""
    return ByLayer(LAYER_TYPES, {FULL: full or CORE, LOCAL: local or WindowKey(some=True)})


def longest_window(config: Any) -> int:
    """Return a length of which twice is more than every window of the model, in tokens; 0 without windows."""
    mixers = [config.stack.block_config(layer).mixer for layer in range(config.stack.depth)]
    cores = [mixer.core for mixer in mixers if hasattr(mixer, "core")]
    longest = max((c.pattern.left + 1 for c in cores if c.kind == "block_sparse"), default=0)
    return longest // 2 + 64 if longest else 0


@dataclass(frozen=True)
class RopeKeys(KeyMapping):
    """Rotary positions, which transformers has as `rope_parameters`."""

    partial: bool = False
    """Whether a part of a head may be rotated."""
    methods: Sequence[str] = METHODS
    """Scalings of the frequencies."""
    section: str = ""
    """Name of the section of `rope_parameters`, where each kind of layer has one."""
    also: str = ""
    """That of another section with these, until its own are written."""

    def read(self, reading: Reading, name: str) -> Data:
        data = reading.data
        rope = data.get("rope_parameters") or {"rope_theta": data.get("rope_theta") or 10000.0}
        if self.section:
            rope = rope[self.section]
        return rope_from_hf(rope, data, reading.require, partial=self.partial, methods=self.methods)

    def write(self, values: Sequence[Any], path: str, writing: Writing) -> None:
        value, require = one_value(values, path, writing), writing.require
        if value is None and self.section:
            value = encode(writing.config.position)
        if not require.one_of(path, None if value is None else value["kind"], "rope"):
            return
        scaling = value["scaling"]
        method = None if scaling is None else scaling["method"]
        if not require.one_of(f"{path}.scaling", method, None, *self.methods):
            return
        if not self.partial:
            require.one_of(f"{path}.fraction", value["fraction"], 1.0)
        rope = rope_to_hf(decode(RopePosition.Config, _without_kind(value)))
        if method == "yarn" and math.isclose(
            rope["attention_factor"], 0.1 * math.log(rope["factor"]) + 1.0
        ):
            # The library's default too.
            del rope["attention_factor"]
        if self.partial:
            self._check_channels(value["fraction"], path, writing)
            rope["partial_rotary_factor"] = value["fraction"]
        if method == "dynamic":
            # In this key transformers reads the original length of dynamic scaling.
            writing.put("max_position_embeddings", scaling["original_length"], path)
        if self.section:
            sections = writing.data.setdefault("rope_parameters", {})
            sections |= {name: rope for name in (self.section, self.also) if name}
            return
        writing.put("rope_parameters", rope, path)
        writing.put("rope_theta", value["base"], path)

    def _check_channels(self, fraction: float, path: str, writing: Writing) -> None:
        config = writing.config
        mixer = config.stack.block_config(0).mixer
        width = mixer.head_width or config.width // mixer.heads
        if int(width * fraction) % 2:
            what = f"{fraction} of {width} channels is an odd number"
            fix = "A fraction with an even number of channels would map."
            writing.require.reject(f"{path}.fraction", what, fix)

    def misfit(self, value: Any) -> int:
        if value is None:
            return int(not self.section)
        return int(value["kind"] != "rope")

    def names(self) -> set[str]:
        return {"rope_parameters", "rope_theta"}


def _without_kind(value: Data) -> Data:
    return {key: part for key, part in value.items() if key != "kind"}


@dataclass(frozen=True)
class AuxLossKey(KeyMapping):
    """The weight of a load-balancing loss: transformers' pools the sparse layers and counts each of the top_k choices.

    xscale's is the sum of the layers' losses, with fractions that sum to 1.
    """

    sparse: LayerKinds | None = None
    """Kinds of the layers, of which the sparse ones are called so; None: all are sparse."""
    key: str = "router_aux_loss_coef"
    top_k: str = "num_experts_per_tok"

    def read(self, reading: Reading, name: str) -> float:
        data = reading.data
        layers = data["num_hidden_layers"]
        if self.sparse is not None:
            layers = list(self.sparse.from_hf(data)).count("sparse")
        return float(data.get(self.key) or 0) * int(data[self.top_k]) / int(layers)

    def write(self, values: Sequence[Any], path: str, writing: Writing) -> None:
        weight = one_value(values, path, writing)
        top_k = writing.data[self.top_k]
        writing.put(self.key, weight * len(values) / top_k, path)

    def names(self) -> set[str]:
        return {self.key}


AUX_LOSS = (
    "router_aux_loss_coef: xscale's weight is the coefficient times top_k / layers, for the same pull on an even load; "
    "transformers' loss pools the layers and counts each of the top_k choices, and xscale's is the sum of the layers' "
    "losses, with fractions that sum to 1"
)


def heads_divide_width(config: Any, require: Requirements) -> None:
    """Record a problem if the library, which checks it or takes width / heads for the head width, refuses the heads."""
    heads = config.stack.block_config(0).mixer.heads
    require.one_of("model.stack.block.mixer.heads", heads, *divisors_of(config.width))


def heads_give_width(config: Any, require: Requirements) -> None:
    """Record a problem if the head width is null and the heads do not divide the width."""
    mixer = config.stack.block_config(0).mixer
    if mixer.head_width is None and config.width % mixer.heads:
        what = "they do not divide the width"
        require.reject("model.stack.block.mixer.heads", what, "Give head_width.")


@dataclass(frozen=True)
class InverseSqrtKey(KeyMapping):
    """A factor of the scores that is 1 / sqrt of a whole number in config.json."""

    key: str

    def read(self, reading: Reading, name: str) -> float:
        return float(reading.data[self.key] ** -0.5)

    def write(self, values: Sequence[Any], path: str, writing: Writing) -> None:
        scale = one_value(values, path, writing)
        scalar: float = scale**-2
        if not math.isclose(scalar, round(scalar), rel_tol=1e-6):
            what = f"{scale} is 1 / sqrt({scalar:.6g})"
            writing.require.reject(path, what, "1 / sqrt of a whole number would map.")
        writing.put(self.key, round(scalar), path)

    def names(self) -> set[str]:
        return {self.key}


def experts(count: str = "num_experts", hidden: str = "moe_intermediate_size") -> Table:
    """Return the table of a mixture of SwiGLU experts behind a top-k router."""
    return {
        "kind": "moe",
        "experts": SameKey(count, "=num_local_experts"),
        "router": {
            "kind": "topk",
            "top_k": SameKey("num_experts_per_tok"),
            "normalise": SameKey("norm_topk_prob"),
            "aux_loss_weight": AuxLossKey(),
        },
        "expert": {"kind": "gated", "gate": "swiglu", "hidden": SameKey(hidden)},
    }
