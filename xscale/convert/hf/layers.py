"""Layers of decoders that differ in sliding windows or feed-forward parts, and their rotary positions, both ways."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from xscale.convert.hf.architecture import Data, Requirements
from xscale.core.config import encode

CORE = "model.stack.block.mixer.core"
METHODS = ("linear", "dynamic", "llama3", "yarn")
HF_NAMES = {
    "original_length": "original_max_position_embeddings",
    "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor",
    "attention_factor": "attention_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
}
"""Keys of a RoPE scaling: name in xscale -> name in transformers."""


def layer_blocks(
    stack: Any, require: Requirements, path: str, may_differ: Sequence[str] = ()
) -> list[Any]:
    """Return the config of each block; record a problem if they differ in other keys than `may_differ`.

    Such a key is dotted: "ffn", "mixer.core".
    """
    blocks = [stack.block_config(layer) for layer in range(stack.depth)]
    if any(_without(block, may_differ) != _without(blocks[0], may_differ) for block in blocks):
        what = f"{require.architecture} needs equal blocks"
        if may_differ:
            what += f", apart from {' and '.join(may_differ)}"
        require.reject(f"{path}.rules", what, "A stack without rules would map.")
    return blocks


def _without(block: Any, keys: Sequence[str]) -> Data:
    data = encode(block)
    for key in keys:
        *parents, last = key.split(".")
        inner = data
        for parent in parents:
            inner = inner[parent]
        inner.pop(last, None)
    return data


def layer_rules(parts: Sequence[Data], name: str) -> list[Data]:
    """Return a stack's rules for the layers whose part `name` differs from the first layer's.

    The rules have a period if the layers repeat, otherwise there is one for each group of consecutive layers.
    """
    for period in range(2, len(parts) // 2 + 1):
        if all(part == parts[layer % period] for layer, part in enumerate(parts)):
            first = parts[:period]
            return [
                {"every": period, "at": at, name: part}
                for at, part in enumerate(first)
                if part != parts[0]
            ]
    rules: list[Data] = []
    at = 0
    for _, group in groupby(parts, key=repr):
        start, at = at, at + len(list(group))
        if parts[start] != parts[0]:
            rules.append({"first": start, "last": at, name: parts[start]})
    return rules


def windows_of(blocks: Sequence[Any], require: Requirements) -> list[int | None]:
    """Return the sliding window of each block: keys that a query sees, its own with them; None: all earlier keys."""
    windows: list[int | None] = []
    for block in blocks:
        core = block.mixer.core
        if core.kind == "softmax":
            windows.append(None)
        elif not require.one_of(CORE, core.kind, "softmax", "block_sparse"):
            return [None] * len(blocks)
        elif require.one_of(f"{CORE}.pattern", core.pattern.kind, "band"):
            windows.append(core.pattern.left + 1)
        else:
            return [None] * len(blocks)
    return windows


def one_window(windows: Sequence[int | None], require: Requirements) -> int | None:
    """Return the window of all layers; record a problem if they differ."""
    if len(set(windows)) > 1:
        what = f"{require.architecture} has the same window in all layers"
        require.reject("model.stack.rules", what, "A stack whose blocks have one core would map.")
    return windows[0]


def window_of_some(windows: Sequence[int | None], require: Requirements) -> int | None:
    """Return the window of the layers that have one; record a problem if there are several."""
    sizes = sorted({window for window in windows if window is not None})
    if len(sizes) > 1:
        what = f"{require.architecture} has one size of window, not {', '.join(map(str, sizes))}"
        require.reject(
            "model.stack.rules", what, f"Windows of {sizes[0]} in all of these layers would map."
        )
    return sizes[0] if sizes else None


def layer_types(windows: Sequence[int | None]) -> list[str]:
    """Name each layer's attention as transformers does."""
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def hf_windows(data: Data, require: Requirements) -> list[int | None]:
    """Return the window of each layer of a config.json; None: no window, or none smaller than the longest sequence."""
    depth, window = data["num_hidden_layers"], data.get("sliding_window")
    if (
        not data.get("use_sliding_window", True)
        or not window
        or window >= data["max_position_embeddings"]
    ):
        window = None
    types = data.get("layer_types") or ["sliding_attention"] * depth
    for kind in types:
        if not require.one_of("layer_types", kind, "full_attention", "sliding_attention"):
            return [None] * depth
    return [window if kind == "sliding_attention" else None for kind in types]


def expert_count(data: Data) -> int:
    """Return the number of experts of a config.json, which has one of two names."""
    return int(data["num_local_experts"] if "num_local_experts" in data else data["num_experts"])


def is_sparse(data: Data, layer: int) -> bool:
    """Return whether a layer of Qwen3-MoE has experts."""
    dense = layer in (data["mlp_only_layers"] or []) or expert_count(data) == 0
    return not dense and (layer + 1) % data["decoder_sparse_step"] == 0


def core_of(window: int | None, soft_cap: float | None = None) -> Data:
    """Return the core of a layer with that window."""
    cap = {} if soft_cap is None else {"soft_cap": soft_cap}
    if window is None:
        return {"kind": "softmax", **cap}
    return {
        "kind": "block_sparse",
        "pattern": {"kind": "band", "left": window - 1, "right": 0},
        **cap,
    }


def longest_window(config: Any) -> int:
    """Return a length of which twice is more than every window of the model, in tokens; 0 without windows."""
    cores = [config.stack.block_config(layer).mixer.core for layer in range(config.stack.depth)]
    longest = max(core.pattern.left + 1 if core.kind == "block_sparse" else 0 for core in cores)
    return longest // 2 + 64 if longest else 0


def rope_to_hf(position: Any) -> Data:
    """Return transformers' `rope_parameters` of a position of kind rope, without its partial rotation."""
    scaling = position.scaling
    base = {"rope_theta": position.base}
    if scaling is None:
        return {"rope_type": "default", **base}
    keys: Data = {"rope_type": scaling.method, **base, "factor": scaling.factor}
    read = {
        "linear": (),
        "dynamic": (),
        "llama3": ("original_length", "low_frequency", "high_frequency"),
        "yarn": ("original_length", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    }[scaling.method]
    values = {HF_NAMES[name]: getattr(scaling, name) for name in read}
    return keys | {name: value for name, value in values.items() if value is not None}


def dynamic_length(position: Any) -> Data:
    """Return the config.json key in which transformers reads the original length of dynamic scaling."""
    scaling = position.scaling
    if scaling is None or scaling.method != "dynamic":
        return {}
    return {"max_position_embeddings": scaling.original_length}


def rope_from_hf(
    rope: Data,
    data: Data,
    require: Requirements,
    *,
    partial: bool = False,
    methods: Sequence[str] = METHODS,
) -> Data:
    """Return the position section of transformers' `rope_parameters` within a config.json."""
    at = "rope_parameters"
    method = rope.get("rope_type", "default")
    if not require.one_of(f"{at}.rope_type", method, "default", *methods):
        return {"kind": "rope"}
    section: Data = {"kind": "rope", "base": float(rope["rope_theta"])}
    fraction = rope.get("partial_rotary_factor", 1.0)
    if partial:
        section["fraction"] = float(fraction)
        channels = int(
            (data.get("head_dim") or data["hidden_size"] // data["num_attention_heads"]) * fraction
        )
        if channels % 2:
            what = (
                f"{channels} rotated channels of a head are an odd number, and xscale rotates pairs"
            )
            require.reject(
                f"{at}.partial_rotary_factor", what, "A fraction with an even number would map."
            )
    else:
        require.one_of(f"{at}.partial_rotary_factor", fraction, 1.0)
    if method == "default":
        return section
    scaling: Data = {"method": method, "factor": rope.get("factor")}
    if method == "dynamic":
        scaling["original_length"] = data["max_position_embeddings"]
    if method in ("llama3", "yarn"):
        names = (
            ("original_length", "low_frequency", "high_frequency")
            if method == "llama3"
            else ("original_length",)
        )
        scaling |= {name: rope[HF_NAMES[name]] for name in names}
    if method == "yarn":
        scaling |= _yarn_from_hf(rope, data)
    scaling |= {
        name: float(scaling[name]) for name in scaling if name.endswith(("frequency", "factor"))
    }
    if scaling["factor"] < 1:
        require.reject(
            f"{at}.factor",
            f"xscale needs a factor of at least 1, not {scaling['factor']}",
            "1 would map.",
        )
    return section | {"scaling": scaling}


def _yarn_from_hf(rope: Data, data: Data) -> Data:
    factor = (
        rope.get("factor")
        or data["max_position_embeddings"] / rope["original_max_position_embeddings"]
    )
    gain = rope.get("attention_factor")
    both = rope.get("mscale"), rope.get("mscale_all_dim")
    if gain is None and all(both):
        numerator, denominator = (
            0.1 * float(scale) * math.log(factor) + 1 if factor > 1 else 1.0  # type: ignore[arg-type]
            for scale in both
        )
        gain = numerator / denominator
    keys: Data = {
        "factor": factor,
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        "truncate": bool(rope.get("truncate", True)),
    }
    return keys if gain is None else keys | {"attention_factor": float(gain)}
