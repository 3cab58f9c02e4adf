"""The families of interchangeable parts, by name."""

import importlib
from typing import Any

from xscale.core.registry import Family

FAMILIES = {
    "model": "xscale.nn.model.model:MODELS",
    "mixer": "xscale.nn.mixer.mixer:MIXERS",
    "core": "xscale.nn.attention.core:CORES",
    "pattern": "xscale.nn.pattern.pattern:PATTERNS",
    "position": "xscale.nn.position.position:POSITIONS",
    "norm": "xscale.nn.norm.norm:NORMS",
    "residual": "xscale.nn.residual.residual_stream:RESIDUALS",
    "ffn": "xscale.nn.ffn.ffn:FFNS",
    "router": "xscale.nn.ffn.moe.router.router:ROUTERS",
    "objective": "xscale.objective.objective:OBJECTIVES",
    "optimizer": "xscale.optim.optimizer.optimizer:OPTIMIZERS",
    "schedule": "xscale.optim.schedule:SCHEDULES",
    "source": "xscale.data.source.source:SOURCES",
    "tokenizer": "xscale.data.tokenizer.tokenizer:TOKENIZERS",
}
"""Name of each family -> its registry, as module:attribute: the only list of them, in the order of `xscale list`."""


def family_named(name: str) -> Family[Any]:
    """Return the family of that name; imports its package and nothing else. KeyError for an unknown name."""
    module, _, attribute = FAMILIES[name].partition(":")
    family: Family[Any] = getattr(importlib.import_module(module), attribute)
    return family


def families() -> dict[str, Family[Any]]:
    """Return every family by name."""
    return {name: family_named(name) for name in FAMILIES}
