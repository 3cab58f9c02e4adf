"""The models on which layouts are compared with one process: small, with everything that a layout could get wrong."""

import copy
from typing import Any

Model = dict[str, Any]

ATTENTION: Model = {"kind": "attention", "heads": 4, "kv_heads": 2}
DENSE: Model = {
    "kind": "decoder",
    "width": 32,
    "dropout": 0.1,
    "stack": {
        "depth": 4,
        "block": {
            "mixer": {"kind": "attention", "heads": 4, "kv_heads": 1, "bias": True, "qk_norm": {"kind": "rms"}},
            "ffn": {"kind": "gated", "hidden": 48, "bias": True},
            "norm": {"kind": "layer"},
            "dropout": 0.1,
        },
        "rules": [{"every": 2, "at": 1, "ffn": {"kind": "dense", "hidden": 64, "bias": True}}],
    },
}
"""Tied; one key head, fewer than any tp; biases before and behind sums; two kinds of ffn."""

MOE: Model = {
    "kind": "moe",
    "experts": 4,
    "capacity_factor": 1.25,
    "router": {"kind": "topk", "jitter": 0.05, "z_loss_weight": 0.01, "aux_loss_weight": 0.1, "bias_update_rate": 0.01},
    "expert": {"kind": "dense", "hidden": 16, "bias": True},
    "shared": {"kind": "gated", "hidden": 16},
    "shared_combine": "softmax",
}
MIXTURE: Model = {
    "kind": "decoder",
    "width": 32,
    "tied": False,
    "position": {"kind": "learned"},
    "stack": {
        "depth": 4,
        "block": {
            "mixer": ATTENTION,
            "ffn": {"kind": "gated", "hidden": 48},
            "residual": "sandwich",
            "dropout": 0.1,
        },
        "rules": [{"every": 2, "at": 1, "ffn": MOE}],
    },
}
"""Experts that drop rows, with losses, noise, a bias that follows the load, and a dense part beside them."""

PAIR: Model = {
    "kind": "encoder_decoder",
    "width": 32,
    "dropout": 0.1,
    "position": {"kind": "alibi"},
    "encoder": {
        "depth": 2,
        "block": {"mixer": ATTENTION, "ffn": {"kind": "dense", "hidden": 48}, "dropout": 0.1},
    },
    "decoder": {
        "depth": 3,
        "block": {
            "mixer": ATTENTION,
            "cross": {"kind": "attention", "heads": 4, "bias": True},
            "ffn": {"kind": "dense", "hidden": 48},
            "residual": "post",
            "dropout": 0.1,
        },
    },
}
"""One table for both ways in and the head; two stacks with different norms; a memory that every block reads."""


def changed(model: Model, **values: Any) -> Model:
    """A copy in which `stack__block__mixer__heads=2` has set that key; a number is a place in a list."""
    made = copy.deepcopy(model)
    for path, value in values.items():
        *way, last = path.split("__")
        at: Any = made
        for word in way:
            at = at[int(word)] if isinstance(at, list) else at.setdefault(word, {})
        at[last] = value
    return made


MODELS = {"dense": DENSE, "mixture": MIXTURE, "pair": PAIR}
SHALLOW = {
    "dense": changed(DENSE, stack__depth=2),
    "mixture": changed(MIXTURE, stack__depth=2),
    "pair": changed(PAIR, encoder__depth=1, decoder__depth=2),
}
"""Models with one block of each kind that they have."""
OBJECTIVES = {"decoder": "causal", "encoder": "masked", "encoder_decoder": "span", "disentangled": "disco"}
"""Objective of each kind of model."""


SPARSE = changed(
    MIXTURE,
    stack__rules__0__mixer={
        "kind": "attention",
        "heads": 4,
        "core": {"kind": "block_sparse", "block": 4, "pattern": {"kind": "bigbird"}},
    },
)
"""The mixture with a pattern in every second block."""
