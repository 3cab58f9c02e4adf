"""Rules of a stack for layers that differ, and rotary positions as transformers has them, both ways."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from xscale.convert.hf.architecture import Data, Requirements

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
